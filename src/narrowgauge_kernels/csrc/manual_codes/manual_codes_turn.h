// Matrices turned about their diagonal, by 16-byte vectors that every compiler makes of whatever
// the processor has. Codes are turned 16 × 16 bytes at a time, sums and units 4 × 4 words. The
// anonymous namespace is load-bearing, as in manual_codes_expand.h. No torch header.
#pragma once

#include <cstdint>
#include <cstring>

namespace narrowgauge {
namespace codes {
namespace {

typedef std::uint8_t Bytes __attribute__((vector_size(16)));
typedef std::uint32_t Words __attribute__((vector_size(16)));

#if defined(__clang__)
inline Bytes low_bytes(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Bytes high_bytes(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}
inline Words low_words(Words a, Words b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Words high_words(Words a, Words b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#else
inline Bytes low_bytes(Bytes a, Bytes b) {
  return __builtin_shuffle(a, b,
                           Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
}
inline Bytes high_bytes(Bytes a, Bytes b) {
  return __builtin_shuffle(a, b,
                           Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
}
inline Words low_words(Words a, Words b) { return __builtin_shuffle(a, b, Words{0, 4, 1, 5}); }
inline Words high_words(Words a, Words b) { return __builtin_shuffle(a, b, Words{2, 6, 3, 7}); }
#endif

// One round of interleaving the upper half of the rows with the lower; after four rows are columns.
inline void interleave(const Bytes (&rows)[16], Bytes (&next)[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    next[2 * i] = low_bytes(rows[i], rows[i + 8]);
    next[2 * i + 1] = high_bytes(rows[i], rows[i + 8]);
  }
}

inline void turn_bytes(Bytes (&rows)[16]) {
  Bytes other[16];
  interleave(rows, other);
  interleave(other, rows);
  interleave(rows, other);
  interleave(other, rows);
}

inline void turn_words(Words (&rows)[4]) {
  for (int round = 0; round < 2; ++round) {
    const Words next[4] = {low_words(rows[0], rows[2]), high_words(rows[0], rows[2]),
                           low_words(rows[1], rows[3]), high_words(rows[1], rows[3])};
    std::memcpy(rows, next, sizeof(next));
  }
}

// 16 × 16 bytes, of which `wide` columns are stored.
inline void turn_block(const std::uint8_t* from, std::int64_t from_stride, std::uint8_t* to,
                       std::int64_t to_stride, int wide) {
  Bytes rows[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    std::memcpy(&rows[i], from + i * from_stride, sizeof(Bytes));
  }
  turn_bytes(rows);
  for (int i = 0; i < wide; ++i) {
    std::memcpy(to + i * to_stride, &rows[i], sizeof(Bytes));
  }
}

// to[place * lines + line] = from[line * places + place] for lines [first, first + count), of
// `lines` in all.
inline void turn_codes(const std::uint8_t* from, std::int64_t lines, std::int64_t places,
                       std::int64_t first, std::int64_t count, std::uint8_t* to) {
  const std::uint8_t* const end = from + lines * places;
  for (std::int64_t line = first; line < first + count; line += 16) {
    const std::int64_t high = first + count - line < 16 ? first + count - line : 16;
    for (std::int64_t place = 0; place < places; place += 16) {
      const int wide = places - place < 16 ? static_cast<int>(places - place) : 16;
      const std::uint8_t* const at = from + line * places + place;
      std::uint8_t* const there = to + place * lines + line;
      // The next line's codes come along, but for the last line's.
      if (high == 16 && end - at >= 15 * places + 16) {
        turn_block(at, places, there, lines, wide);
        continue;
      }
      for (std::int64_t i = 0; i < high; ++i) {
        for (int p = 0; p < wide; ++p) {
          there[p * lines + i] = at[i * places + p];
        }
      }
    }
  }
}

// to[column * to_stride + row] = from[row * from_stride + column] for whole fours of rows and
// columns and what is left of them.
inline void turn_units(const std::uint32_t* from, std::int64_t from_stride, std::int64_t rows,
                       std::int64_t columns, std::uint32_t* to, std::int64_t to_stride) {
  const std::int64_t whole_rows = rows / 4 * 4;
  const std::int64_t whole_columns = columns / 4 * 4;
  for (std::int64_t column = 0; column < whole_columns; column += 4) {
    for (std::int64_t row = 0; row < whole_rows; row += 4) {
      Words four[4];
      for (int i = 0; i < 4; ++i) {
        std::memcpy(&four[i], from + (row + i) * from_stride + column, sizeof(Words));
      }
      turn_words(four);
      for (int i = 0; i < 4; ++i) {
        std::memcpy(to + (column + i) * to_stride + row, &four[i], sizeof(Words));
      }
    }
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = row < whole_rows ? whole_columns : 0; column < columns; ++column) {
      to[column * to_stride + row] = from[row * from_stride + column];
    }
  }
}

}  // namespace
}  // namespace codes
}  // namespace narrowgauge
