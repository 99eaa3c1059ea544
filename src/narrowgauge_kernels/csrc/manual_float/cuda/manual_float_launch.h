// Launches the kernels of manual_float.cuh for one policy. For nvcc. A user's functor becomes a library
// by a file that includes this and the functor's, and says
//
//   NARROWGAUGE_MANUAL_CUDA(Multiply)
#pragma once

#include <cuda_runtime.h>

#include "manual_float/cuda/manual_float.cuh"

#include "manual_float/cuda/manual_float.h"

namespace narrowgauge {
namespace manual_float {
namespace launching {

constexpr long long kGridLimit = 2147483647;  // of the x dimension, on every capability since 3.0

template <typename Policy, TileKind Kind, int Unroll>
cudaError_t tiled(const Task& task, cudaStream_t stream) {
  constexpr Tile kTile = tile_of(Kind);
  if (task.plan.blocks > kGridLimit) {
    return cudaErrorInvalidConfiguration;  // 2^44 outputs
  }
  multiply_tiled<Policy, kTile.rows, kTile.filters, kTile.own, Unroll>
      <<<static_cast<unsigned int>(task.plan.blocks), threads_of(kTile), 0, stream>>>(task);
  return cudaGetLastError();
}

inline unsigned int blocks_of_outputs(const Task& task) {
  const long long blocks = divide_up(out_count(task.conv), kDirectCount);
  return static_cast<unsigned int>(blocks < kGridLimit ? blocks : kGridLimit);
}

template <typename Policy>
cudaError_t direct(const Task& task, cudaStream_t stream) {
  multiply_direct<Policy, kDirectCount><<<blocks_of_outputs(task), kDirectCount, 0, stream>>>(task);
  return cudaGetLastError();
}

inline cudaError_t finish(const Task& task, cudaError_t error, cudaStream_t stream) {
  if (error != cudaSuccess || task.plan.splits == 1) {
    return error;
  }
  add_partial<kDirectCount><<<blocks_of_outputs(task), kDirectCount, 0, stream>>>(task);
  return cudaGetLastError();
}

}  // namespace launching

template <typename Policy>
cudaError_t launch_light(const Task& task, cudaStream_t stream) {
  switch (task.plan.tile) {
    case TileKind::k128x128:
      return launching::finish(
          task, launching::tiled<Policy, TileKind::k128x128, kStep>(task, stream), stream);
    case TileKind::k128x64:
      return launching::finish(
          task, launching::tiled<Policy, TileKind::k128x64, kStep>(task, stream), stream);
    case TileKind::k128x32:
      return launching::finish(
          task, launching::tiled<Policy, TileKind::k128x32, kStep>(task, stream), stream);
    case TileKind::k64x64:
      return launching::finish(
          task, launching::tiled<Policy, TileKind::k64x64, kStep>(task, stream), stream);
    case TileKind::kDirect:
      return launching::direct<Policy>(task, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename Policy>
cudaError_t launch_middle(const Task& task, cudaStream_t stream) {
  switch (task.plan.tile) {
    case TileKind::k128x64:
      return launching::finish(
          task, launching::tiled<Policy, TileKind::k128x64, 1>(task, stream), stream);
    case TileKind::kHeavy64x32:
      return launching::finish(
          task, launching::tiled<Policy, TileKind::kHeavy64x32, 1>(task, stream), stream);
    case TileKind::kDirect:
      return launching::direct<Policy>(task, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename Policy>
cudaError_t launch_heavy(const Task& task, cudaStream_t stream) {
  switch (task.plan.tile) {
    case TileKind::kHeavy128x64:
      return launching::finish(
          task, launching::tiled<Policy, TileKind::kHeavy128x64, 1>(task, stream), stream);
    case TileKind::kHeavy64x32:
      return launching::finish(
          task, launching::tiled<Policy, TileKind::kHeavy64x32, 1>(task, stream), stream);
    case TileKind::kDirect:
      return launching::direct<Policy>(task, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace manual_float
}  // namespace narrowgauge

#define NARROWGAUGE_MANUAL_CUDA(Multiply)                                                      \
  extern "C" __attribute__((visibility("default"))) cudaError_t narrowgauge_manual_launch_cuda( \
      const narrowgauge::manual_float::Task* task, cudaStream_t stream) {                       \
    using Policy = narrowgauge::mac::Custom<Multiply>;                                          \
    return narrowgauge::manual_float::launch_heavy<Policy>(*task, stream);                      \
  }
