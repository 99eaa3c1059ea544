// Matrices turned as in manual_codes_turn.h, by vectors of 32 bytes. Included once by each
// manual_codes_<instructions>.cpp that has them; the anonymous namespace is load-bearing, as in
// manual_codes_expand.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "manual_codes/manual_codes_turn.h"

namespace narrowgauge {
namespace codes {
namespace {

inline __m256i load_words(const std::uint32_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// 8 × 8 words.
inline void turn_words_block(const std::uint32_t* from, std::int64_t from_stride, std::uint32_t* to,
                             std::int64_t to_stride) {
  __m256i pairs[8];
  for (int i = 0; i < 8; i += 2) {
    const __m256i even = load_words(from + i * from_stride);
    const __m256i odd = load_words(from + (i + 1) * from_stride);
    pairs[i] = _mm256_unpacklo_epi32(even, odd);
    pairs[i + 1] = _mm256_unpackhi_epi32(even, odd);
  }
  __m256i fours[8];  // columns i and i + 4 of the first four rows, then of the last four
  for (int half = 0; half < 8; half += 4) {
    fours[half] = _mm256_unpacklo_epi64(pairs[half], pairs[half + 2]);
    fours[half + 1] = _mm256_unpackhi_epi64(pairs[half], pairs[half + 2]);
    fours[half + 2] = _mm256_unpacklo_epi64(pairs[half + 1], pairs[half + 3]);
    fours[half + 3] = _mm256_unpackhi_epi64(pairs[half + 1], pairs[half + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * to_stride),
                        _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (i + 4) * to_stride),
                        _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31));
  }
}

// As turn_units.
inline void turn_units_wide(const std::uint32_t* from, std::int64_t from_stride, std::int64_t rows,
                            std::int64_t columns, std::uint32_t* to, std::int64_t to_stride) {
  const std::int64_t whole_rows = rows / 8 * 8;
  const std::int64_t whole_columns = columns / 8 * 8;
  for (std::int64_t column = 0; column < whole_columns; column += 8) {
    for (std::int64_t row = 0; row < whole_rows; row += 8) {
      turn_words_block(from + row * from_stride + column, from_stride, to + column * to_stride + row,
                       to_stride);
    }
  }
  turn_units(from + whole_columns, from_stride, whole_rows, columns - whole_columns,
             to + whole_columns * to_stride, to_stride);
  turn_units(from + whole_rows * from_stride, from_stride, rows - whole_rows, columns,
             to + whole_rows, to_stride);
}

// 32 lines of 16 bytes, of which `wide` are stored: lines 0-15 in the lower halves.
inline void turn_lines(const std::uint8_t* from, std::int64_t from_stride, std::uint8_t* to,
                       std::int64_t to_stride, int wide) {
  __m256i rows[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    // GCC 9 lacks _mm256_loadu2_m128i.
    const std::uint8_t* const lower = from + i * from_stride;
    const std::uint8_t* const upper = lower + 16 * from_stride;
    rows[i] = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lower))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(upper)), 1);
  }
  // One round of interleaving the upper half of the rows with the lower; after four rows are columns.
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    __m256i next[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      next[2 * i] = _mm256_unpacklo_epi8(rows[i], rows[i + 8]);
      next[2 * i + 1] = _mm256_unpackhi_epi8(rows[i], rows[i + 8]);
    }
    std::memcpy(rows, next, sizeof(next));
  }
  for (int i = 0; i < wide; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * to_stride), rows[i]);
  }
}

// As turn_codes.
inline void turn_codes_wide(const std::uint8_t* from, std::int64_t lines, std::int64_t places,
                            std::int64_t first, std::int64_t count, std::uint8_t* to) {
  const std::uint8_t* const end = from + lines * places;
  std::int64_t line = first;
  // The next line's codes come along, but for the last line's.
  for (; line + 32 <= first + count && end - (from + line * places) >= 32 * places + 16; line += 32) {
    for (std::int64_t place = 0; place < places; place += 16) {
      const int wide = places - place < 16 ? static_cast<int>(places - place) : 16;
      turn_lines(from + line * places + place, places, to + place * lines + line, lines, wide);
    }
  }
  turn_codes(from, lines, places, line, first + count - line, to);
}

}  // namespace
}  // namespace codes
}  // namespace narrowgauge
