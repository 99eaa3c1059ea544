// Launcher of the transposition. No torch header: this file compiles for any torch.
#include "manual_codes/cuda/manual_codes_transpose.cuh"

#include "manual_codes/cuda/manual_codes.h"
#include "manual_codes/cuda/manual_codes_lowering.h"

namespace narrowgauge {
namespace codes {
namespace {

template <int kPixels>
cudaError_t launch_tiles(const Planes& planes, const void* from, void* to, cudaStream_t stream) {
  constexpr std::int64_t kChannels = 16 * kTransposeThreads / kPixels;
  Transposition task{};
  task.from = static_cast<const unsigned char*>(from);
  task.to = static_cast<unsigned char*>(to);
  task.channels = static_cast<int>(planes.channels);
  task.padded = static_cast<int>(planes.padded());
  task.pixels = static_cast<int>(planes.pixels);
  task.tiles = static_cast<int>(divided_up(planes.pixels, kPixels));
  task.words = planes.pixels % 4 == 0 && reinterpret_cast<std::uintptr_t>(from) % 4 == 0;
  const dim3 grid(static_cast<unsigned int>(planes.images * task.tiles),
                  static_cast<unsigned int>(divided_up(planes.channels, kChannels)));
  return enqueue(transpose_codes<kPixels>, grid, kTransposeThreads, 0, stream, task);
}

}  // namespace

cudaError_t launch_transpose(const Planes& planes, const void* from, void* to,
                             cudaStream_t stream) {
  if (planes.pixels <= 16) {
    return launch_tiles<16>(planes, from, to, stream);
  }
  return planes.padded() <= 4 ? launch_tiles<1024>(planes, from, to, stream)
                             : launch_tiles<64>(planes, from, to, stream);
}

}  // namespace codes
}  // namespace narrowgauge
