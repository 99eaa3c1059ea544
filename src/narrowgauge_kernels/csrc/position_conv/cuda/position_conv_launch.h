// What both launchers need. For nvcc; a test on emulated threads has an `enqueue` of its own.
#pragma once

#include "position_conv/cuda/position_conv.h"

namespace narrowgauge {
namespace position_conv {

constexpr long long kGridLimit = 2147483647;  // of the x dimension, on every capability since 3.0

inline long long divided_up(long long value, long long by) { return (value + by - 1) / by; }

#ifndef NARROWGAUGE_EMULATED_THREADS

template <typename Kernel, typename Given>
inline cudaError_t enqueue(Kernel kernel, long long blocks, int threads, cudaStream_t stream,
                           const Given& task) {
  if (blocks > kGridLimit) {
    return cudaErrorInvalidConfiguration;  // 2^36 positions
  }
  kernel<<<static_cast<unsigned int>(blocks), static_cast<unsigned int>(threads), 0, stream>>>(
      task);
  return cudaGetLastError();
}

#endif  // NARROWGAUGE_EMULATED_THREADS

}  // namespace position_conv
}  // namespace narrowgauge
