// Device code of the manual convolution and linear layer on CUDA cores, for any policy of
// ../manual_mac.h. C++14, no toolkit header: NVRTC 11.8 and nvcc 13 take it.
//
// An implicit product of matrices: rows are output pixels, columns filters, and the depth goes over
// channels and taps. A block keeps kStages chunks of kStep of depth in flight to shared memory
// (cp.async from 8.0 on), and each thread a tile of sums in registers. What a step of the depth means
// in x and weight (offsets, taps) is a table in shared memory, computed a window ahead, so that the
// inner loop divides nothing; which taps of a pixel lie outside x is a word of bits per pixel.
//
// Operands are prepared where they lie, a chunk ahead of their use, so that nobody waits for them at a
// barrier. The barrier also says whether a chunk has a NaN, for which some policies test each operand
// in the inner loop: chunks without one go without the test.
//
// A sum starts at +0 and takes its products one by one in the order of the depth, padding included;
// where the depth is split, partial sums are added in order. The tail of the depth is not padded: a
// policy may make something of 0 * 0.
#pragma once

#include "manual/manual_mac.h"
#include "manual_float/cuda/manual_float_fill.h"

namespace narrowgauge {
namespace manual_float {

template <typename Policy>
struct Prepares {
  static constexpr bool value = true;
};
template <typename Multiply>
struct Prepares<mac::Custom<Multiply>> {
  static constexpr bool value = false;
};

// Where a thread's outputs lie in the tile. A warp has 8 x 4 threads; a thread has groups of four rows
// 32 apart, and groups of four filters 16 apart. Lanes that differ in their lowest bit read the same
// rows, and in the next bit the same filters: then half a warp's 16-byte reads are one access.
template <int Filters, int Own>
struct Place {
  int row;
  int filter;
  inline __device__ explicit Place(int thread) {
    constexpr int kWarpsWide = Filters / (4 * Own);
    const int lane = thread % 32;
    const int warp = thread / 32;
    row = warp / kWarpsWide * 64 + ((lane >> 1 & 1) | (lane >> 2 & 6)) * 4;
    filter = warp % kWarpsWide * (4 * Own) + ((lane & 1) | (lane >> 1 & 2)) * 4;
  }
};

// One step of the depth for a thread's 8 x Own sums.
template <typename Policy, int Rows, int Filters, int Own>
inline __device__ void multiply_step(const float (&x)[Rows], const float (&weight)[Filters],
                                     const Place<Filters - kPitch, Own>& place,
                                     float (&sums)[Own][8]) {
  typename Policy::template A<float> activations[8];
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const float4 four = *reinterpret_cast<const float4*>(&x[place.row + group * 32]);
    activations[group * 4 + 0] = Policy::activation(four.x);
    activations[group * 4 + 1] = Policy::activation(four.y);
    activations[group * 4 + 2] = Policy::activation(four.z);
    activations[group * 4 + 3] = Policy::activation(four.w);
  }
#pragma unroll
  for (int group = 0; group < Own / 4; ++group) {
    const float4 four = *reinterpret_cast<const float4*>(&weight[place.filter + group * 16]);
    const float words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto factor = Policy::weight(words[i]);
#pragma unroll
      for (int row = 0; row < 8; ++row) {
        float& sum = sums[group * 4 + i][row];
        sum = Policy::step(activations[row], factor, sum);
      }
    }
  }
}

// A chunk of the depth, of which `left` steps or all are inside it.
template <typename Policy, int Rows, int Filters, int Own, int Unroll>
inline __device__ void multiply_chunk(const float (&x)[kStep][Rows],
                                      const float (&weight)[kStep][Filters], long long left,
                                      const Place<Filters - kPitch, Own>& place,
                                      float (&sums)[Own][8]) {
  if (Unroll > 1 && left >= kStep) {
#pragma unroll
    for (int step = 0; step < kStep; ++step) {
      multiply_step<Policy, Rows, Filters, Own>(x[step], weight[step], place, sums);
    }
  } else {
#pragma unroll 1
    for (int step = 0; step < kStep && step < left; ++step) {
      multiply_step<Policy, Rows, Filters, Own>(x[step], weight[step], place, sums);
    }
  }
}

// A barrier; where `Asks`, whether any thread came to it with `own`.
template <bool Asks>
inline __device__ bool meet(bool own) {
  if (Asks) {
    return __syncthreads_or(own) != 0;
  }
  __syncthreads();
  return false;
}

