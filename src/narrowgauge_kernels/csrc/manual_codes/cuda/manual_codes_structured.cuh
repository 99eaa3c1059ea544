// Products that are sums of masked products, P(a, b) = sum of (a & m) * (b & m'), on the int8 tensor
// cores: sums of these are sums of exact int8 products, which the tensor cores make bit for bit. A
// fragment is loaded once and masked in registers for each term: nothing is expanded in memory.
//
// What to expect of an H200 (132 SM, 1.755 to 1.98 GHz). mma.sync m16n8k32 is 4096 MAC; four tensor
// cores of an SM give about 2500 MAC a clock this way (wgmma, which the vendor takes, 4096). For a
// depth of 32 a warp of `Large` issues 32 mma a term, 32 masks (LOP3: one issue slot each, where an
// mma occupies its tensor core for six), and, once for all terms, 8 ldmatrix.x4; a block moves 24 KB
// into shared memory for a depth of 64. So from two terms on the tensor cores bind: 132 * 2500 *
// 1.755e9 / R = 580 / R T MAC/s at most, 145 at R = 4, and 85 asks for 59 % of that.
//
// Shared memory has rows of 64 bytes, of four 16-byte chunks; chunk c of row r lies at
// c ^ (r / 2 % 4), so that eight rows of one chunk are in all 32 banks for ldmatrix.
#pragma once

#include "manual_codes/cuda/manual_codes_lowered.h"
#include "manual_codes/cuda/manual_codes_sweep.h"

namespace narrowgauge {
namespace codes {

// kWarpsM x kWarpsN warps, each of kRows x 16 pixels and kColumns x 8 channels.
template <int kWarpsM, int kWarpsN, int kRows, int kColumns, int kBlocks>
struct Tile {
  static constexpr int kWarpRows = kWarpsM;
  static constexpr int kFragmentRows = kRows;
  static constexpr int kFragmentColumns = kColumns;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kPixels = kWarpsM * kRows * 16;
  static constexpr int kChannels = kWarpsN * kColumns * 8;
  static constexpr int kDepth = 64;
  static constexpr int kStages = 4;
  static constexpr int kStageBytes = (kPixels + kChannels) * kDepth;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kBlocksPerSm = kBlocks;
};

using Large = Tile<4, 2, 4, 8, 1>;  // 256 pixels x 128 channels
using Small = Tile<4, 2, 2, 4, 2>;  // 128 x 64

inline __device__ int chunk_offset(int row, int chunk) {
  return row * 64 + ((chunk ^ (row / 2 % 4)) * 16);
}

// Copies the block's operands, a stage at a time. Weights are [groups * outputs, depth].
template <typename T>
struct StageLoader {
  static constexpr int kRowsAtOnce = T::kThreads / 4;
  static constexpr int kOwnPixels = T::kPixels / kRowsAtOnce;
  static constexpr int kOwnChannels = T::kChannels / kRowsAtOnce;

  const Lowered& task;
  Window windows[kOwnPixels];
  const unsigned char* weight;  // this thread's first row
  int outputs_left;             // from that row on
  int end;
  Place place;

  inline __device__ StageLoader(const Lowered& lowered, long long first_pixel, int first_channel,
                                int group, int begin, int depth_end)
      : task(lowered), end(depth_end) {
    const int row = static_cast<int>(threadIdx.x) / 4;
#pragma unroll
    for (int i = 0; i < kOwnPixels; ++i) {
      windows[i] = window_of(task, first_pixel + row + i * kRowsAtOnce, group);
    }
    weight = task.weight +
             (static_cast<long long>(group) * task.outputs + first_channel + row) * task.depth;
    outputs_left = task.outputs - first_channel - row;
    place = place_of(task, begin + static_cast<int>(threadIdx.x) % 4 * 16);
  }

  // 16 weights from here on; zero, which makes products zero, outside.
  inline __device__ void copy_weights(int i, unsigned char* to) const {
    const bool exists = i * kRowsAtOnce < outputs_left;
    const unsigned char* from =
        weight + static_cast<long long>(i) * kRowsAtOnce * task.depth + place.depth;
    if (task.channels % 16 == 0) {
      if (exists && place.depth < end) {
        copy_async<16>(to, from);
      } else {
        *reinterpret_cast<Vector*>(to) = {{0, 0, 0, 0}};
      }
      return;
    }
#pragma unroll 1
    for (int word = 0; word < 16; word += 4) {
      if (exists && place.depth + word < end) {
        copy_async<4>(to + word, from + word);
      } else {
        *reinterpret_cast<unsigned int*>(to + word) = 0;
      }
    }
  }

