// Conversions, rounding and clamping for loops that the compiler vectorises.
//
// The anonymous namespace is load-bearing: each file that includes this has its own compiler flags,
// and a shared inline function would let the linker keep, say, the AVX-512 copy for everyone.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/float16.h"

namespace narrowgauge {
namespace {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// By masks: where one of the two is a float's, a conditional would be compiled to a branch (the
// addition might trap), and the loop around it not be vectorised.
inline std::uint32_t select(bool chosen, std::uint32_t then, std::uint32_t otherwise) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(chosen);
  return (then & mask) | (otherwise & ~mask);
}

template <typename T>
struct Numeric {
  static T widen(T value) { return value; }
  static T narrow(T value) { return value; }
  static T zero_if(bool chosen, T value) { return chosen ? T(0) : value; }
};

template <>
struct Numeric<Half> {
  static Half zero_if(bool chosen, Half value) {
    return {static_cast<std::uint16_t>(chosen ? 0u : value.bits)};
  }
  static float widen(Half value) {
    const std::uint32_t magnitude = value.bits & 0x7fffu;
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
    const std::uint32_t rebias = 112u << 23;
    const std::uint32_t normal =
        (magnitude << 13) + (magnitude >= 0x7c00u ? rebias + rebias : rebias);
    const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) *
                            5.9604644775390625e-8f;  // 2^-24
    return float_of(select(magnitude < 0x0400u, bits_of(subnormal), normal) | sign);
  }
  // Round to nearest, ties to even.
  static Half narrow(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    // In [0.5, 1) the last bit is worth 2^-24, as in a subnormal half.
    const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    std::uint32_t result = (rounded >> 13) - (112u << 10);
    result = select(magnitude < 0x38800000u, subnormal, result);
    result = select(rounded >= 0x47800000u, 0x7c00u, result);
    result = select(magnitude > 0x7f800000u, 0x7e00u, result);
    return {static_cast<std::uint16_t>(result | ((bits >> 16) & 0x8000u))};
  }
};

template <>
struct Numeric<BFloat16> {
  static BFloat16 zero_if(bool chosen, BFloat16 value) {
    return {static_cast<std::uint16_t>(chosen ? 0u : value.bits)};
  }
  static float widen(BFloat16 value) {
    return float_of(static_cast<std::uint32_t>(value.bits) << 16);
  }
  static BFloat16 narrow(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<std::uint16_t>(nan ? 0x7fc0u : rounded)};
  }
};

// Of a value in [-2^22, 2^22] ([-2^51, 2^51]), or NaN: one is 1.5 * 2^23, the other 1.5 * 2^52.
inline float round_half_even(float value) { return (value + 12582912.0f) - 12582912.0f; }
inline double round_half_even(double value) {
  return (value + 6755399441055744.0) - 6755399441055744.0;
}

template <typename A>
A clamp(A value, A low, A high) {
  const A raised = value < low ? low : value;
  return raised > high ? high : raised;
}

}  // namespace
}  // namespace narrowgauge
