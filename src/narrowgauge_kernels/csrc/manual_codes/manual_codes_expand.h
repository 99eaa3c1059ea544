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

// Stored factors by arithmetic on bytes alone, so that a vector holds as many of them as of codes:
// of a signed code, ((code & mask) ^ sign) is the factor before its shift, plus 128.
struct Steps {
  Steps(const Factor& factor, int offset)
      : mask(factor.mask),
        sign(factor.reaches_below_zero() ? 0x80 : 0),
        shift(factor.shift),
        add(offset - (sign >> shift)) {}

  std::uint8_t mask;
  std::uint8_t sign;
  int shift;
  int add;
};

template <typename Stored>
void expand(const std::uint8_t* __restrict codes, std::int64_t depth, const Steps& steps,
            Stored* __restrict to) {
  constexpr std::int64_t kPerUnit = 4 / sizeof(Stored);
  const std::uint8_t mask = steps.mask;
  const std::uint8_t sign = steps.sign;
  const int shift = steps.shift;
  const Stored add = static_cast<Stored>(steps.add);
  if (shift == 0) {  // a vector of bytes has no shift
    for (std::int64_t d = 0; d < depth; ++d) {
      to[d] = static_cast<Stored>(static_cast<Stored>((codes[d] & mask) ^ sign) + add);
    }
  } else {
    for (std::int64_t d = 0; d < depth; ++d) {
      to[d] = static_cast<Stored>(static_cast<Stored>(((codes[d] & mask) ^ sign) >> shift) + add);
    }
  }
  for (std::int64_t d = depth; d % kPerUnit != 0; ++d) {
    to[d] = 0;
  }
}

// Of bytes, eight to a word: each of its four pairs has room for the sums of 256. `flip` turns int8
// into what is 128 more.
inline std::int64_t sum_bytes(const std::uint8_t* bytes, std::int64_t count, std::uint8_t flip) {
  constexpr std::uint64_t kEven = 0x00FF00FF00FF00FFu;
  constexpr std::int64_t kWords = 128;
  const std::uint64_t flips = flip * 0x0101010101010101u;
  std::int64_t sum = 0;
  std::int64_t at = 0;
  while (count - at >= 8) {
    const std::int64_t words = (count - at) / 8 < kWords ? (count - at) / 8 : kWords;
    std::uint64_t pairs = 0;
    for (std::int64_t i = 0; i < words; ++i) {
      std::uint64_t word;
      std::memcpy(&word, bytes + at + i * 8, sizeof(word));
      word ^= flips;
      pairs += (word & kEven) + (word >> 8 & kEven);
    }
    sum += (pairs & 0xFFFF) + (pairs >> 16 & 0xFFFF) + (pairs >> 32 & 0xFFFF) + (pairs >> 48);
    at += words * 8;
  }
  for (; at < count; ++at) {
    sum += bytes[at] ^ flip;
  }
  return sum - flip * count;
}

// For kernels of int16, of which every factor is one.
inline std::int64_t expand_words(const std::uint8_t* codes, std::int64_t depth, const Factor& factor,
                                 std::uint32_t* to, bool summed) {
  std::int16_t* const stored = reinterpret_cast<std::int16_t*>(to);
  expand(codes, depth, Steps(factor, 0), stored);
  std::int64_t sum = 0;
  for (std::int64_t d = 0; summed && d < depth; ++d) {
    sum += stored[d];
  }
  return sum;
}

// For kernels of uint8 by int8.
inline std::int64_t expand_left_bytes(const std::uint8_t* codes, std::int64_t depth,
                                      const Factor& factor, std::uint32_t* to, bool summed) {
  std::uint8_t* const stored = reinterpret_cast<std::uint8_t*>(to);
  expand(codes, depth, Steps(factor, factor.reaches_below_zero() ? kByteOffset : 0), stored);
  return summed ? sum_bytes(stored, depth, 0) : 0;
}

// Modulo 256 what is 128 more is 128 less.
inline std::int64_t expand_right_bytes(const std::uint8_t* codes, std::int64_t depth,
                                       const Factor& factor, std::uint32_t* to, bool summed) {
  std::uint8_t* const stored = reinterpret_cast<std::uint8_t*>(to);
  expand(codes, depth, Steps(factor, factor.reaches_above_127() ? kByteOffset : 0), stored);
  return summed ? sum_bytes(stored, depth, 0x80) : 0;
}

}  // namespace
}  // namespace codes
}  // namespace narrowgauge
