// Products by any 256 x 256 table. For one step of depth and 8 output channels, the products of every
// code of x with their 8 weights are laid side by side in shared memory, 16 bytes an entry: a thread
// takes the 8 products of a pixel by one 128-bit read. Four such vectors, 32 channels, lie beside one
// another, and four neighbouring threads share a pixel, so that a quarter of a warp, which is what a
// 128-bit read serves at a time, reads two rows of 64 bytes.
//
// What to expect of an H200 (132 SM, 1.755 to 1.98 GHz), by clocks of the 128 bytes that an SM's
// shared memory and L1 move per clock, for a step of depth of 1024 pixels x 32 channels = 32,768
// products, by 512 threads with 64 sums each:
//
//   entries read  4096 vectors, 8 a clock, times 1.49: two random rows of 64 bytes meet in half of
//                 the cases (1 row of 128 bytes: 1.00, 4 of 32: 2.11, 8 of 16: 2.55)      765
//   codes read    128 warps, half a 16-bit read each                                       64
//   entries made  16 KB read from the packed table, which mostly stays in L1, and written  256
//   arithmetic    per vector 2 for addresses, 2 sums of two words (IADD3), 4 upper halves
//                 (LEA.HI): 8 on 64 lanes, 128 warps                                 512, beside
//
// so 1085 clocks, 30 products a clock: 7.0 T/s at 1.755 GHz, 7.9 at 1.98, and 5 asks for two thirds.
// Measured were 1480 at 1.98 GHz, 11,000 to start a block and write its results, 14,000 to add them.
// Codes that are mostly zero meet less: 1.26 at 70 % zeros, 7.9 T/s. Rows of 128 bytes read without
// conflict but have 64 channels to make per 512 pixels: 1088 clocks, and twice the L1 and L2 traffic.
//
// A 16-bit entry is a product less the table's least. Two lie in a word; summed as a word, modulo
// 2^32, beside the sum of upper halves, from which the lower follows: lower = words - 2^16 * upper.
#pragma once

#include "manual_codes/cuda/manual_codes_lowered.h"
#include "manual_codes/cuda/manual_codes_prepared.h"

namespace narrowgauge {
namespace codes {

constexpr int kPrepareBlocks = 32;
constexpr int kPrepareThreads = 512;

// table[a + 128 if signed, b + 128 if signed]; kPrepareBlocks blocks.
inline __device__ int product_of(const int* table, int a, int b, int a_flip, int b_flip) {
  return table[(a ^ a_flip) * 256 + (b ^ b_flip)];
}

template <bool kLeast>
inline __device__ int extreme(int a, int b) {
  return (a < b) == kLeast ? a : b;
}

// Of one number per thread of the block.
template <bool kLeast>
inline __device__ int extreme_of_block(int own, int* numbers) {
  numbers[threadIdx.x] = own;
  __syncthreads();
  for (int half = kPrepareThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) {
      numbers[threadIdx.x] = extreme<kLeast>(numbers[threadIdx.x], numbers[threadIdx.x + half]);
    }
    __syncthreads();
  }
  const int result = numbers[0];
  __syncthreads();
  return result;
}

struct TableRange {
  int least;
  bool narrow;
};

// Each block finds it, for itself: the table is in L2, and a second launch takes longer.
template <int kThreads>
inline __device__ TableRange range_of(const int* table) {
  __shared__ int numbers[kThreads];
  int least = table[threadIdx.x];
  int most = least;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < 256 * 256; i += kThreads) {
    least = extreme<true>(least, table[i]);
    most = extreme<false>(most, table[i]);
  }
  least = extreme_of_block<true>(least, numbers);
  most = extreme_of_block<false>(most, numbers);
  return {least, static_cast<unsigned int>(most) - static_cast<unsigned int>(least) < 65536u};
}

