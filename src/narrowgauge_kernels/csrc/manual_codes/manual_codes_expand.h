// Codes to packed factors. Included once by each manual_codes_<instructions>.cpp.
//
// The anonymous namespace is load-bearing: each including file has its own compiler flags, and a
// shared inline function would let the linker keep, say, the AVX-512 copy for everyone.
#pragma once

#include <cstring>

#include "manual_codes/manual_codes_product.h"

namespace narrowgauge {
namespace codes {
namespace {

template <typename Code, typename Stored>
std::int64_t expand(const std::uint8_t* __restrict codes, std::int64_t depth, const Factor& factor,
                    int offset, Stored* __restrict to) {
  constexpr std::int64_t kPerUnit = 4 / sizeof(Stored);
  const int mask = factor.mask;
  const int shift = factor.shift;
  std::int32_t sum = 0;  // of less than 2^22 factors: the caller's blocks are far smaller
  for (std::int64_t d = 0; d < depth; ++d) {
    const int value = (static_cast<Code>(codes[d] & mask) >> shift) + offset;
    to[d] = static_cast<Stored>(value);
    sum += value;
  }
  for (std::int64_t d = depth; d % kPerUnit != 0; ++d) {
    to[d] = 0;
  }
  return sum;
}

template <typename Stored>
std::int64_t expand_any(const std::uint8_t* codes, std::int64_t depth, const Factor& factor,
                        int offset, std::uint32_t* to) {
  Stored* stored = reinterpret_cast<Stored*>(to);
  return factor.is_signed ? expand<std::int8_t>(codes, depth, factor, offset, stored)
                          : expand<std::uint8_t>(codes, depth, factor, offset, stored);
}

// For kernels of int16, of which every factor is one.
inline std::int64_t expand_words(const std::uint8_t* codes, std::int64_t depth, const Factor& factor,
                          std::uint32_t* to) {
  return expand_any<std::int16_t>(codes, depth, factor, 0, to);
}

// For kernels of uint8 by int8.
inline std::int64_t expand_left_bytes(const std::uint8_t* codes, std::int64_t depth,
                                      const Factor& factor, std::uint32_t* to) {
  const int offset = factor.reaches_below_zero() ? kByteOffset : 0;
  return expand_any<std::uint8_t>(codes, depth, factor, offset, to);
}

inline std::int64_t expand_right_bytes(const std::uint8_t* codes, std::int64_t depth,
                                       const Factor& factor, std::uint32_t* to) {
  const int offset = factor.reaches_above_127() ? -kByteOffset : 0;
  return expand_any<std::int8_t>(codes, depth, factor, offset, to);
}

}  // namespace
}  // namespace codes
}  // namespace narrowgauge
