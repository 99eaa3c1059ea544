// Device code of the int8 wire format. C++14, no toolkit header: NVRTC 11.8 and nvcc 13 take it. The
// arithmetic is in wire_numeric.h.
//
// Tensors here are small beside what the bus takes for them, so launches count: one where a block can
// have a channel to itself, else two after the maxima were set to 0. Accesses are of up to 16 bytes,
// and neighbouring threads have neighbouring ones, which the bus needs more than memory does.
#pragma once

#include "wire/cuda/wire_numeric.h"

namespace narrowgauge {
namespace wire {

// As Extent, PackTask and UnpackTask of wire.h.
template <typename T>
struct Packing {
  const T* x;
  signed char* values;
  float* scale;
  int* largest;
  long long samples;
  long long channels;
  long long spatial;
  unsigned long long seed;
  unsigned long long first;
  bool drawing;
};

template <typename T>
struct Unpacking {
  const signed char* values;
  const float* scale;
  T* out;
  long long count;
  long long channels;
  long long spatial;  // 1 with rows
};

constexpr int kThreads = 256;
constexpr int kMostThreads = 1024;  // of a block that has a channel to itself
constexpr int kBatch = 2;           // packs of one thread in flight
constexpr int kSharedChannels = 1024;

// The largest of a block's numbers, for all its threads. Every thread of whole warps calls it.
inline __device__ int largest_of_block(int own) {
  __shared__ int warps[32];
  for (int distance = 16; distance > 0; distance /= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, own, distance);
    own = other > own ? other : own;
  }
  if (threadIdx.x % 32 == 0) {
    warps[threadIdx.x / 32] = own;
  }
  __syncthreads();
  for (unsigned int warp = 0; warp < blockDim.x / 32; ++warp) {
    own = warps[warp] > own ? warps[warp] : own;
  }
  return own;
}

// Calls use(element, pack) for packs [begin, end) of a channel in planes, which a block shares out.
template <typename T, int Lanes, typename Use>
inline __device__ void each_pack(const Packing<T>& task, long long channel, long long begin,
                                 long long end, const Use& use) {
  const long long in_plane = task.spatial / Lanes;
  const int step = static_cast<int>(blockDim.x);
  for (long long pack = begin + threadIdx.x; pack < end; pack += kBatch * step) {
    Pack<T, Lanes> x[kBatch];
    long long element[kBatch];
#pragma unroll
    for (int p = 0; p < kBatch; ++p) {
      const long long own = pack + p * step;
      if (own < end) {
        const long long sample = divide(own, in_plane);
        element[p] = (sample * task.channels + channel) * task.spatial +
                     (own - sample * in_plane) * Lanes;
        x[p] = load<T, Lanes>(task.x + element[p]);
      }
    }
#pragma unroll
    for (int p = 0; p < kBatch; ++p) {
      if (pack + p * step < end) {
        use(element[p], x[p]);
      }
    }
  }
}

template <typename T, int Lanes>
inline __device__ int largest_in(const Packing<T>& task, long long channel, long long begin,
                                 long long end) {
  int largest = 0;
  each_pack<T, Lanes>(task, channel, begin, end, [&](long long, const Pack<T, Lanes>& x) {
#pragma unroll
    for (int lane = 0; lane < Lanes; ++lane) {
      const int one = magnitude_of(x.lanes[lane]);
      largest = one > largest ? one : largest;
    }
  });
  return largest_of_block(largest);
}

template <typename T, int Lanes>
inline __device__ void pack_in(const Packing<T>& task, long long channel, long long begin,
                               long long end, const Step& step) {
  const Rounding rounding(task.drawing, task.seed, task.first);
  each_pack<T, Lanes>(task, channel, begin, end, [&](long long i, const Pack<T, Lanes>& x) {
    Pack<signed char, Lanes> values;
#pragma unroll
    for (int lane = 0; lane < Lanes; ++lane) {
      values.lanes[lane] = rounding(Numeric<T>::widen(x.lanes[lane]), step, task.first + i + lane);
    }
    store<signed char, Lanes>(task.values + i, values);
  });
}

// Planes, or rows where spatial is 1: one block per channel.
template <typename T, int Lanes>
__global__ void __launch_bounds__(kMostThreads) pack_channel(Packing<T> task) {
  const long long channel = blockIdx.x;
  const long long packs = task.samples * (task.spatial / Lanes);
  const Step step = step_of(largest_in<T, Lanes>(task, channel, 0, packs));
  if (threadIdx.x == 0) {
    task.scale[channel] = step.scale;
  }
  pack_in<T, Lanes>(task, channel, 0, packs, step);
}

// Planes, by `share` packs of a channel per block; `largest` is 0 before. Block 0 has the first
// share of channel 0, block `splits` that of channel 1.
template <typename T, int Lanes>
__global__ void __launch_bounds__(kThreads)
    largest_split(Packing<T> task, int splits, long long share) {
  const long long packs = task.samples * (task.spatial / Lanes);
  const long long channel = blockIdx.x / splits;
  const long long begin = (blockIdx.x - channel * splits) * share;
  const long long end = begin + share < packs ? begin + share : packs;
  const int largest = largest_in<T, Lanes>(task, channel, begin, end);
  if (threadIdx.x == 0) {
    atomicMax(task.largest + channel, largest);
  }
}

template <typename T, int Lanes>
__global__ void __launch_bounds__(kThreads)
    pack_split(Packing<T> task, int splits, long long share) {
  const long long packs = task.samples * (task.spatial / Lanes);
  const long long channel = blockIdx.x / splits;
  const long long begin = (blockIdx.x - channel * splits) * share;
  const long long end = begin + share < packs ? begin + share : packs;
  const Step step = step_of(task.largest[channel]);
  if (begin == 0 && threadIdx.x == 0) {
    task.scale[channel] = step.scale;
  }
  pack_in<T, Lanes>(task, channel, begin, end, step);
}

// Calls use(row, element, pack) for a thread's packs in rows: it keeps to its channels.
template <typename T, int Lanes, typename Use>
inline __device__ void each_row(const Packing<T>& task, long long row, long long column,
                                long long rows_at_once, const Use& use) {
  const long long rows = task.samples * task.spatial;
  for (; row < rows; row += kBatch * rows_at_once) {
    Pack<T, Lanes> x[kBatch];
#pragma unroll
    for (int p = 0; p < kBatch; ++p) {
      const long long own = row + p * rows_at_once;
      if (own < rows) {
        x[p] = load<T, Lanes>(task.x + own * task.channels + column * Lanes);
      }
    }
#pragma unroll
    for (int p = 0; p < kBatch; ++p) {
      const long long own = row + p * rows_at_once;
      if (own < rows) {
        use(own, own * task.channels + column * Lanes, x[p]);
      }
    }
  }
}

// Rows; `largest` is 0 before. The block's own maxima come first, where they are few.
template <typename T, int Lanes>
__global__ void __launch_bounds__(kThreads)
    largest_rows(Packing<T> task, long long rows_at_once) {
  __shared__ int shared[kSharedChannels];
  const bool few = task.channels <= kSharedChannels;
  int* largest = few ? shared : task.largest;
  if (few) {
    for (int i = threadIdx.x; i < task.channels; i += kThreads) {
      shared[i] = 0;
    }
    __syncthreads();
  }
  const long long columns = task.channels / Lanes;
  const long long index = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  const long long row = divide(index, columns);
  const long long column = index - row * columns;
  if (row < rows_at_once) {
    int own[Lanes] = {};
    each_row<T, Lanes>(task, row, column, rows_at_once,
                       [&](long long, long long, const Pack<T, Lanes>& x) {
#pragma unroll
                         for (int lane = 0; lane < Lanes; ++lane) {
                           const int one = magnitude_of(x.lanes[lane]);
                           own[lane] = one > own[lane] ? one : own[lane];
                         }
                       });
#pragma unroll
    for (int lane = 0; lane < Lanes; ++lane) {
      atomicMax(largest + column * Lanes + lane, own[lane]);
    }
  }
  if (few) {
    __syncthreads();
    for (int i = threadIdx.x; i < task.channels; i += kThreads) {
      if (shared[i] != 0) {
        atomicMax(task.largest + i, shared[i]);
      }
    }
  }
}

template <typename T, int Lanes>
__global__ void __launch_bounds__(kThreads) pack_rows(Packing<T> task, long long rows_at_once) {
  const long long columns = task.channels / Lanes;
  const long long index = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  const long long row = divide(index, columns);
  const long long column = index - row * columns;
  if (row >= rows_at_once) {
    return;
  }
  Step steps[Lanes];
#pragma unroll
  for (int lane = 0; lane < Lanes; ++lane) {
    steps[lane] = step_of(task.largest[column * Lanes + lane]);
    if (row == 0) {
      task.scale[column * Lanes + lane] = steps[lane].scale;
    }
  }
  const Rounding rounding(task.drawing, task.seed, task.first);
  each_row<T, Lanes>(
      task, row, column, rows_at_once,
      [&](long long own, long long i, const Pack<T, Lanes>& x) {
        const long long sample = divide(own, task.spatial);
        const unsigned long long start =
            task.first + (sample * task.channels + column * Lanes) * task.spatial +
            (own - sample * task.spatial);
        Pack<signed char, Lanes> values;
#pragma unroll
        for (int lane = 0; lane < Lanes; ++lane) {
          values.lanes[lane] = rounding(Numeric<T>::widen(x.lanes[lane]), steps[lane],
                                        start + lane * task.spatial);
        }
        store<signed char, Lanes>(task.values + i, values);
      });
}

// The scales of a pack's lanes. They may lie behind the bus, where each load is a request: one for a
// pack of one channel, and for lanes of channels that follow each other one for four.
template <int Lanes>
inline __device__ void scales_of(const float* scale, bool each, float (&found)[Lanes]) {
  if (!each) {
    const float one = *scale;
#pragma unroll
    for (int lane = 0; lane < Lanes; ++lane) {
      found[lane] = one;
    }
  } else if (Lanes % 4 == 0 && reinterpret_cast<unsigned long long>(scale) % 16 == 0) {
#pragma unroll
    for (int lane = 0; lane + 3 < Lanes; lane += 4) {
      const Pack<float, 4> four = load<float, 4>(scale + lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        found[lane + i] = four.lanes[i];
      }
    }
  } else {
#pragma unroll
    for (int lane = 0; lane < Lanes; ++lane) {
      found[lane] = scale[lane];
    }
  }
}

// A pack is of one channel, or, with spatial 1, of Lanes channels that follow each other.
template <typename T, int Lanes>
__global__ void __launch_bounds__(kThreads) unpack(Unpacking<T> task) {
  const long long packs = task.count / Lanes;
  const long long first = static_cast<long long>(blockIdx.x) * kThreads * kBatch + threadIdx.x;
  Pack<signed char, Lanes> values[kBatch];
#pragma unroll
  for (int p = 0; p < kBatch; ++p) {
    const long long pack = first + p * kThreads;
    if (pack < packs) {
      values[p] = load<signed char, Lanes>(task.values + pack * Lanes);
    }
  }
#pragma unroll
  for (int p = 0; p < kBatch; ++p) {
    const long long pack = first + p * kThreads;
    if (pack < packs) {
      const long long run = divide(pack * Lanes, task.spatial);
      const long long channel = run - divide(run, task.channels) * task.channels;
      float scales[Lanes];
      scales_of<Lanes>(task.scale + channel, task.spatial == 1, scales);
      Pack<T, Lanes> out;
#pragma unroll
      for (int lane = 0; lane < Lanes; ++lane) {
        out.lanes[lane] = Numeric<T>::narrow(
            __fmul_rn(static_cast<float>(values[p].lanes[lane]), scales[lane]));
      }
      store<T, Lanes>(task.out + pack * Lanes, out);
    }
  }
}

// By Words of Lanes at once; block 0 also takes the bytes after the last.
template <typename Word, int Lanes>
__global__ void __launch_bounds__(kThreads)
    copy_words(const unsigned char* x, unsigned char* out, long long bytes) {
  constexpr int kBytes = static_cast<int>(sizeof(Word)) * Lanes;
  const Word* from = reinterpret_cast<const Word*>(x);
  Word* to = reinterpret_cast<Word*>(out);
  const long long packs = bytes / kBytes;
  const long long step = static_cast<long long>(gridDim.x) * kThreads;
  const long long first = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  for (long long pack = first; pack < packs; pack += kBatch * step) {
    Pack<Word, Lanes> own[kBatch];
#pragma unroll
    for (int p = 0; p < kBatch; ++p) {
      if (pack + p * step < packs) {
        own[p] = load<Word, Lanes>(from + (pack + p * step) * Lanes);
      }
    }
#pragma unroll
    for (int p = 0; p < kBatch; ++p) {
      if (pack + p * step < packs) {
        store<Word, Lanes>(to + (pack + p * step) * Lanes, own[p]);
      }
    }
  }
  const long long rest = packs * kBytes + threadIdx.x;
  if (kBytes > 1 && blockIdx.x == 0 && rest < bytes) {
    out[rest] = x[rest];
  }
}

// What wire.cu launches. Spelt out because NVRTC sees no launch and would compile none.
template __global__ void pack_channel<float, 4>(Packing<float>);
template __global__ void largest_split<float, 4>(Packing<float>, int, long long);
template __global__ void pack_split<float, 4>(Packing<float>, int, long long);
template __global__ void largest_rows<float, 4>(Packing<float>, long long);
template __global__ void pack_rows<float, 4>(Packing<float>, long long);
template __global__ void pack_channel<float, 1>(Packing<float>);
template __global__ void largest_split<float, 1>(Packing<float>, int, long long);
template __global__ void pack_split<float, 1>(Packing<float>, int, long long);
template __global__ void largest_rows<float, 1>(Packing<float>, long long);
template __global__ void pack_rows<float, 1>(Packing<float>, long long);
template __global__ void unpack<float, 16>(Unpacking<float>);
template __global__ void unpack<float, 4>(Unpacking<float>);
template __global__ void unpack<float, 1>(Unpacking<float>);
template __global__ void pack_channel<Half, 4>(Packing<Half>);
template __global__ void largest_split<Half, 4>(Packing<Half>, int, long long);
template __global__ void pack_split<Half, 4>(Packing<Half>, int, long long);
template __global__ void largest_rows<Half, 4>(Packing<Half>, long long);
template __global__ void pack_rows<Half, 4>(Packing<Half>, long long);
template __global__ void pack_channel<Half, 1>(Packing<Half>);
template __global__ void largest_split<Half, 1>(Packing<Half>, int, long long);
template __global__ void pack_split<Half, 1>(Packing<Half>, int, long long);
template __global__ void largest_rows<Half, 1>(Packing<Half>, long long);
template __global__ void pack_rows<Half, 1>(Packing<Half>, long long);
template __global__ void unpack<Half, 16>(Unpacking<Half>);
template __global__ void unpack<Half, 4>(Unpacking<Half>);
template __global__ void unpack<Half, 1>(Unpacking<Half>);
template __global__ void pack_channel<BFloat16, 4>(Packing<BFloat16>);
template __global__ void largest_split<BFloat16, 4>(Packing<BFloat16>, int, long long);
template __global__ void pack_split<BFloat16, 4>(Packing<BFloat16>, int, long long);
template __global__ void largest_rows<BFloat16, 4>(Packing<BFloat16>, long long);
template __global__ void pack_rows<BFloat16, 4>(Packing<BFloat16>, long long);
template __global__ void pack_channel<BFloat16, 1>(Packing<BFloat16>);
template __global__ void largest_split<BFloat16, 1>(Packing<BFloat16>, int, long long);
template __global__ void pack_split<BFloat16, 1>(Packing<BFloat16>, int, long long);
template __global__ void largest_rows<BFloat16, 1>(Packing<BFloat16>, long long);
template __global__ void pack_rows<BFloat16, 1>(Packing<BFloat16>, long long);
template __global__ void unpack<BFloat16, 16>(Unpacking<BFloat16>);
template __global__ void unpack<BFloat16, 4>(Unpacking<BFloat16>);
template __global__ void unpack<BFloat16, 1>(Unpacking<BFloat16>);
template __global__ void copy_words<unsigned int, 4>(const unsigned char*, unsigned char*,
                                                     long long);
template __global__ void copy_words<unsigned int, 1>(const unsigned char*, unsigned char*,
                                                     long long);
template __global__ void copy_words<unsigned char, 1>(const unsigned char*, unsigned char*,
                                                      long long);

}  // namespace wire
}  // namespace narrowgauge