// `bound`: no product has a greater magnitude, and 16 bits hold twice that; -1 where they do not.
// `wide`: whether 32-bit entries are wanted too.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    prepare_table(const int* table, int a_flip, int b_flip, int bound, bool wide,
                  unsigned int* prepared) {
  const TableRange range = bound >= 0 ? TableRange{-bound, true} : range_of<kThreads>(table);
  const int least = range.least;
  const bool narrow = range.narrow;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *reinterpret_cast<TableHead*>(prepared) = {least, narrow};
  }
  constexpr int kWeights = 256 / kPrepareBlocks;
  const int first = static_cast<int>(blockIdx.x) * kWeights;
  for (int i = static_cast<int>(threadIdx.x); narrow && i < kWeights * kNarrowWords;
       i += kThreads) {
    const int weight = first + i / kNarrowWords;
    const int code = narrow_code(i % kNarrowWords);
    const int low = product_of(table, code, weight, a_flip, b_flip) - least;
    const int high = product_of(table, code + 128, weight, a_flip, b_flip) - least;
    prepared[kTableHeadWords + first * kNarrowWords + i] =
        static_cast<unsigned int>(low) | static_cast<unsigned int>(high) << 16;
  }
  for (int i = static_cast<int>(threadIdx.x); wide && i < kWeights * kWideWords; i += kThreads) {
    const int weight = first + i / kWideWords;
    prepared[kWideOffset + first * kWideWords + i] = static_cast<unsigned int>(
        product_of(table, wide_code(i % kWideWords), weight, a_flip, b_flip));
  }
}

constexpr int kTableThreads = 512;
constexpr int kVectors = 4;        // of a row of entries
constexpr int kTableSlab = 16;     // depth of the codes of x that are loaded at once
constexpr int kChannelPad = 32;    // of the weights' rows: kOutputPad of manual_codes_plan.h

template <bool kWideEntries, int kOwn, int kSteps>
struct TableShape {
  static constexpr bool kWide = kWideEntries;
  static constexpr int kLanes = kWide ? 4 : 8;  // channels of a vector
  static constexpr int kChannels = kVectors * kLanes;
  static constexpr int kOwnPixels = kOwn;    // of a thread
  static constexpr int kDepth = kSteps;      // steps of depth between two barriers: 1 or 2
  static constexpr int kPixels = kTableThreads / kVectors * kOwn;
  static constexpr int kRowWords = kWide ? kWideWords : kNarrowWords;
  static constexpr int kPositions = kRowWords / 2;  // pairs of words, each made into entries at once
  static constexpr int kSlabBytes = kPixels * kTableSlab;
  static constexpr int kEntriesBytes = kDepth * 256 * kVectors * 16;
  static constexpr int kBytes = 2 * (kSlabBytes + kEntriesBytes);

  // The vector whose entries a thread makes.
  static inline __device__ int made_by(unsigned int thread) {
    return static_cast<int>(thread) / kPositions % kVectors;
  }
};

template <bool kWide>
using Table96K = TableShape<kWide, 8, 2>;  // 1024 pixels
template <bool kWide>
using Table92K = TableShape<kWide, 7, 2>;  // 896 pixels: 7 of them are 32 images of 14 x 14
template <bool kWide>
using Table64K = TableShape<kWide, 8, 1>;  // all that 7.5 has
template <bool kWide>
using Table48K = TableShape<kWide, 4, 1>;  // 512 pixels; needs no permission

// The weights are [groups, depth, padded outputs], the padded channels last.
struct EntryMaker {
  const Lowered& task;
  const unsigned int* words;    // of the packed table
  const unsigned char* column;  // weights of this thread's vector at depth 0
  long long row;                // bytes between steps of depth
  int end;
};

// A row's four vectors lie in another order from pair to pair of rows, so that threads of one vector and
// of neighbouring codes store to different banks. Those who read a row read all of it.
inline __device__ int place_in_row(int vector, int code) { return vector ^ (code / 2 % kVectors); }

inline __device__ void store_entries(const Pair (&pairs)[8], Vector* entries, int first) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    Vector low;
    Vector high;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      low.words[word] = low_halves(pairs[2 * word].words[e], pairs[2 * word + 1].words[e]);
      high.words[word] = high_halves(pairs[2 * word].words[e], pairs[2 * word + 1].words[e]);
    }
    entries[(first + e * 64) * kVectors] = low;
    entries[(first + e * 64 + 128) * kVectors] = high;
  }
}

inline __device__ void store_entries(const Pair (&pairs)[4], Vector* entries, int first) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    entries[(first + e * 128) * kVectors] = {{pairs[0].words[e], pairs[1].words[e],
                                              pairs[2].words[e], pairs[3].words[e]}};
  }
}

