// 16-bit floats in device code. C++14, no toolkit header: NVRTC 11.8 and nvcc 13 take it as it is.
#pragma once

namespace narrowgauge {

// 16-bit floats as bits, so that no toolkit header is needed.
struct Half {
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

template <typename T>
struct Numeric {
  using Accumulator = T;
  static __device__ T widen(T value) { return value; }
  static __device__ T narrow(T value) { return value; }
};

template <>
struct Numeric<Half> {
  using Accumulator = float;
  static __device__ float widen(Half value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
  }
  static __device__ Half narrow(float value) {
    Half result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
  }
};

template <>
struct Numeric<BFloat16> {
  using Accumulator = float;
  static __device__ float widen(BFloat16 value) {
    return __uint_as_float(static_cast<unsigned int>(value.bits) << 16);
  }
  // Round to nearest, ties to even; cvt.rn.bf16.f32 needs 8.0, and 7.0 to 7.5 are supported.
  static __device__ BFloat16 narrow(float value) {
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
      return {0x7fc0};
    }
    return {static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
};

}  // namespace narrowgauge
