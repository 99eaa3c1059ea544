// unverified: CUDA kernels of lists of positions on Volta, Turing, Ampere, Ada, Jetson | compiled for each, run on Hopper only | on such a card: nox -s gpu
// Launchers of lists of positions. No torch header: this file compiles for any torch.
#include "position_conv/cuda/position_list.cuh"

#include <cstdint>

#include "position_conv/cuda/position_conv_launch.h"

namespace narrowgauge {
namespace position_conv {
namespace {

constexpr long long kMarkBlocks = 4096;  // keep a large GPU busy

}  // namespace

long long list_counts(long long cells) {
  const long long blocks = divided_up(cells, kListThreads * kFlagsEach);
  return blocks > 0 ? blocks : 1;  // one has to say that there are none
}

cudaError_t launch_list(const ListTask& given, cudaStream_t stream) {
  ListTask task = given;
  task.quads = reinterpret_cast<std::uintptr_t>(task.flags) % 16 == 0;
  const long long blocks = list_counts(task.cells);
  const cudaError_t error =
      enqueue(count_flags<kListThreads>, blocks, kListThreads, stream, task);
  if (error != cudaSuccess) {
    return error;
  }
  return enqueue(place_flags<kListThreads>, blocks, kListThreads, stream, task);
}

cudaError_t launch_near(const NearTask& task, cudaStream_t stream) {
  if (task.cells == 0) {
    return cudaSuccess;
  }
  const cudaError_t error =
      cudaMemsetAsync(task.flags, 0, static_cast<std::size_t>(task.cells), stream);
  if (error != cudaSuccess || task.listed == 0) {
    return error;
  }
  const long long blocks = divided_up(task.listed, kNearThreads);
  return enqueue(mark_near<kNearThreads>, blocks < kMarkBlocks ? blocks : kMarkBlocks,
                 kNearThreads, stream, task);
}

}  // namespace position_conv
}  // namespace narrowgauge
