// unverified: CUDA kernels of the convolution at positions on Volta, Turing, Ampere, Ada, Jetson | compiled for each, run on Hopper only | on such a card: nox -s gpu
// Launchers of the convolution at listed positions. No torch header: this file compiles for any torch.
#include "position_conv/cuda/position_conv.cuh"

#include <cstdint>

#include "position_conv/cuda/position_conv_launch.h"

namespace narrowgauge {
namespace position_conv {
namespace {

bool aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

// `panels` of kFilters each, from filter number `first` on.
template <int kFilters>
cudaError_t launch_panels(Task task, long long first, long long panels, cudaStream_t stream) {
  const long long tiles = divided_up(task.listed, kResults / kFilters);
  if (panels > kGridLimit / tiles) {
    return cudaErrorInvalidConfiguration;
  }
  constexpr int kThreads = kWarp * Tile<kFilters>::kSlices;
  task.first_filter = first;
  task.panels = static_cast<int>(panels);
  const bool quads = task.channels % 4 == 0 && aligned(task.rows) && aligned(task.packed);
  return enqueue(quads ? multiply_listed<kFilters, 4> : multiply_listed<kFilters, 1>,
                 tiles * panels, kThreads, stream, task);
}

}  // namespace

cudaError_t launch_position_conv(const Task& given, cudaStream_t stream) {
  Task task = given;
  if (task.listed == 0 || task.filters == 0) {
    return cudaSuccess;
  }
  task.quads_out = task.filters % 4 == 0 && aligned(task.out) && aligned(task.total);
  if (task.filters == 1) {
    return enqueue(dot_listed<kDotThreads>, divided_up(task.listed, kDotThreads / kDotGroup),
                   kDotThreads, stream, task);
  }
  // As `packed` lays them out: panels of 64, then one of 32, then one of 16, the last filled up.
  const long long padded = divided_up(task.filters, 16) * 16;
  const long long widest = padded / 64;
  cudaError_t error = cudaSuccess;
  if (widest > 0) {
    error = launch_panels<64>(task, 0, widest, stream);
  }
  long long first = widest * 64;
  if (error == cudaSuccess && padded - first >= 32) {
    error = launch_panels<32>(task, first, 1, stream);
    first += 32;
  }
  if (error == cudaSuccess && padded - first >= 16) {
    error = launch_panels<16>(task, first, 1, stream);
  }
  return error;
}

}  // namespace position_conv
}  // namespace narrowgauge
