/* The record that hipBLASLt's grouped kernels read for one GEMM of a group: hipblaslt_ext::UserArguments as
 * we write it.
 *
 * The layout was measured on hipBLASLt 7.1.1 (records lie 196 bytes apart, a number that the kernels
 * hard-code); the native shim compares it with the installed header's own struct at compile time. Plain C or
 * C++, nothing included, so that hipRTC, NVRTC, cffi-style parsers and any host compiler take it.
 *
 * Matrices are column-major. The first stride of an operand is its leading dimension, the second its batch
 * stride, both in elements and 32-bit; pointers are 64-bit device addresses.
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

/* Offset of a field in bytes. NVRTC 13.0 has no offsetof in any form, so these are the
 * measured numbers, and every other compiler asserts them. */
enum {
  HGG_OFFSET_m = 0,
  HGG_OFFSET_n = 4,
  HGG_OFFSET_batch = 8,
  HGG_OFFSET_k = 12,
  HGG_OFFSET_d = 16,
  HGG_OFFSET_c = 24,
  HGG_OFFSET_a = 32,
  HGG_OFFSET_b = 40,
  HGG_OFFSET_stride_d1 = 48,
  HGG_OFFSET_stride_d2 = 52,
  HGG_OFFSET_stride_c1 = 56,
  HGG_OFFSET_stride_c2 = 60,
  HGG_OFFSET_stride_a1 = 64,
  HGG_OFFSET_stride_a2 = 68,
  HGG_OFFSET_stride_b1 = 72,
  HGG_OFFSET_stride_b2 = 76,
  HGG_OFFSET_alpha = 80,
  HGG_OFFSET_beta = 96,
  HGG_OFFSET_scale_a = 112,
  HGG_OFFSET_scale_b = 120,
  HGG_OFFSET_scale_c = 128,
  HGG_OFFSET_scale_d = 136,
  HGG_OFFSET_scale_alpha_vec = 144,
  HGG_OFFSET_bias = 152,
  HGG_OFFSET_bias_type = 160,
  HGG_OFFSET_reserved = 164,
  HGG_OFFSET_e = 168,
  HGG_OFFSET_stride_e1 = 176,
  HGG_OFFSET_stride_e2 = 180,
  HGG_OFFSET_act0 = 184,
  HGG_OFFSET_act1 = 188,
  HGG_OFFSET_activation_type = 192
};

/* Word (4 bytes) at which a field starts; records are written word by word. */
#define HGG_WORD(field) (HGG_OFFSET_##field / 4)

#ifndef __CUDACC_RTC__
#define HGG_ASSERT_OFFSET(type, field, offset) \
  HGG_STATIC_ASSERT(__builtin_offsetof(type, field) == (offset), #type "." #field " is misplaced")
#else
#define HGG_ASSERT_OFFSET(type, field, offset) HGG_STATIC_ASSERT((offset) >= 0, #type "." #field)
#endif

HGG_STATIC_ASSERT(sizeof(hgg_u32) == 4 && sizeof(hgg_i32) == 4, "32-bit types");
HGG_STATIC_ASSERT(sizeof(hgg_u64) == 8 && sizeof(hgg_i64) == 8, "64-bit types");
HGG_STATIC_ASSERT(sizeof(hgg_user_arguments) == HGG_RECORD_BYTES, "the record is 196 bytes");
HGG_STATIC_ASSERT(HGG_RECORD_BYTES == 4 * HGG_RECORD_WORDS, "the record is 49 words");
HGG_ASSERT_OFFSET(hgg_user_arguments, m, HGG_OFFSET_m);
HGG_ASSERT_OFFSET(hgg_user_arguments, n, HGG_OFFSET_n);
HGG_ASSERT_OFFSET(hgg_user_arguments, batch, HGG_OFFSET_batch);
HGG_ASSERT_OFFSET(hgg_user_arguments, k, HGG_OFFSET_k);
HGG_ASSERT_OFFSET(hgg_user_arguments, d, HGG_OFFSET_d);
HGG_ASSERT_OFFSET(hgg_user_arguments, c, HGG_OFFSET_c);
HGG_ASSERT_OFFSET(hgg_user_arguments, a, HGG_OFFSET_a);
HGG_ASSERT_OFFSET(hgg_user_arguments, b, HGG_OFFSET_b);
HGG_ASSERT_OFFSET(hgg_user_arguments, stride_d1, HGG_OFFSET_stride_d1);
HGG_ASSERT_OFFSET(hgg_user_arguments, stride_d2, HGG_OFFSET_stride_d2);
HGG_ASSERT_OFFSET(hgg_user_arguments, stride_c1, HGG_OFFSET_stride_c1);
HGG_ASSERT_OFFSET(hgg_user_arguments, stride_c2, HGG_OFFSET_stride_c2);
HGG_ASSERT_OFFSET(hgg_user_arguments, stride_a1, HGG_OFFSET_stride_a1);
HGG_ASSERT_OFFSET(hgg_user_arguments, stride_a2, HGG_OFFSET_stride_a2);
HGG_ASSERT_OFFSET(hgg_user_arguments, stride_b1, HGG_OFFSET_stride_b1);
HGG_ASSERT_OFFSET(hgg_user_arguments, stride_b2, HGG_OFFSET_stride_b2);
HGG_ASSERT_OFFSET(hgg_user_arguments, alpha, HGG_OFFSET_alpha);
HGG_ASSERT_OFFSET(hgg_user_arguments, beta, HGG_OFFSET_beta);
HGG_ASSERT_OFFSET(hgg_user_arguments, scale_a, HGG_OFFSET_scale_a);
HGG_ASSERT_OFFSET(hgg_user_arguments, scale_b, HGG_OFFSET_scale_b);
HGG_ASSERT_OFFSET(hgg_user_arguments, scale_c, HGG_OFFSET_scale_c);
HGG_ASSERT_OFFSET(hgg_user_arguments, scale_d, HGG_OFFSET_scale_d);
HGG_ASSERT_OFFSET(hgg_user_arguments, scale_alpha_vec, HGG_OFFSET_scale_alpha_vec);
HGG_ASSERT_OFFSET(hgg_user_arguments, bias, HGG_OFFSET_bias);
HGG_ASSERT_OFFSET(hgg_user_arguments, bias_type, HGG_OFFSET_bias_type);
HGG_ASSERT_OFFSET(hgg_user_arguments, reserved, HGG_OFFSET_reserved);
HGG_ASSERT_OFFSET(hgg_user_arguments, e, HGG_OFFSET_e);
HGG_ASSERT_OFFSET(hgg_user_arguments, stride_e1, HGG_OFFSET_stride_e1);
HGG_ASSERT_OFFSET(hgg_user_arguments, stride_e2, HGG_OFFSET_stride_e2);
HGG_ASSERT_OFFSET(hgg_user_arguments, act0, HGG_OFFSET_act0);
HGG_ASSERT_OFFSET(hgg_user_arguments, act1, HGG_OFFSET_act1);
HGG_ASSERT_OFFSET(hgg_user_arguments, activation_type, HGG_OFFSET_activation_type);

#endif
