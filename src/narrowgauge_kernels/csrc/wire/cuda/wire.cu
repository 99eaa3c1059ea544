// unverified: CUDA wire-format kernels on Volta, Turing, Ampere, Ada, Jetson | compiled for each, run on Hopper only | on such a card: nox -s gpu
// Launchers of the int8 wire format. No torch header: this file compiles for any torch.
#include "wire/cuda/wire.cuh"

#include <cstdint>

#include "wire/cuda/wire.h"

namespace narrowgauge {
namespace wire {
namespace {

// A block has a channel to itself up to so many elements: then it takes no longer than two more
// launches would. Of rows, whose elements are far apart, up to so few.
constexpr long long kOwnChannel = 1LL << 16;
constexpr long long kOwnRows = 1LL << 10;
// So many blocks, and so many threads down the rows, keep a large GPU busy.
constexpr long long kBusyBlocks = 2048;
constexpr long long kBusyThreads = 1LL << 17;

long long divide_up(long long value, long long by) { return (value + by - 1) / by; }
long long at_least(long long least, long long value) { return value < least ? least : value; }
long long at_most(long long most, long long value) { return value > most ? most : value; }

bool aligned(const void* pointer, int bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

bool has_own_blocks(const Extent& extent) {
  const long long each = extent.samples * extent.spatial;
  return extent.rows ? extent.spatial == 1 && each <= kOwnRows : each <= kOwnChannel;
}

long long count_of(const Extent& extent) {
  return extent.samples * extent.channels * extent.spatial;
}

template <typename T, int Lanes>
cudaError_t launch_own(const Packing<T>& task, cudaStream_t stream) {
  const long long packs = task.samples * (task.spatial / Lanes);
  const long long threads = at_most(kMostThreads, divide_up(packs, 32) * 32);
  pack_channel<T, Lanes><<<static_cast<unsigned int>(task.channels),
                           static_cast<unsigned int>(threads), 0, stream>>>(task);
  return cudaGetLastError();
}

template <typename T, int Lanes>
cudaError_t launch_split(const Packing<T>& task, cudaStream_t stream) {
  const long long packs = task.samples * (task.spatial / Lanes);
  const long long worth = divide_up(packs, 2 * kBatch * kThreads);
  const long long busy = at_least(1, kBusyBlocks / task.channels);
  const int splits = static_cast<int>(at_most(busy, worth));
  const long long share = divide_up(packs, splits);
  const unsigned int blocks = static_cast<unsigned int>(task.channels * splits);
  largest_split<T, Lanes><<<blocks, kThreads, 0, stream>>>(task, splits, share);
  pack_split<T, Lanes><<<blocks, kThreads, 0, stream>>>(task, splits, share);
  return cudaGetLastError();
}

template <typename T, int Lanes>
cudaError_t launch_rows(const Packing<T>& task, cudaStream_t stream) {
  const long long columns = task.channels / Lanes;
  const long long rows = task.samples * task.spatial;
  const long long rows_at_once = at_most(rows, divide_up(kBusyThreads, columns));
  const unsigned int blocks =
      static_cast<unsigned int>(divide_up(rows_at_once * columns, kThreads));
  largest_rows<T, Lanes><<<blocks, kThreads, 0, stream>>>(task, rows_at_once);
  pack_rows<T, Lanes><<<blocks, kThreads, 0, stream>>>(task, rows_at_once);
  return cudaGetLastError();
}

template <typename T, int Lanes>
cudaError_t launch_pack_lanes(const Packing<T>& task, const Extent& extent, cudaStream_t stream) {
  if (has_own_blocks(extent)) {
    return launch_own<T, Lanes>(task, stream);
  }
  const cudaError_t error =
      cudaMemsetAsync(task.largest, 0, task.channels * sizeof(int), stream);
  if (error != cudaSuccess) {
    return error;
  }
  return extent.rows ? launch_rows<T, Lanes>(task, stream) : launch_split<T, Lanes>(task, stream);
}

template <typename T>
cudaError_t launch_pack_typed(const PackTask& raw, cudaStream_t stream) {
  const Extent& extent = raw.extent;
  const Packing<T> task{static_cast<const T*>(raw.x), raw.values,     raw.scale,
                        raw.largest,                  extent.samples, extent.channels,
                        extent.spatial,               raw.seed,       raw.first,
                        raw.drawing};
  // A block of its own goes down a channel, in rows as well.
  const long long run =
      extent.rows && !has_own_blocks(extent) ? extent.channels : extent.spatial;
  if (run % 4 == 0 && aligned(raw.x, 4 * sizeof(T)) && aligned(raw.values, 4)) {
    return launch_pack_lanes<T, 4>(task, extent, stream);
  }
  return launch_pack_lanes<T, 1>(task, extent, stream);
}

template <typename T, int Lanes>
cudaError_t launch_unpack_lanes(const Unpacking<T>& task, cudaStream_t stream) {
  const long long blocks = divide_up(task.count / Lanes, kThreads * kBatch);
  unpack<T, Lanes><<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_unpack_typed(const UnpackTask& raw, cudaStream_t stream) {
  const Extent& extent = raw.extent;
  const Unpacking<T> task{raw.values,       raw.scale,       static_cast<T*>(raw.out),
                          count_of(extent), extent.channels, extent.rows ? 1 : extent.spatial};
  const long long run = extent.rows ? extent.channels : extent.spatial;
  // The bus wants 16 bytes of values a thread; memory would rather have what is written in a row.
  if (raw.mapped && run % 16 == 0 && aligned(raw.out, 16) && aligned(raw.values, 16)) {
    return launch_unpack_lanes<T, 16>(task, stream);
  }
  if (run % 4 == 0 && aligned(raw.out, 4 * sizeof(T)) && aligned(raw.values, 4)) {
    return launch_unpack_lanes<T, 4>(task, stream);
  }
  return launch_unpack_lanes<T, 1>(task, stream);
}

template <typename Word, int Lanes>
cudaError_t launch_copy_words(const unsigned char* x, unsigned char* out, long long bytes,
                              cudaStream_t stream) {
  const long long blocks =
      at_most(kBusyBlocks, at_least(1, divide_up(bytes / (sizeof(Word) * Lanes), kThreads)));
  copy_words<Word, Lanes>
      <<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(x, out, bytes);
  return cudaGetLastError();
}

}  // namespace

long long workspace_of(const Extent& extent) {
  return count_of(extent) == 0 || has_own_blocks(extent) ? 0 : extent.channels;
}

cudaError_t launch_pack(Element element, const PackTask& task, cudaStream_t stream) {
  if (count_of(task.extent) == 0) {
    return cudaSuccess;
  }
  switch (element) {
    case Element::kFloat32:
      return launch_pack_typed<float>(task, stream);
    case Element::kFloat16:
      return launch_pack_typed<Half>(task, stream);
    case Element::kBFloat16:
      return launch_pack_typed<BFloat16>(task, stream);
    case Element::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_unpack(Element element, const UnpackTask& task, cudaStream_t stream) {
  if (count_of(task.extent) == 0) {
    return cudaSuccess;
  }
  switch (element) {
    case Element::kFloat32:
      return launch_unpack_typed<float>(task, stream);
    case Element::kFloat16:
      return launch_unpack_typed<Half>(task, stream);
    case Element::kBFloat16:
      return launch_unpack_typed<BFloat16>(task, stream);
    case Element::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_copy(const void* x, void* out, long long bytes, cudaStream_t stream) {
  if (bytes == 0) {
    return cudaSuccess;
  }
  const unsigned char* from = static_cast<const unsigned char*>(x);
  unsigned char* to = static_cast<unsigned char*>(out);
  if (aligned(x, 16) && aligned(out, 16)) {
    return launch_copy_words<unsigned int, 4>(from, to, bytes, stream);
  }
  if (aligned(x, 4) && aligned(out, 4)) {
    return launch_copy_words<unsigned int, 1>(from, to, bytes, stream);
  }
  return launch_copy_words<unsigned char, 1>(from, to, bytes, stream);
}

}  // namespace wire
}  // namespace narrowgauge