// Entries of S::kDepth steps from `depth` on. A unit is two words of the packed table for one vector,
// and a warp has one vector: each of its reads is of 256 bytes in a row, and of weights that all of
// it shares. Where there is no weight, products are zero: those of padded channels, and past the end.
template <typename S>
inline __device__ void make_entries(const EntryMaker& maker, int depth, Vector* entries) {
  constexpr int kRowWords = S::kRowWords;
  constexpr int kUnits = S::kPositions * kVectors;
  static_assert(kTableThreads % kUnits == 0, "a thread's units are of one vector");
  const Lowered& task = maker.task;
#pragma unroll 1
  for (int first = 0; first < S::kDepth * kUnits; first += kTableThreads) {
    const int unit = first + static_cast<int>(threadIdx.x);
    const int step = unit / kUnits;
    const int position = unit % S::kPositions;
    if (S::kDepth * kUnits < kTableThreads && step >= S::kDepth) {
      break;
    }
    const int own = depth + step;
    Pair pairs[S::kLanes];
    const bool counts = own < maker.end && (task.channels == task.true_channels ||
                                            own % task.channels < task.true_channels);
    if (counts) {
      unsigned char codes[S::kLanes];
      const unsigned int* from =
          reinterpret_cast<const unsigned int*>(maker.column + own * maker.row);
#pragma unroll
      for (int lane = 0; lane < S::kLanes; ++lane) {
        codes[lane] = static_cast<unsigned char>(from[lane / 4] >> (lane % 4 * 8));
      }
#pragma unroll
      for (int lane = 0; lane < S::kLanes; ++lane) {
        pairs[lane] = *reinterpret_cast<const Pair*>(maker.words + codes[lane] * kRowWords +
                                                     2 * position);
      }
    } else {
#pragma unroll
      for (int lane = 0; lane < S::kLanes; ++lane) {
        pairs[lane] = {{0, 0}};
      }
    }
    Vector* const row = entries + step * 256 * kVectors;
    store_entries(pairs, row + place_in_row(S::made_by(threadIdx.x), position), position);
  }
}

// The sums of a thread's pixels with its vector's channels; `upper` only of 16-bit entries.
template <typename S>
struct TableSums {
  unsigned int words[S::kOwnPixels][4];
  unsigned int upper[S::kOwnPixels][4];

  inline __device__ void add(int pixel, const Vector& entry) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[pixel][i] += entry.words[i];
      if (!S::kWide) {
        upper[pixel][i] += entry.words[i] >> 16;
      }
    }
  }

  inline __device__ unsigned int channel(int pixel, int lane) const {
    if (S::kWide) {
      return words[pixel][lane];
    }
    const unsigned int high = upper[pixel][lane / 2];
    return lane % 2 == 1 ? high : words[pixel][lane / 2] - (high << 16);
  }
};

// Where a code's entries of the vector that begins at `vector_byte` of a row lie, in bytes; `shifted`
// is the code times 256 to the power of kByte.
template <int kByte>
inline __device__ unsigned int entry_at(unsigned int shifted, unsigned int vector_byte) {
  constexpr unsigned int kRowBytes = kVectors * 16;
  const unsigned int code = shifted >> (8 * kByte);
  return code * kRowBytes + ((code * 8 & (kRowBytes - 16)) ^ vector_byte);
}

// Adds S::kDepth steps. Codes are those of this thread's first pixel at these steps; bytes, because
// indices would be scaled by one more instruction.
template <typename S>
inline __device__ void add_entries(const unsigned char* codes, const unsigned char* entries,
                                   unsigned int vector_byte, TableSums<S>& sums) {
  constexpr int kRowBytes = kVectors * 16;
  constexpr int kPitch = 32 / kVectors;  // pixels between two of a thread
#pragma unroll
  for (int pixel = 0; pixel < S::kOwnPixels; ++pixel) {
    const unsigned char* const own = codes + pixel * kPitch * kTableSlab;
    if (S::kDepth == 2) {
      const unsigned int both = *reinterpret_cast<const unsigned short*>(own);
      const Vector first =
          *reinterpret_cast<const Vector*>(entries + entry_at<0>(both & 255u, vector_byte));
      const Vector second = *reinterpret_cast<const Vector*>(entries + 256 * kRowBytes +
                                                             entry_at<1>(both, vector_byte));
      sums.add(pixel, first);
      sums.add(pixel, second);
    } else {
      sums.add(pixel,
               *reinterpret_cast<const Vector*>(entries + entry_at<0>(*own, vector_byte)));
    }
  }
}

