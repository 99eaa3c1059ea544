// Device code of convolutions at listed positions: an implicit product of matrices. C++14, no toolkit
// header: NVRTC 11.8 and nvcc 13 take it.
//
// Rows of the product are positions, columns the filters of one panel, and the depth goes over taps,
// channels innermost. A block has 2048 results: a tile of positions by one panel. It brings kStep of
// the depth at a time to shared memory: of each position a run of kStep floats of the row that a tap
// is away, found by the list, and kStep rows of the panel; copies of later chunks are under way while
// one is multiplied. A thread has 8 positions by 8 filters in registers. Each of the block's warps
// multiplies its own kSlices-th part of every chunk for all 2048 results, and the parts are added in
// order in the end: else lists as short as they are in practice would be too few warps.
//
// Each sum is of fused multiply-adds in IEEE float32, in an order that depends on the panel's width
// and the depth alone: the bits of a position do not depend on which others are listed. They are not
// those of the CPU.
//
// Reasoned for an H200 (132 multiprocessors of 128 lanes, about 25e12 fma/s, 4.8e12 B/s from memory;
// about 5.5e12 B/s from L2 assumed), nothing of it measured here. At batch 256 and half of the
// positions, C = F and n of 16 and 131072, 32 and 32768, 64 and 8192 are 302e6 fma each: 12 us at
// the ceiling. Bytes, in the order of these three:
//
//   neighbour rows, 36 n C from L1 or L2   75, 38, 19 MB: 14, 7, 3 us if L1 had none of it
//   weights, 36 C F for each block          9, 19, 38 MB:  2, 3, 7 us if L1 had none of it
//   results, 4 n F, from and to memory      8,  4,  2 MB:  2, 1, 0.5 us (twice that to be added to)
//
// so arithmetic bounds all three unless L1 fails at 16 channels. A quad of the depth is 64 cycles of
// arithmetic for a warp's share of the multiprocessor, and 16 reads of 16 bytes for each thread: 32
// passes of shared memory, at two for a warp's read. Bringing it there is 12 to 17 passes to write,
// and as many to read where L1 has it, the most with 16 filters: there the passes, 65, are as many as
// the cycles, and whether to go past L1 (cp.async.cg) is to be measured. Blocks are 1024, 512 and
// 256, of 2, 2 and 4 warps: about 16, 8 and 8 warps for a multiprocessor. At 60 % of the ceiling: 20
// us each, and as much longer for the first convolution of a unit as the dilated list is longer.
#pragma once

#include "position_conv/cuda/position_conv_primitives.h"
#include "position_conv/cuda/position_conv_task.h"

namespace narrowgauge {
namespace position_conv {

constexpr int kResults = 2048;  // of a block
constexpr int kOwn = 8;         // positions, and filters, of a thread
constexpr int kWarp = 32;
constexpr int kPitch = 4;  // floats more than a run of a position has: runs start on other banks

// Of a panel of kFilters: the steps of the depth in a chunk, the warps that share it, and how many
// chunks are in shared memory.
template <int kFilters>
struct Tile;
template <>
struct Tile<16> {
  static constexpr int kStep = 16;
  static constexpr int kSlices = 2;
  static constexpr int kStages = 2;  // with three, shared memory would not hold all of the blocks
};
template <>
struct Tile<32> {
  static constexpr int kStep = 16;
  static constexpr int kSlices = 2;
  static constexpr int kStages = 3;
};
template <>
struct Tile<64> {
  static constexpr int kStep = 32;
  static constexpr int kSlices = 4;
  static constexpr int kStages = 3;
};

template <int kFilters>
struct Chunk {
  float x[kResults / kFilters][Tile<kFilters>::kStep + kPitch];
  float weight[Tile<kFilters>::kStep][kFilters];
};

template <int kFilters>
struct __align__(16) Shared {
  static constexpr int kSlices = Tile<kFilters>::kSlices;
  union {
    Chunk<kFilters> chunks[Tile<kFilters>::kStages];
    // What each slice has summed for the others.
    float parts[kSlices][kOwn * kOwn / kSlices * (kSlices - 1)][kWarp];
  };
  long long from[kResults / kFilters];  // where the rows of the positions begin
  long long taps[kMostTaps];
};

// Where a lane's results lie in the tile: rows `row` + i * kRowGroups; filters `filter` and three
// more, and those 4 * kFilterGroups on. Lanes that differ in bit 0 read the same positions, those in
// bit 1 the same filters: then half a warp's reads of 16 bytes are one pass.
template <int kFilters>
struct Place {
  static constexpr int kFilterGroups = kFilters / kOwn;
  static constexpr int kRowGroups = kWarp / kFilterGroups;
  int row;
  int filter;
  inline __device__ explicit Place(int lane) {
    const int bits[5] = {lane & 1, lane >> 1 & 1, lane >> 2 & 1, lane >> 3 & 1, lane >> 4 & 1};
    if (kFilterGroups == 2) {
      row = lane >> 1;
      filter = 4 * bits[0];
    } else if (kFilterGroups == 4) {
      row = bits[1] + 2 * bits[3] + 4 * bits[4];
      filter = 4 * (bits[0] + 2 * bits[2]);
    } else {
      row = bits[1] + 2 * bits[3];
      filter = 4 * (bits[0] + 2 * bits[2] + 4 * bits[4]);
    }
  }
};

// Brings chunks to shared memory, in order, kLanes floats (4 or 1) at a time. A thread's copies of x
// are of one step of the depth (or four) for several positions.
template <int kFilters, int kLanes>
class Filler {
 public:
  static constexpr int kStep = Tile<kFilters>::kStep;
  static constexpr int kRows = kResults / kFilters;
  static constexpr int kThreads = kWarp * Tile<kFilters>::kSlices;
  static constexpr int kAcross = kStep / kLanes;  // threads along the depth
  static constexpr int kDown = kThreads / kAcross;
  static_assert(kThreads % kAcross == 0 && kRows % kDown == 0, "whole copies");
  static_assert(kStep * kFilters / kLanes % kThreads == 0, "whole copies");

