// Sums of masked products as matrix products of integers: what an instruction set provides.
// No torch header.
#pragma once

#include <cstdint>

#include "manual_codes/manual_codes.h"

namespace narrowgauge {
namespace codes {

// One side of a term: factor = (code & mask) >> shift, of the type of the code.
struct Factor {
  std::uint8_t mask;
  std::uint8_t shift;
  bool is_signed;

  // Whether a factor may be negative, and whether it may be above 127.
  bool reaches_below_zero() const { return is_signed && (mask & 0x80) != 0; }
  bool reaches_above_127() const { return !is_signed && (mask & 0x80) != 0 && shift == 0; }
};

constexpr int kByteOffset = 128;

// As `turn_units` and `turn_codes` of manual_codes_turn.h.
using TurnUnits = void (*)(const std::uint32_t* from, std::int64_t from_stride, std::int64_t rows,
                           std::int64_t columns, std::uint32_t* to, std::int64_t to_stride);
using TurnCodes = void (*)(const std::uint8_t* from, std::int64_t lines, std::int64_t places,
                           std::int64_t first, std::int64_t count, std::uint8_t* to);

// What a kernel keeps of a thread's registers while it runs: AMX the configuration of its tiles.
struct alignas(64) KernelState {
  std::uint8_t bytes[64];
};

// Factors are packed along depth into units of four bytes: two int16 or four bytes. Byte kernels
// keep left factors as uint8 and right ones as int8, which those out of range are moved to:
//   stored left = factor + left_offset, stored right = factor - right_offset
// The caller corrects for it by the sums of what is stored.
struct ProductKernel {
  int rows;     // of the register tile
  int columns;
  int per_unit;  // factors in a unit: 2 (offsets are 0) or 4
  // `depth` factors to units, the last filled up with zeros; returns the sum of what is stored, where
  // it is `summed`, else 0.
  std::int64_t (*expand_left)(const std::uint8_t* codes, std::int64_t depth, const Factor& factor,
                              std::uint32_t* to, bool summed);
  std::int64_t (*expand_right)(const std::uint8_t* codes, std::int64_t depth,
                               const Factor& factor, std::uint32_t* to, bool summed);
  // tile[row, column] += coefficient * sum over units of left[row, unit] . right[unit, column],
  // modulo 2^32: left[row * left_stride + unit], right[unit * columns + column].
  void (*run)(std::int64_t units, const std::uint32_t* left, std::int64_t left_stride,
              const std::uint32_t* right, std::int32_t* tile, std::int64_t tile_stride,
              std::int32_t coefficient);
  int lanes;  // of the two below
  // tile[pixel * width + lane] += coefficient * sum over units of
  // left[offsets[unit] + pixel * width + lane] . right[unit * width + lane], modulo 2^32, for
  // `width` lanes, a multiple of `lanes`: each lane has factors of its own on both sides.
  void (*run_lanes)(std::int64_t units, const std::uint32_t* left, const std::int64_t* offsets,
                    const std::uint32_t* right, std::int64_t width, std::int64_t pixels,
                    std::int32_t* tile, std::int32_t coefficient);
  // The sum over units of left[unit] . right[unit], modulo 2^32; units is a multiple of `lanes`.
  std::uint32_t (*dot)(std::int64_t units, const std::uint32_t* left, const std::uint32_t* right);

  TurnUnits turn_units;
  TurnCodes turn_codes;

  // Around any number of `run`s on one thread, where there are such: the first keeps what it changes
  // of the thread in `state`, and the second brings that back.
  void (*begin)(KernelState* state) = nullptr;
  void (*end)(const KernelState* state) = nullptr;

  int left_offset(const Factor& factor) const {
    return per_unit == 4 && factor.reaches_below_zero() ? kByteOffset : 0;
  }
  int right_offset(const Factor& factor) const {
    return per_unit == 4 && factor.reaches_above_127() ? kByteOffset : 0;
  }

  static ProductKernel generic();
  static ProductKernel avx2();
  static ProductKernel avx512vnni();
  static ProductKernel neon();
};

}  // namespace codes
}  // namespace narrowgauge