// Blocks as those of structured_products. Half of the warps make the next entries first and the other
// half add the present ones first, so that waiting for the table and reading entries overlap.
template <typename S>
__global__ void __launch_bounds__(kTableThreads, 1)
    table_products(Lowered task, const unsigned int* prepared) {
  const TableHead head = *reinterpret_cast<const TableHead*>(prepared);
  if ((head.narrow == 0) != S::kWide) {
    return;  // the other kernel's, which is launched too where the host cannot tell
  }
  unsigned char* const slabs = shared_memory();
  Vector* const entries = reinterpret_cast<Vector*>(slabs + 2 * S::kSlabBytes);
  constexpr int kEntries = S::kEntriesBytes / 16;
  const int channel_tiles = (task.outputs + S::kChannels - 1) / S::kChannels;
  const long long first_pixel = static_cast<long long>(blockIdx.x / channel_tiles) * S::kPixels;
  const int first_channel = static_cast<int>(blockIdx.x % channel_tiles) * S::kChannels;
  const int group = static_cast<int>(blockIdx.z);
  const int begin = static_cast<int>(blockIdx.y) * task.split_depth;
  const int most = task.depth - begin;
  const int end = begin + (most < task.split_depth ? most : task.split_depth);

  const int thread = static_cast<int>(threadIdx.x);
  const int vector = thread % kVectors;
  const long long padded = (task.outputs + kChannelPad - 1) / kChannelPad * kChannelPad;
  const EntryMaker maker{task,
                         prepared + (S::kWide ? kWideOffset : kTableHeadWords),
                         task.weight + static_cast<long long>(group) * task.depth * padded +
                             first_channel + S::made_by(threadIdx.x) * S::kLanes,
                         padded, end};
  // Registers are short: windows are found again for each slab.
  const auto load_slab = [&](int depth, unsigned char* slab) {
    const Place place = place_of(task, depth);
#pragma unroll 1
    for (int pixel = thread; pixel < S::kPixels; pixel += kTableThreads) {
      copy_codes(task, window_of(task, first_pixel + pixel, group), place,
                 slab + pixel * kTableSlab);
    }
    end_copies();
  };

  const int own_pixel = thread / 32 * (32 / kVectors) * S::kOwnPixels + thread % 32 / kVectors;
  const bool makes_first = thread / 128 % 2 == 0;
  TableSums<S> sums = {};
  load_slab(begin, slabs);
  make_entries<S>(maker, begin, entries);
#pragma unroll 1
  for (int depth = begin; depth < end; depth += S::kDepth) {
    const int at = depth - begin;
    const int slab = at / kTableSlab;
    const int side = at / S::kDepth % 2;
    if (at % kTableSlab == 0) {
      copies_left<0>();
    }
    __syncthreads();
    if (at % kTableSlab == 0 && depth + kTableSlab < end) {
      load_slab(depth + kTableSlab, slabs + (slab + 1) % 2 * S::kSlabBytes);
    }
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if ((turn == 0) == makes_first) {
        if (depth + S::kDepth < end) {
          make_entries<S>(maker, depth + S::kDepth, entries + (1 - side) * kEntries);
        }
      } else {
        add_entries<S>(slabs + slab % 2 * S::kSlabBytes + own_pixel * kTableSlab + at % kTableSlab,
                       reinterpret_cast<const unsigned char*>(entries + side * kEntries),
                       static_cast<unsigned int>(vector) * 16, sums);
      }
    }
  }

  // Each 16-bit entry was short of the least product; that of the whole sum is added once.
  const unsigned int short_of =
      S::kWide || blockIdx.y != 0
          ? 0u
          : static_cast<unsigned int>(head.least) * static_cast<unsigned int>(task.true_depth);
  const bool add = gridDim.y > 1;
#pragma unroll
  for (int own = 0; own < S::kOwnPixels; ++own) {
    const long long pixel = first_pixel + own_pixel + own * (32 / kVectors);
    if (pixel < task.pixels) {
      int* const out = out_at(task, pixel, group);
#pragma unroll
      for (int lane = 0; lane < S::kLanes; ++lane) {
        const int channel = first_channel + vector * S::kLanes + lane;
        if (channel < task.outputs) {
          put(out + channel * task.out_channel, sums.channel(own, lane) + short_of, add);
        }
      }
    }
  }
}

// Explicit, so that this file compiles alone to every kernel.
template __global__ void prepare_table<kPrepareThreads>(const int*, int, int, int, bool,
                                                       unsigned int*);
template __global__ void table_products<Table96K<false>>(Lowered, const unsigned int*);
template __global__ void table_products<Table96K<true>>(Lowered, const unsigned int*);
template __global__ void table_products<Table92K<false>>(Lowered, const unsigned int*);
template __global__ void table_products<Table92K<true>>(Lowered, const unsigned int*);
template __global__ void table_products<Table64K<false>>(Lowered, const unsigned int*);
template __global__ void table_products<Table64K<true>>(Lowered, const unsigned int*);
template __global__ void table_products<Table48K<false>>(Lowered, const unsigned int*);
template __global__ void table_products<Table48K<true>>(Lowered, const unsigned int*);

}  // namespace codes
}  // namespace narrowgauge
