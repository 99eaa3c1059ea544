// Device code of the linear operator. C++14, no toolkit header: NVRTC 11.8 and nvcc 13 take it.
//
// The arithmetic is that of ../linear.h: one accumulator per output, depth ascending, fma by fma.
#pragma once

#include "common/cuda/numeric.h"

namespace narrowgauge {
namespace linear {

inline __device__ float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
inline __device__ double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

// A matrix of rows (or columns) by depth; strides in elements, 0 allowed.
template <typename T>
struct Operand {
  const T* data;
  long long extent;
  long long stride;
  long long depth_stride;
};

// out[row, column] = sum over depth of left[row, depth] * right[column, depth] (+ bias[column]).
// bias is null or right.extent long; out is contiguous.
template <typename T>
struct Task {
  Operand<T> left;
  Operand<T> right;
  const T* bias;
  T* out;
  long long depth;
};

// A block of kThreads × kThreads computes tiles of kSide × kSide outputs, kStep of depth at a time;
// each thread owns outputs kThreads apart in both directions, so neighbours touch neighbours.
constexpr int kSide = 64;
constexpr int kStep = 16;
constexpr int kThreads = 16;
constexpr int kPadding = 1;  // keeps a column of the shared tile off one memory bank

inline __host__ __device__ long long tiles_along(long long extent, int side) {
  return (extent + side - 1) / side;
}

// Copies Side × Step of an operand to shared memory, widened, zero outside the matrix. Neighbouring
// threads follow whichever direction is contiguous in memory.
template <typename T, typename Accumulator, int Side, int Step, int Count>
__device__ void load_tile(const Operand<T>& operand, long long first, long long first_depth,
                          long long depth, Accumulator (&tile)[Step][Side + kPadding]) {
  const bool along_depth = operand.depth_stride <= operand.stride;
  for (int index = threadIdx.x; index < Side * Step; index += Count) {
    const int i = along_depth ? index / Step : index % Side;
    const int d = along_depth ? index % Step : index / Side;
    const bool inside = first + i < operand.extent && first_depth + d < depth;
    const long long offset =
        (first + i) * operand.stride + (first_depth + d) * operand.depth_stride;
    tile[d][i] = inside ? Numeric<T>::widen(operand.data[offset]) : Accumulator(0);
  }
}

template <typename T, int Side, int Step, int Threads>
__global__ void __launch_bounds__(Threads* Threads) multiply_accumulate(Task<T> task) {
  using Accumulator = typename Numeric<T>::Accumulator;
  constexpr int kOwned = Side / Threads;
  __shared__ Accumulator left[Step][Side + kPadding];
  __shared__ Accumulator right[Step][Side + kPadding];
  const int thread_row = threadIdx.x / Threads;
  const int thread_column = threadIdx.x % Threads;
  const long long tiles_wide = tiles_along(task.right.extent, Side);
  const long long tiles = tiles_along(task.left.extent, Side) * tiles_wide;
  for (long long index = blockIdx.x; index < tiles; index += gridDim.x) {
    const long long first_row = index / tiles_wide * Side;
    const long long first_column = index % tiles_wide * Side;
    Accumulator sums[kOwned][kOwned] = {};
    for (long long d = 0; d < task.depth; d += Step) {
      load_tile<T, Accumulator, Side, Step, Threads * Threads>(task.left, first_row, d, task.depth,
                                                               left);
      load_tile<T, Accumulator, Side, Step, Threads * Threads>(task.right, first_column, d,
                                                               task.depth, right);
      __syncthreads();
      // Stops at the true depth: a padded step, fma(0, 0, -0), would turn a sum of -0 into +0.
      const int steps = task.depth - d < Step ? static_cast<int>(task.depth - d) : Step;
#pragma unroll 4
      for (int s = 0; s < steps; ++s) {
        Accumulator factors[kOwned];
        for (int r = 0; r < kOwned; ++r) {
          factors[r] = left[s][thread_row + r * Threads];
        }
        for (int c = 0; c < kOwned; ++c) {
          const Accumulator operand = right[s][thread_column + c * Threads];
          for (int r = 0; r < kOwned; ++r) {
            sums[r][c] = multiply_add(factors[r], operand, sums[r][c]);
          }
        }
      }
      __syncthreads();
    }
    for (int r = 0; r < kOwned; ++r) {
      for (int c = 0; c < kOwned; ++c) {
        const long long row = first_row + thread_row + r * Threads;
        const long long column = first_column + thread_column + c * Threads;
        if (row < task.left.extent && column < task.right.extent) {
          Accumulator sum = sums[r][c];
          if (task.bias != nullptr) {
            sum += Numeric<T>::widen(task.bias[column]);
          }
          task.out[row * task.right.extent + column] = Numeric<T>::narrow(sum);
        }
      }
    }
  }
}

// What linear.cu launches. Spelt out because NVRTC sees no launch and would compile none of it.
template __global__ void multiply_accumulate<float, kSide, kStep, kThreads>(Task<float>);
template __global__ void multiply_accumulate<double, kSide, kStep, kThreads>(Task<double>);
template __global__ void multiply_accumulate<Half, kSide, kStep, kThreads>(Task<Half>);
template __global__ void multiply_accumulate<BFloat16, kSide, kStep, kThreads>(Task<BFloat16>);

}  // namespace linear
}  // namespace narrowgauge
