// bf16, fp16, float32 and float64 elements without a vendor's header: the run-time compilers have none.
#ifndef HGG_NUMBERS_H
#define HGG_NUMBERS_H

#include "portable.h"

namespace hgg {

HGG_FUNCTION hgg_u32 bits_of(float value) {
  union {
    float f;
    hgg_u32 u;
  } x;
  x.f = value;
  return x.u;
}
HGG_FUNCTION float float_of(hgg_u32 bits) {
  union {
    float f;
    hgg_u32 u;
  } x;
  x.u = bits;
  return x.f;
}

// Each type: Storage as in memory, Real to compute in, both ways of conversion; rounding is once, to nearest
// even.
struct BFloat16 {
  typedef unsigned short Storage;
  typedef float Real;
  static HGG_MEMBER float widen(Storage s) { return float_of((hgg_u32)s << 16); }
  static HGG_MEMBER Storage narrow(float value) {
    const hgg_u32 bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (Storage)((bits >> 16) | 0x40u);  // NaN stays NaN, quiet
    return (Storage)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct Float16 {
  typedef unsigned short Storage;
  typedef float Real;
  static HGG_MEMBER float widen(Storage s) {
    const hgg_u32 sign = (hgg_u32)(s & 0x8000u) << 16, exponent = (s >> 10) & 31u, fraction = s & 0x3ffu;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    // Subnormal: fraction * 2^-24 is exact in float32.
    const float magnitude = (float)fraction * 5.9604644775390625e-8f;
    return float_of(sign | bits_of(magnitude));
  }
  static HGG_MEMBER Storage narrow(float value) {
    const hgg_u32 bits = bits_of(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u)
      return (Storage)(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));  // NaN stays NaN, quiet
    if (rest >= 0x47800000u) return (Storage)(sign | 0x7c00u);     // 65536 and up, infinity
    if (rest >= 0x38800000u) {  // 2^-14 and up: a normal number, or rounds to infinity
      const hgg_u32 rebased = rest - (112u << 23);
      return (Storage)(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
    }
    if (rest < 0x33000000u) return (Storage)sign;  // below 2^-25: zero
    const hgg_u32 exponent = rest >> 23, mantissa = (rest & 0x7fffffu) | 0x800000u, shift = 126 - exponent;
    const hgg_u32 kept = mantissa >> shift, lost = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    return (Storage)(sign | (kept + (lost > half || (lost == half && (kept & 1u)) ? 1u : 0u)));
  }
};

struct Float32 {
  typedef float Storage;
  typedef float Real;
  static HGG_MEMBER float widen(Storage s) { return s; }
  static HGG_MEMBER Storage narrow(float value) { return value; }
};

struct Float64 {
  typedef double Storage;
  typedef double Real;
  static HGG_MEMBER double widen(Storage s) { return s; }
  static HGG_MEMBER Storage narrow(double value) { return value; }
};

HGG_FUNCTION int bytes_of(hgg_i32 type) { return type == HGG_F64 ? 8 : type == HGG_F32 ? 4 : 2; }

template <class Type>
HGG_FUNCTION typename Type::Real read_element(hgg_u64 address, bool aligned) {
  return Type::widen(load<typename Type::Storage>(address, aligned));
}

// An element of any type, in the arithmetic of another.
template <class Real>
HGG_FUNCTION Real read_any(hgg_i32 type, hgg_u64 address, bool aligned) {
  switch (type) {
    case HGG_BF16: return (Real)read_element<BFloat16>(address, aligned);
    case HGG_F16: return (Real)read_element<Float16>(address, aligned);
    case HGG_F32: return (Real)read_element<Float32>(address, aligned);
    default: return (Real)read_element<Float64>(address, aligned);
  }
}

}  // namespace hgg

#endif