  inline __device__ Filler(const Task& task, const float* panel, Shared<kFilters>& shared)
      : task_(task), panel_(panel), shared_(shared), at_(0) {
    column_ = static_cast<int>(threadIdx.x) % kAcross * kLanes;
    first_row_ = static_cast<int>(threadIdx.x) / kAcross;
    tap_ = 0;
    channel_ = column_;
    wrap();
  }

  inline __device__ void fill(int stage) {
    Chunk<kFilters>& chunk = shared_.chunks[stage];
    const int left = task_.depth - at_ < kStep ? static_cast<int>(task_.depth - at_) : kStep;
    const bool inside = column_ < left;
    const float* const from = task_.rows + (inside ? shared_.taps[tap_] + channel_ : 0);
#pragma unroll kLanes == 4 ? kRows / kDown : 4
    for (int i = 0; i < kRows / kDown; ++i) {
      const int row = first_row_ + i * kDown;
      copy_async<kLanes>(&chunk.x[row][column_], from + shared_.from[row], inside);
    }
    const int first = static_cast<int>(threadIdx.x) * kLanes;
    const float* const weight = panel_ + at_ * kFilters + first;
    constexpr int kApart = kThreads * kLanes;
#pragma unroll kLanes == 4 ? kStep * kFilters / kApart : 4
    for (int i = 0; i < kStep * kFilters / kApart; ++i) {
      copy_async<kLanes>(&chunk.weight[0][0] + first + i * kApart, weight + i * kApart,
                         (first + i * kApart) / kFilters < left);
    }
    at_ += kStep;
    channel_ += kStep;
    wrap();
  }

 private:
  inline __device__ void wrap() {
    while (channel_ >= task_.channels && tap_ < task_.tap_count) {
      channel_ -= task_.channels;
      ++tap_;
    }
  }

  const Task& task_;
  const float* panel_;
  Shared<kFilters>& shared_;
  long long at_;  // the depth at which the next chunk begins
  long long channel_;
  int tap_;
  int column_;
  int first_row_;
};

// Four steps of the depth.
template <int kFilters>
inline __device__ void multiply_quad(const Chunk<kFilters>& chunk, int step,
                                     const Place<kFilters>& place, float (&sums)[kOwn][kOwn]) {
  constexpr int kRowGroups = Place<kFilters>::kRowGroups;
  constexpr int kApart = 4 * Place<kFilters>::kFilterGroups;
  float given[kOwn][4];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float4 four =
        *reinterpret_cast<const float4*>(&chunk.x[place.row + i * kRowGroups][step]);
    given[i][0] = four.x;
    given[i][1] = four.y;
    given[i][2] = four.z;
    given[i][3] = four.w;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float* const weight = &chunk.weight[step + k][place.filter];
    const float4 low = *reinterpret_cast<const float4*>(weight);
    const float4 high = *reinterpret_cast<const float4*>(weight + kApart);
    const float factors[kOwn] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        sums[i][j] = __fmaf_rn(given[i][k], factors[j], sums[i][j]);
      }
    }
  }
}

