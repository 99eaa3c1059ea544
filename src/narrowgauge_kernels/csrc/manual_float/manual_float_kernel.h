// The innermost loops of the manual operators as functions: one Kernel per policy and instruction set.
// No torch header. A compiled functor (custom.py) is a library that gives out such a Kernel, so its
// layout is part of what that library is cached by.
#pragma once

#include <cstddef>
#include <cstdint>

#include "manual_float/manual_float.h"

namespace narrowgauge {
namespace manual {

// Rows of a micro-kernel at most: one function for each count, so that no row is filled up.
constexpr int kMostRows = 12;
// Pixels, at most, for which filters are the columns.
constexpr int kMostTurned = 4;

// A micro-kernel takes filters as rows and pixels as columns. It continues the sums in `tile`
// [rows, columns], of `tile_stride` elements to a row:
//   tile[r, c] = step(activations[d * columns + c], weights[d * rows + r], tile[r, c]), d ascending
using RunTile = void (*)(std::int64_t depth, const float* activations, const void* weights,
                         float* tile, std::int64_t tile_stride);

struct Kernel {
  int rows;     // the most, at most kMostRows
  int columns;  // always
  std::size_t weight_bytes;  // of one packed weight
  // rows x depth weights of row stride `stride` to [depth][rows].
  void (*pack_weights)(const float* from, std::int64_t stride, std::int64_t depth, int rows,
                       unsigned int kept, void* to);
  // `panels` x columns activations in a row, each panel to to + panel * panel_stride.
  void (*pack_activations)(const float* from, std::int64_t panels, unsigned int kept, float* to,
                           std::int64_t panel_stride);
  RunTile run[kMostRows + 1];  // by rows; [0] is null
  // The turned kernels, for few pixels: pixels are rows and filters columns, the same steps in the same
  // order. Operands are floats, [depth][rows] activations and [depth][turned_columns] weights.
  int turned_columns;
  // `filters` x depth weights of row stride `stride`, at most turned_columns; zeros beside them.
  void (*pack_turned)(const float* from, std::int64_t stride, std::int64_t depth, int filters,
                      unsigned int kept, float* to);
  void (*prepare_activations)(float* values, std::int64_t count, unsigned int kept);
  RunTile run_turned[kMostTurned + 1];  // by rows; [0] is null
};

// Null for kCustom, which is in a library of its own.
const Kernel* generic_kernel(Policy policy);
const Kernel* avx2_kernel(Policy policy);
const Kernel* avx512_kernel(Policy policy);
const Kernel* neon_kernel(Policy policy);

}  // namespace manual
}  // namespace narrowgauge
