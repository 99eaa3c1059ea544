// Device code of lists of positions: which flags are set, and what is near to listed positions. C++14,
// no toolkit header: NVRTC 11.8 and nvcc 13 take it.
//
// A block has a run of flags. One launch counts those of each run; the next one adds up what is before
// its own, which are few numbers (one for 2048 flags), and puts the places of its own in the list.
#pragma once

#include "position_conv/cuda/position_conv_primitives.h"
#include "position_conv/cuda/position_conv_task.h"

namespace narrowgauge {
namespace position_conv {

constexpr int kListThreads = 128;
constexpr int kFlagsEach = 16;  // of a thread: 16 bytes
constexpr int kNearThreads = 256;

// The sum over the block's threads up to this one; `room` then has all of them.
template <int kThreads>
inline __device__ long long sum_up_to(long long own, long long (&room)[kThreads]) {
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();  // who still reads the last sums
  room[thread] = own;
  __syncthreads();
  for (int distance = 1; distance < kThreads; distance *= 2) {
    const long long before = thread >= distance ? room[thread - distance] : 0;
    __syncthreads();
    room[thread] += before;
    __syncthreads();
  }
  return room[thread];
}

// Bit i: flag number first + i is set.
inline __device__ unsigned int flags_from(const ListTask& task, long long first) {
  const long long cells = meant(task.cells, task.limit);
  unsigned int bits = 0;
  if (task.quads && first + kFlagsEach <= cells) {
    const uint4 four = *reinterpret_cast<const uint4*>(task.flags + first);
    const unsigned int words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kFlagsEach; ++i) {
      bits |= (words[i / 4] >> (8 * (i % 4)) & 255u) != 0 ? 1u << i : 0u;
    }
    return bits;
  }
  for (int i = 0; i < kFlagsEach && first + i < cells; ++i) {
    bits |= task.flags[first + i] != 0 ? 1u << i : 0u;
  }
  return bits;
}

template <int kThreads>
inline __device__ long long own_flags() {
  return (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) * kFlagsEach;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) count_flags(const ListTask task) {
  __shared__ long long room[kThreads];
  sum_up_to<kThreads>(__popc(flags_from(task, own_flags<kThreads>())), room);
  if (threadIdx.x == 0) {
    task.counts[blockIdx.x] = room[kThreads - 1];
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) place_flags(const ListTask task) {
  __shared__ long long room[kThreads];
  long long earlier = 0;
  long long all = 0;
  for (unsigned int block = threadIdx.x; block < gridDim.x; block += kThreads) {
    all += task.counts[block];
    earlier += block < blockIdx.x ? task.counts[block] : 0;
  }
  sum_up_to<kThreads>(earlier, room);
  earlier = room[kThreads - 1];
  sum_up_to<kThreads>(all, room);
  all = room[kThreads - 1];
  const long long first = own_flags<kThreads>();
  const unsigned int bits = flags_from(task, first);
  const int own = __popc(bits);
  long long slot = earlier + sum_up_to<kThreads>(own, room) - own;
  for (int i = 0; i < kFlagsEach; ++i) {
    if ((bits >> i & 1u) != 0 && slot < task.capacity) {
      task.list[slot] = first + i;
    }
    slot += bits >> i & 1u;
  }
  if (task.filled) {
    const long long step = static_cast<long long>(gridDim.x) * kThreads;
    for (long long spare = all + static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
         spare < task.capacity; spare += step) {
      task.list[spare] = 0;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *task.found = all;
  }
}

// Flags are zeros before. Several threads may set one, to the same; neighbours outside of the map are
// left out.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) mark_near(const NearTask task) {
  const long long wanted = meant(task.listed, task.count);
  const long long step = static_cast<long long>(gridDim.x) * kThreads;
  for (long long index = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
       index < wanted; index += step) {
    const long long position = task.positions[index];
    for (int tap = 0; tap < task.tap_count; ++tap) {
      const long long cell = position + task.taps[tap];
      if (cell >= 0 && cell < task.cells && task.inside[cell]) {
        task.flags[cell] = 1;
      }
    }
  }
}

#if defined(__CUDACC_RTC__)
// What position_list.cu launches. Spelt out because NVRTC sees no launch and would compile none of it.
template __global__ void count_flags<kListThreads>(ListTask);
template __global__ void place_flags<kListThreads>(ListTask);
template __global__ void mark_near<kNearThreads>(NearTask);
#endif

}  // namespace position_conv
}  // namespace narrowgauge
