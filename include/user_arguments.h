/* The record that hipBLASLt's grouped kernels read for one GEMM of a group: hipblaslt_ext::UserArguments as we write it.
 *
 * The layout was measured on hipBLASLt 7.1.1 (records lie 196 bytes apart, a number that the kernels hard-code); the native
 * shim compares it with the installed header's own struct at compile time. Plain C or C++, nothing included, so that
 * hipRTC, NVRTC, cffi-style parsers and any host compiler take it.
 *
 * Matrices are column-major. The first stride of an operand is its leading dimension, the second its batch stride, both in
 * elements and 32-bit; pointers are 64-bit device addresses.
 */
#ifndef HGG_USER_ARGUMENTS_H
#define HGG_USER_ARGUMENTS_H

/* Own names instead of <stdint.h>, which the run-time compilers do not have. */
typedef int hgg_i32;
typedef unsigned int hgg_u32;
typedef long long hgg_i64;
typedef unsigned long long hgg_u64;

#ifdef __cplusplus
#define HGG_STATIC_ASSERT(condition, text) static_assert(condition, text)
#else
#define HGG_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif

#define HGG_RECORD_BYTES 196
#define HGG_RECORD_WORDS 49

/* Four-byte packing keeps every field where it is measured and lets records lie 196 bytes apart. */
#pragma pack(push, 4)
typedef struct hgg_user_arguments {
  hgg_u32 m;
  hgg_u32 n;
  hgg_u32 batch;
  hgg_u32 k;
  hgg_u64 d;
  hgg_u64 c;
  hgg_u64 a;
  hgg_u64 b;
  hgg_u32 stride_d1;
  hgg_u32 stride_d2;
  hgg_u32 stride_c1;
  hgg_u32 stride_c2;
  hgg_u32 stride_a1;
  hgg_u32 stride_a2;
  hgg_u32 stride_b1;
  hgg_u32 stride_b2;
  hgg_u32 alpha[4]; /* 16 raw bytes: a float32 or a float64, by the compute type */
  hgg_u32 beta[4];
  hgg_u64 scale_a;
  hgg_u64 scale_b;
  hgg_u64 scale_c;
  hgg_u64 scale_d;
  hgg_u64 scale_alpha_vec;
  hgg_u64 bias;
  hgg_i32 bias_type;
  hgg_i32 reserved;
  hgg_u64 e;
  hgg_u32 stride_e1;
  hgg_u32 stride_e2;
  float act0;
  float act1;
  hgg_i32 activation_type;
} hgg_user_arguments;
#pragma pack(pop)

/* Word (4 bytes) at which a field starts; records are written word by word. */
#define HGG_WORD(field) ((int)(__builtin_offsetof(hgg_user_arguments, field) / 4))

#define HGG_AT(field, offset) \
  HGG_STATIC_ASSERT(__builtin_offsetof(hgg_user_arguments, field) == (offset), "record: " #field " is misplaced")
HGG_STATIC_ASSERT(sizeof(hgg_u32) == 4 && sizeof(hgg_i32) == 4, "32-bit types");
HGG_STATIC_ASSERT(sizeof(hgg_u64) == 8 && sizeof(hgg_i64) == 8, "64-bit types");
HGG_STATIC_ASSERT(sizeof(hgg_user_arguments) == HGG_RECORD_BYTES, "the record is 196 bytes");
HGG_STATIC_ASSERT(HGG_RECORD_BYTES == 4 * HGG_RECORD_WORDS, "the record is 49 words");
HGG_AT(m, 0);
HGG_AT(n, 4);
HGG_AT(batch, 8);
HGG_AT(k, 12);
HGG_AT(d, 16);
HGG_AT(c, 24);
HGG_AT(a, 32);
HGG_AT(b, 40);
HGG_AT(stride_d1, 48);
HGG_AT(stride_d2, 52);
HGG_AT(stride_c1, 56);
HGG_AT(stride_c2, 60);
HGG_AT(stride_a1, 64);
HGG_AT(stride_a2, 68);
HGG_AT(stride_b1, 72);
HGG_AT(stride_b2, 76);
HGG_AT(alpha, 80);
HGG_AT(beta, 96);
HGG_AT(scale_a, 112);
HGG_AT(scale_b, 120);
HGG_AT(scale_c, 128);
HGG_AT(scale_d, 136);
HGG_AT(scale_alpha_vec, 144);
HGG_AT(bias, 152);
HGG_AT(bias_type, 160);
HGG_AT(reserved, 164);
HGG_AT(e, 168);
HGG_AT(stride_e1, 176);
HGG_AT(stride_e2, 180);
HGG_AT(act0, 184);
HGG_AT(act1, 188);
HGG_AT(activation_type, 192);
#undef HGG_AT

#endif