// Stores a thread's sums, with the bias unless they are partial.
template <int Rows, int Filters, int Own>
inline __device__ void store(const Task& task, const Block& block,
                             const Shared<Rows, Filters>& shared,
                             const Place<Filters, Own>& place, const float (&sums)[Own][8]) {
  const Convolution& conv = task.conv;
  const bool split = task.plan.splits > 1;
  const bool down = task.plan.quads_out && !conv.out_channels_last;
  const bool across = task.plan.quads_out && conv.out_channels_last;
  const long long apart = conv.out_channels_last ? 1 : out_area(conv);
  const long long first = block.group * conv.filters + block.filter + place.filter;
  const long long left = conv.filters - block.filter - place.filter;
  float* const out = (split ? task.partial + block.split * out_count(conv) : task.out) +
                     first * apart;
  float biases[Own];  // -0 changes nothing, not even a sum of -0
#pragma unroll
  for (int i = 0; i < Own; ++i) {
    const int filter = i / 4 * 16 + i % 4;
    biases[i] =
        !split && task.bias != nullptr && filter < left ? task.bias[first + filter] : -0.0f;
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const long long offset = shared.pixels[place.row + r / 4 * 32 + r % 4].out;
    if (offset < 0 || (down && r % 4 != 0)) {
      continue;
    }
#pragma unroll
    for (int i = 0; i < Own; ++i) {
      const int filter = i / 4 * 16 + i % 4;
      if (filter >= left) {
        continue;
      }
      float* const target = out + offset + filter * apart;
      if (down && r % 4 == 0) {
        const float4 four = {sums[i][r] + biases[i], sums[i][(r + 1) % 8] + biases[i],
                             sums[i][(r + 2) % 8] + biases[i], sums[i][(r + 3) % 8] + biases[i]};
        *reinterpret_cast<float4*>(target) = four;
      } else if (across && i % 4 == 0) {
        const float4 four = {sums[i][r] + biases[i], sums[(i + 1) % Own][r] + biases[(i + 1) % Own],
                             sums[(i + 2) % Own][r] + biases[(i + 2) % Own],
                             sums[(i + 3) % Own][r] + biases[(i + 3) % Own]};
        *reinterpret_cast<float4*>(target) = four;
      } else if (!across) {
        *target = sums[i][r] + biases[i];
      }
    }
  }
}

template <typename Policy, int Rows, int Filters, int Own, int Unroll>
__global__ void __launch_bounds__(Rows / 8 * (Filters / Own), 512 / (Rows / 8 * (Filters / Own)))
    multiply_tiled(const Task task) {
  constexpr int kCount = Rows / 8 * (Filters / Own);
  __shared__ __align__(16) Shared<Rows, Filters> shared;
  const Block block = block_of<Rows, Filters>(task, blockIdx.x);
  const Place<Filters, Own> place(static_cast<int>(threadIdx.x));
  Filler<Policy, Rows, Filters, kCount> filler(task, block, shared);
  using Numbers = typename mac::WithoutNan<Policy>::Type;
  constexpr bool kAsks = mac::WithoutNan<Policy>::differs;
  const bool prepares = Prepares<Policy>::value && task.prepares;
  bool own_nan = false;  // of the chunk that this thread prepared last
  float sums[Own][8] = {};
  const long long depth = depth_of(task.conv) - block.first_chunk * kStep;
#pragma unroll 1
  for (int filled = 0; filled < block.chunks + kAhead; ++filled) {
    // Overwrites the chunk before the one that the slowest thread still works on.
    if (filled < block.chunks) {
      filler.fill(filled);
    }
    commit_copies();
    const int chunk = filled - kAhead;
    if (chunk < (prepares ? -1 : 0)) {
      continue;
    }
    if (prepares) {
      wait_copies<kAhead - 1>();  // the next chunk's have arrived, too
    } else {
      wait_copies<kAhead>();
    }
    const bool nan = meet<kAsks>(own_nan);
    if (prepares && chunk + 1 < block.chunks) {
      own_nan = filler.prepare(chunk + 1);
    }
    if (chunk < 0) {
      continue;
    }
    const auto& x = shared.x[chunk % kStages];
    const auto& weight = shared.weight[chunk % kStages];
    const long long left = depth - static_cast<long long>(chunk) * kStep;
    if (kAsks && nan) {
      multiply_chunk<Policy, Rows + kPitch, Filters + kPitch, Own, Unroll>(x, weight, left, place,
                                                                           sums);
    } else {
      multiply_chunk<Numbers, Rows + kPitch, Filters + kPitch, Own, Unroll>(x, weight, left, place,
                                                                            sums);
    }
  }
  store<Rows, Filters, Own>(task, block, shared, place, sums);
}

// The sum of the partial sums, in order, and the bias.
inline __device__ long long filter_of(const Convolution& conv, long long index) {
  const long long filters = conv.groups * conv.filters;
  return conv.out_channels_last ? index % filters : index / out_area(conv) % filters;
}

