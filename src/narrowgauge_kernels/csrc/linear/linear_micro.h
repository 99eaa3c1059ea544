// The body of a micro-kernel over a vector type. Included once by each linear_<instructions>.cpp.
//
// The anonymous namespace is load-bearing: each including file has its own compiler flags, and a
// shared inline function would let the linker keep, say, the AVX-512 copy for everyone.
#pragma once

#include "linear/linear.h"

namespace narrowgauge {
namespace linear {
namespace {

// Lanes: Scalar, Vector, kLanes, load, store, broadcast, multiply_add(a, b, c) = fma(a, b, c).
// Rows × Vectors accumulators and Vectors + 1 operands must fit the register file.
template <typename Lanes, int Rows, int Vectors>
void micro_kernel(std::int64_t depth, const typename Lanes::Scalar* left,
                  const typename Lanes::Scalar* right, typename Lanes::Scalar* tile,
                  std::int64_t tile_stride) {
  constexpr int kColumns = Vectors * Lanes::kLanes;
  typename Lanes::Vector accumulator[Rows][Vectors];
  for (int row = 0; row < Rows; ++row) {
    for (int v = 0; v < Vectors; ++v) {
      accumulator[row][v] = Lanes::load(tile + row * tile_stride + v * Lanes::kLanes);
    }
  }
  for (std::int64_t d = 0; d < depth; ++d) {
    typename Lanes::Vector operand[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      operand[v] = Lanes::load(right + d * kColumns + v * Lanes::kLanes);
    }
    for (int row = 0; row < Rows; ++row) {
      const typename Lanes::Vector factor = Lanes::broadcast(left + d * Rows + row);
      for (int v = 0; v < Vectors; ++v) {
        accumulator[row][v] = Lanes::multiply_add(factor, operand[v], accumulator[row][v]);
      }
    }
  }
  for (int row = 0; row < Rows; ++row) {
    for (int v = 0; v < Vectors; ++v) {
      Lanes::store(tile + row * tile_stride + v * Lanes::kLanes, accumulator[row][v]);
    }
  }
}

template <typename Lanes, int Rows, int Vectors>
MicroKernel<typename Lanes::Scalar> make_micro_kernel() {
  return {Rows, Vectors * Lanes::kLanes, &micro_kernel<Lanes, Rows, Vectors>};
}

}  // namespace
}  // namespace linear
}  // namespace narrowgauge