  inline __device__ void next(unsigned char* stage) {
    const int row = static_cast<int>(threadIdx.x) / 4;
    const int chunk = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < kOwnPixels; ++i) {
      copy_codes(task, windows[i], place, stage + chunk_offset(row + i * kRowsAtOnce, chunk));
    }
#pragma unroll
    for (int i = 0; i < kOwnChannels; ++i) {
      copy_weights(i, stage + chunk_offset(T::kPixels + row + i * kRowsAtOnce, chunk));
    }
    place.advance(task, T::kDepth);
  }
};

template <typename T>
struct Sums {
  int of[T::kFragmentRows][T::kFragmentColumns][4];
};

// Adds the products of one stage, whose fragments are loaded once for all terms.
template <typename T, bool kASigned, bool kBSigned>
inline __device__ void multiply_stage(const unsigned char* stage, const Sweep& sweep,
                                      Sums<T>& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first_row = warp % T::kWarpRows * T::kFragmentRows * 16 + lane % 16;
  const int first_column = T::kPixels + warp / T::kWarpRows * T::kFragmentColumns * 8 + lane % 8 +
                           lane / 16 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned int a[T::kFragmentRows][4];
    unsigned int b[T::kFragmentColumns / 2][4];
#pragma unroll
    for (int i = 0; i < T::kFragmentRows; ++i) {
      load_matrices(a[i], stage + chunk_offset(first_row + i * 16, half * 2 + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < T::kFragmentColumns / 2; ++j) {
      load_matrices(b[j], stage + chunk_offset(first_column + j * 16, half * 2 + lane / 8 % 2));
    }
#pragma unroll 1
    for (int pass = 0; pass < sweep.passes; ++pass) {
      const unsigned int a_mask = mask_of(sweep.a_masks, pass);
      const unsigned int b_mask = mask_of(sweep.b_masks, pass);
      unsigned int masked[T::kFragmentRows][4];
#pragma unroll
      for (int i = 0; i < T::kFragmentRows; ++i) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          masked[i][word] = a[i][word] & a_mask;
        }
      }
#pragma unroll
      for (int j = 0; j < T::kFragmentColumns; ++j) {
        const unsigned int b0 = b[j / 2][j % 2 * 2] & b_mask;
        const unsigned int b1 = b[j / 2][j % 2 * 2 + 1] & b_mask;
#pragma unroll
        for (int i = 0; i < T::kFragmentRows; ++i) {
          multiply_matrices<kASigned, kBSigned>(sums.of[i][j], masked[i], b0, b1);
        }
      }
    }
  }
}

template <typename T>
inline __device__ void put_sums(const Lowered& task, const Sweep& sweep, const Sums<T>& sums,
                                long long first_pixel, int first_channel, int group) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const long long pixels = first_pixel + warp % T::kWarpRows * T::kFragmentRows * 16 + lane / 4;
  const int channels =
      first_channel + warp / T::kWarpRows * T::kFragmentColumns * 8 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < T::kFragmentRows; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long pixel = pixels + i * 16 + half * 8;
      if (pixel < task.pixels) {
        int* const out = out_at(task, pixel, group);
#pragma unroll
        for (int j = 0; j < T::kFragmentColumns; ++j) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const int channel = channels + j * 8 + side;
            if (channel < task.outputs) {
              put(out + channel * task.out_channel,
                  weighed(sweep, sums.of[i][j][half * 2 + side]), sweep.add);
            }
          }
        }
      }
    }
  }
}

// Blocks: x over tiles, the channels' tiles of the same pixels beside one another; y over ranges of
// depth, whose sums meet in the output; z over groups.
template <typename T, bool kASigned, bool kBSigned>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm)
    structured_products(Lowered task, Sweep sweep) {
#if __CUDA_ARCH__ >= 800 || defined(NARROWGAUGE_EMULATED_THREADS)
  unsigned char* const shared = shared_memory();
  const int channel_tiles = (task.outputs + T::kChannels - 1) / T::kChannels;
  const long long first_pixel = static_cast<long long>(blockIdx.x / channel_tiles) * T::kPixels;
  const int first_channel = static_cast<int>(blockIdx.x % channel_tiles) * T::kChannels;
  const int group = static_cast<int>(blockIdx.z);
  const int begin = static_cast<int>(blockIdx.y) * task.split_depth;
  const int most = task.depth - begin;
  const int end = begin + (most < task.split_depth ? most : task.split_depth);
  const int stages = (end - begin + T::kDepth - 1) / T::kDepth;

  StageLoader<T> loader(task, first_pixel, first_channel, group, begin, end);
#pragma unroll 1
  for (int stage = 0; stage < T::kStages - 1; ++stage) {
    if (stage < stages) {
      loader.next(shared + stage * T::kStageBytes);
    }
    end_copies();
  }
  Sums<T> sums = {};
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    copies_left<T::kStages - 2>();
    __syncthreads();
    // Into the stage that the barrier says all warps have left.
    const int ahead = stage + T::kStages - 1;
    if (ahead < stages) {
      loader.next(shared + ahead % T::kStages * T::kStageBytes);
    }
    end_copies();
    multiply_stage<T, kASigned, kBSigned>(shared + stage % T::kStages * T::kStageBytes, sweep,
                                          sums);
  }
  put_sums<T>(task, sweep, sums, first_pixel, first_channel, group);
#else
  __trap();  // dotted_products is for these