template <int Count>
__global__ void __launch_bounds__(Count) add_partial(const Task task) {
  const long long count = out_count(task.conv);
  for (long long index = static_cast<long long>(blockIdx.x) * Count + threadIdx.x; index < count;
       index += static_cast<long long>(gridDim.x) * Count) {
    float sum = task.partial[index];
    for (int split = 1; split < task.plan.splits; ++split) {
      sum += task.partial[split * count + index];
    }
    task.out[index] = task.bias != nullptr ? sum + task.bias[filter_of(task.conv, index)] : sum;
  }
}

// One output per thread, for depthwise convolutions and small groups, whose tiles would be empty, and
// for what the tiled kernel's 32-bit offsets and words of taps do not hold.
template <typename Policy, int Count>
__global__ void __launch_bounds__(Count) multiply_direct(const Task task) {
  const Convolution& conv = task.conv;
  const long long area = out_area(conv);
  const long long filters = conv.groups * conv.filters;
  const long long count = out_count(conv);
  for (long long index = static_cast<long long>(blockIdx.x) * Count + threadIdx.x; index < count;
       index += static_cast<long long>(gridDim.x) * Count) {
    const long long filter = filter_of(conv, index);
    const long long row = conv.out_channels_last ? index / filters
                                                 : index / area / filters * area + index % area;
    const long long image = row / area;
    const long long at = row - image * area;
    const long long high = at / conv.out_wide * conv.stride_high - conv.padding_high;
    const long long across = at % conv.out_wide * conv.stride_wide - conv.padding_wide;
    const float* plane = task.x + image * conv.x_batch +
                         filter / conv.filters * conv.channels * conv.x_channel;
    const float* weights = task.weight + filter * conv.weight_filter;
    float sum = 0.0f;
    for (long long channel = 0; channel < conv.channels; ++channel) {
      for (long long r = 0; r < conv.taps_high; ++r) {
        const long long y = high + r * conv.dilation_high;
        const bool row_inside = y >= 0 && y < conv.high;
        for (long long s = 0; s < conv.taps_wide; ++s) {
          const long long z = across + s * conv.dilation_wide;
          const bool inside = row_inside && z >= 0 && z < conv.wide;
          const float value = inside ? plane[y * conv.x_high + z * conv.x_wide] : 0.0f;
          const float factor = weights[r * conv.weight_high + s * conv.weight_wide];
          sum = Policy::step(
              Policy::template activation<float>(Policy::prepare_activation(value, task.kept)),
              Policy::template weight<float>(Policy::prepare_weight(factor, task.kept)), sum);
        }
      }
      plane += conv.x_channel;
      weights += conv.weight_channel;
    }
    task.out[index] = task.bias != nullptr ? sum + task.bias[filter] : sum;
  }
}

constexpr int kDirectCount = 256;

#if defined(__CUDACC_RTC__)
// What manual_float.cu launches. Spelt out for NVRTC, which sees no launch and would compile none of it;
// not for nvcc, because a functor's library needs none of them.
template __global__ void multiply_tiled<mac::Truncated, 128, 128, 8, kStep>(Task);
template __global__ void multiply_tiled<mac::Truncated, 128, 64, 8, kStep>(Task);
template __global__ void multiply_tiled<mac::Truncated, 128, 32, 4, kStep>(Task);
template __global__ void multiply_tiled<mac::Truncated, 64, 64, 4, kStep>(Task);
template __global__ void multiply_tiled<mac::AxfpmFaithful, 128, 64, 4, 1>(Task);
template __global__ void multiply_tiled<mac::AxfpmFaithful, 64, 32, 4, 1>(Task);
template __global__ void multiply_tiled<mac::AxfpmFixed, 128, 64, 4, 1>(Task);
template __global__ void multiply_tiled<mac::AxfpmFixed, 64, 32, 4, 1>(Task);
template __global__ void multiply_tiled<mac::Axbf16, 128, 64, 4, 1>(Task);
template __global__ void multiply_tiled<mac::Axbf16, 64, 32, 4, 1>(Task);
template __global__ void multiply_tiled<mac::Mitchell, 128, 64, 8, 1>(Task);
template __global__ void multiply_tiled<mac::Mitchell, 64, 32, 4, 1>(Task);
template __global__ void multiply_direct<mac::Truncated, kDirectCount>(Task);
template __global__ void multiply_direct<mac::AxfpmFaithful, kDirectCount>(Task);
template __global__ void multiply_direct<mac::AxfpmFixed, kDirectCount>(Task);
template __global__ void multiply_direct<mac::Axbf16, kDirectCount>(Task);
template __global__ void multiply_direct<mac::Mitchell, kDirectCount>(Task);
template __global__ void add_partial<kDirectCount>(Task);
#endif

}  // namespace manual_float
}  // namespace narrowgauge