// The rows of a thread that slice number `slice` finishes, of the sums of all slices.
template <int kFilters>
inline __device__ void add_parts(Shared<kFilters>& shared, int slice, int lane,
                                 const float (&sums)[kOwn][kOwn],
                                 float (&own)[kOwn / Tile<kFilters>::kSlices][kOwn]) {
  constexpr int kSlices = Tile<kFilters>::kSlices;
  constexpr int kShare = kOwn / kSlices;
  __syncthreads();  // until then there are chunks where the parts will be
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int other = i / kShare < slice ? i : i - kShare;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (i / kShare == slice) {
        own[i % kShare][j] = sums[i][j];
      } else {
        shared.parts[slice][other * kOwn + j][lane] = sums[i][j];
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kShare; ++r) {
    const int i = slice * kShare + r;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      float sum = 0.0f;
#pragma unroll
      for (int giver = 0; giver < kSlices; ++giver) {
        const int other = slice < giver ? i : i - kShare;
        const float part =
            giver == slice ? own[r][j] : shared.parts[giver][other * kOwn + j][lane];
        sum = giver == 0 ? part : __fadd_rn(sum, part);
      }
      own[r][j] = sum;
    }
  }
}

inline __device__ float leaky(float value, float slope) {
  return value < 0.0f ? __fmul_rn(value, slope) : value;
}

// One result of position number `index`, at `at` of the row that it belongs to.
inline __device__ void finish_one(const Task& task, long long index, long long at, float value) {
  if (task.finish != Finish::kAdd) {
    task.out[at] = leaky(value, task.slope);
    return;
  }
  task.out[at] = __fadd_rn(task.out[at], value);
  task.total[at] = __fadd_rn(task.total[at], __fmul_rn(task.share[index], value));
}

inline __device__ float4 plus(const float4& one, const float4& other, float times) {
  return {__fadd_rn(one.x, __fmul_rn(times, other.x)), __fadd_rn(one.y, __fmul_rn(times, other.y)),
          __fadd_rn(one.z, __fmul_rn(times, other.z)), __fadd_rn(one.w, __fmul_rn(times, other.w))};
}

inline __device__ void finish_four(const Task& task, long long index, long long at,
                                   const float4& value) {
  float4* const out = reinterpret_cast<float4*>(task.out + at);
  if (task.finish != Finish::kAdd) {
    *out = {leaky(value.x, task.slope), leaky(value.y, task.slope), leaky(value.z, task.slope),
            leaky(value.w, task.slope)};
    return;
  }
  float4* const total = reinterpret_cast<float4*>(task.total + at);
  const float share = task.share[index];
  *out = plus(*out, value, 1.0f);
  *total = plus(*total, value, share);
}

// Four neighbouring filters from `filter` on, of which the convolution may have fewer.
inline __device__ void finish(const Task& task, long long index, long long filter,
                              const float* sums) {
  if (filter >= task.filters) {
    return;
  }
  const long long row = task.finish == Finish::kPut ? index : task.positions[index];
  const long long at = row * task.filters + filter;
  const float* const bias = task.bias + filter;
  if (task.quads_out) {
    finish_four(task, index, at,
                {__fadd_rn(sums[0], bias[0]), __fadd_rn(sums[1], bias[1]),
                 __fadd_rn(sums[2], bias[2]), __fadd_rn(sums[3], bias[3])});
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (filter + j < task.filters) {
      finish_one(task, index, at + j, __fadd_rn(sums[j], bias[j]));
    }
  }
}