#endif
}

// Below 8.0, by dp4a: 64 x 64 outputs a block, 4 x 4 a thread, and a depth of 32 at a time.
constexpr int kDotSide = 64;
constexpr int kDotThreads = 256;
constexpr int kDotWords = 8;
constexpr int kDotPitch = kDotWords + 1;  // so that 16 rows are in 16 banks

// Four codes of a window, one word.
inline __device__ unsigned int x_word(const Lowered& task, const Window& window, int depth) {
  const unsigned char* from = codes_at(task, window, place_of(task, depth));
  return from == nullptr ? task.fill : *reinterpret_cast<const unsigned int*>(from);
}

template <bool kASigned, bool kBSigned>
inline __device__ void multiply_dots(const unsigned int* x, const unsigned int* weight,
                                     const Sweep& sweep, int (&sums)[4][4]) {
#pragma unroll 1
  for (int word = 0; word < kDotWords; ++word) {
#pragma unroll 1
    for (int pass = 0; pass < sweep.passes; ++pass) {
      const unsigned int a_mask = mask_of(sweep.a_masks, pass);
      const unsigned int b_mask = mask_of(sweep.b_masks, pass);
      unsigned int a[4];
      unsigned int b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = x[i * 16 * kDotPitch + word] & a_mask;
        b[i] = weight[i * 16 * kDotPitch + word] & b_mask;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[i][j] = multiply_bytes<kASigned, kBSigned>(a[i], b[j], sums[i][j]);
        }
      }
    }
  }
}

template <bool kASigned, bool kBSigned>
__global__ void __launch_bounds__(kDotThreads) dotted_products(Lowered task, Sweep sweep) {
  __shared__ unsigned int x[kDotSide * kDotPitch];
  __shared__ unsigned int weight[kDotSide * kDotPitch];
  const int channel_tiles = (task.outputs + kDotSide - 1) / kDotSide;
  const long long first_pixel = static_cast<long long>(blockIdx.x / channel_tiles) * kDotSide;
  const int first_channel = static_cast<int>(blockIdx.x % channel_tiles) * kDotSide;
  const int group = static_cast<int>(blockIdx.z);
  const int begin = static_cast<int>(blockIdx.y) * task.split_depth;
  const int most = task.depth - begin;
  const int end = begin + (most < task.split_depth ? most : task.split_depth);

  const int thread = static_cast<int>(threadIdx.x);
  const int word = thread % kDotWords;
  constexpr int kRowsAtOnce = kDotThreads / kDotWords;
  Window windows[2];
  for (int i = 0; i < 2; ++i) {
    windows[i] = window_of(task, first_pixel + thread / kDotWords + i * kRowsAtOnce, group);
  }
  int sums[4][4] = {};
#pragma unroll 1
  for (int depth = begin; depth < end; depth += 4 * kDotWords) {
    const int own = depth + 4 * word;
    for (int i = 0; i < 2; ++i) {
      const int row = thread / kDotWords + i * kRowsAtOnce;
      const long long output = static_cast<long long>(group) * task.outputs + first_channel + row;
      const bool exists = first_channel + row < task.outputs && own < end;
      x[row * kDotPitch + word] = x_word(task, windows[i], own);
      weight[row * kDotPitch + word] =
          exists ? *reinterpret_cast<const unsigned int*>(task.weight + output * task.depth + own)
                 : 0;
    }
    __syncthreads();
    multiply_dots<kASigned, kBSigned>(x + thread % 16 * kDotPitch, weight + thread / 16 * kDotPitch,
                                      sweep, sums);
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) {
    const long long pixel = first_pixel + thread % 16 + i * 16;
    if (pixel < task.pixels) {
      int* const out = out_at(task, pixel, group);
      for (int j = 0; j < 4; ++j) {
        const int channel = first_channel + thread / 16 + j * 16;
        if (channel < task.outputs) {
          put(out + channel * task.out_channel, weighed(sweep, sums[i][j]), sweep.add);
        }
      }
    }
  }
}

// Explicit, so that this file compiles alone to every kernel.
template __global__ void structured_products<Large, false, false>(Lowered, Sweep);
template __global__ void structured_products<Large, false, true>(Lowered, Sweep);
template __global__ void structured_products<Large, true, false>(Lowered, Sweep);
template __global__ void structured_products<Large, true, true>(Lowered, Sweep);
template __global__ void structured_products<Small, false, false>(Lowered, Sweep);
template __global__ void structured_products<Small, false, true>(Lowered, Sweep);
template __global__ void structured_products<Small, true, false>(Lowered, Sweep);
template __global__ void structured_products<Small, true, true>(Lowered, Sweep);
template __global__ void dotted_products<false, false>(Lowered, Sweep);
template __global__ void dotted_products<false, true>(Lowered, Sweep);
template __global__ void dotted_products<true, false>(Lowered, Sweep);
template __global__ void dotted_products<true, true>(Lowered, Sweep);

}  // namespace codes
}  // namespace narrowgauge
