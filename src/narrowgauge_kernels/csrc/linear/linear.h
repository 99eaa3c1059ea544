// The innermost loops of the linear operator, one per instruction set. No torch header.
//
// What every implementation here and on the GPU computes, and the bits they agree on:
//
//   out[row, column] = round(accumulator + bias[column])
//   accumulator      = 0, then for depth = 0, 1, … in that order
//                      accumulator = fma(left[row, depth], right[column, depth], accumulator)
//
// with one accumulator per output, in fp32 (fp64 for fp64), each fma rounded once. Threads, tiles
// and vector width divide rows and columns, never depth, so they cannot change a result.
#pragma once

#include <cstdint>

namespace narrowgauge {
namespace linear {

// Continues rows × columns accumulators by `depth` steps.
//   left   packed panel, element (row, d) at left[d * rows + row]
//   right  packed panel, element (column, d) at right[d * columns + column]
//   tile   accumulators, element (row, column) at tile[row * tile_stride + column]
// All counts are in elements.
template <typename T>
struct MicroKernel {
  int rows;
  int columns;
  void (*run)(std::int64_t depth, const T* left, const T* right, T* tile, std::int64_t tile_stride);
};

template <typename T>
struct MicroKernels;

template <>
struct MicroKernels<float> {
  static MicroKernel<float> generic();
  static MicroKernel<float> avx2();
  static MicroKernel<float> avx512();
  static MicroKernel<float> neon();
};

template <>
struct MicroKernels<double> {
  static MicroKernel<double> generic();
  static MicroKernel<double> avx2();
  static MicroKernel<double> avx512();
  static MicroKernel<double> neon();
};

}  // namespace linear
}  // namespace narrowgauge