// Neighbouring blocks have the panels of one tile of positions.
template <int kFilters, int kLanes>
__global__ void __launch_bounds__(kWarp * Tile<kFilters>::kSlices, 16 / Tile<kFilters>::kSlices)
    multiply_listed(const Task task) {
  constexpr int kRows = kResults / kFilters;
  constexpr int kStep = Tile<kFilters>::kStep;
  constexpr int kSlices = Tile<kFilters>::kSlices;
  constexpr int kStages = Tile<kFilters>::kStages;
  __shared__ Shared<kFilters> shared;
  const unsigned int panels = static_cast<unsigned int>(task.panels);
  const long long first = static_cast<long long>(blockIdx.x / panels) * kRows;
  const long long first_filter = task.first_filter + (blockIdx.x % panels) * kFilters;
  const long long wanted = meant(task.listed, task.count);
  if (first >= wanted) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x);
  for (int row = thread; row < kRows; row += kWarp * kSlices) {  // past the end: the last one again
    const long long index = first + row < wanted ? first + row : wanted - 1;
    shared.from[row] = task.positions[index] * task.channels;
  }
  for (int tap = thread; tap < task.tap_count; tap += kWarp * kSlices) {
    shared.taps[tap] = task.taps[tap];
  }
  __syncthreads();

  Filler<kFilters, kLanes> filler(task, task.packed + first_filter * task.depth, shared);
  const long long chunks = (task.depth + kStep - 1) / kStep;
  const int slice = thread / kWarp;
  const int lane = thread % kWarp;
  const Place<kFilters> place(lane);
  float sums[kOwn][kOwn] = {};
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) {
    if (ahead < chunks) {
      filler.fill(ahead);
    }
    end_copies();
  }
  int stage = 0;
  int next = kStages - 1;
#pragma unroll 1
  for (long long chunk = 0; chunk < chunks; ++chunk) {
    copies_left<kStages - 2>();
    __syncthreads();  // all copies are seen by all, and all are done with the chunk before
    if (chunk + kStages - 1 < chunks) {
      filler.fill(next);
    }
    end_copies();
#pragma unroll
    for (int quad = 0; quad < kStep / 4; quad += kSlices) {
      multiply_quad<kFilters>(shared.chunks[stage], (quad + slice) * 4, place, sums);
    }
    stage = stage + 1 < kStages ? stage + 1 : 0;
    next = next + 1 < kStages ? next + 1 : 0;
  }

  float own[kOwn / kSlices][kOwn];
  add_parts<kFilters>(shared, slice, lane, sums, own);
#pragma unroll
  for (int r = 0; r < kOwn / kSlices; ++r) {
    const int row = place.row + (slice * (kOwn / kSlices) + r) * Place<kFilters>::kRowGroups;
    if (first + row < wanted) {
      const long long filter = first_filter + place.filter;
      finish(task, first + row, filter, &own[r][0]);
      finish(task, first + row, filter + 4 * Place<kFilters>::kFilterGroups, &own[r][4]);
    }
  }
}

// One filter alone, of which a panel would be empty but for a column: lanes of half a warp share a
// position's channels.
constexpr int kDotGroup = 16;
constexpr int kDotThreads = 256;

template <int kThreads>
__global__ void __launch_bounds__(kThreads) dot_listed(const Task task) {
  constexpr int kGroups = kThreads / kDotGroup;
  const long long wanted = meant(task.listed, task.count);
  const long long first = static_cast<long long>(blockIdx.x) * kGroups;
  if (first >= wanted) {
    return;
  }
  const long long own = first + static_cast<int>(threadIdx.x) / kDotGroup;
  const long long index = own < wanted ? own : wanted - 1;
  const int lane = static_cast<int>(threadIdx.x) % kDotGroup;
  const float* const from = task.rows + task.positions[index] * task.channels;
  float sum = 0.0f;
  for (long long channel = lane; channel < task.channels; channel += kDotGroup) {
#pragma unroll 3
    for (int tap = 0; tap < task.tap_count; ++tap) {
      sum = __fmaf_rn(from[task.taps[tap] + channel], task.packed[tap * task.channels + channel],
                      sum);
    }
  }
#pragma unroll
  for (int distance = kDotGroup / 2; distance > 0; distance /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  }
  if (lane == 0 && own < wanted) {
    const long long row = task.finish == Finish::kPut ? own : task.positions[own];
    finish_one(task, own, row, __fadd_rn(sum, task.bias[0]));
  }
}

#if defined(__CUDACC_RTC__)
// What position_conv.cu launches. Spelt out because NVRTC sees no launch and would compile none of it.
template __global__ void multiply_listed<16, 4>(Task);
template __global__ void multiply_listed<16, 1>(Task);
template __global__ void multiply_listed<32, 4>(Task);
template __global__ void multiply_listed<32, 1>(Task);
template __global__ void multiply_listed<64, 4>(Task);
template __global__ void multiply_listed<64, 1>(Task);
template __global__ void dot_listed<kDotThreads>(Task);
#endif

}  // namespace position_conv
}  // namespace narrowgauge
