// The innermost loops of the sparse convolution on the CPU, one set per instruction set. No torch
// header.
//
// What every implementation computes, and the bits they agree on, in fp32, for a pixel of the
// result:
//
//   sums[filter] = 0
//   for each slice of channels, for each tap of the window, both in order, where the tap is not on
//   the padding:
//     odd[filter] = 0
//     for i, (value, channel) in the list of that pixel and slice, with channels in order:
//       even i: sums[filter] = fma(value, weight[tap, channel, filter], sums[filter])
//       odd i:  odd[filter]  = fma(value, weight[tap, channel, filter], odd[filter])
//     sums[filter] = sums[filter] + odd[filter]
//   result[filter] = sums[filter] + bias[filter]
//
// A list of odd length ends in a zero times a row of zeros, which costs less than a branch that is
// guessed wrong half of the time.
//
// Slices depend on the number of filters only; threads, tiles and vector width divide pixels and
// filters, so they cannot change a result.
#pragma once

#include <cstdint>

namespace narrowgauge {
namespace sparse_conv {

// Filters of a block are a multiple of this, and offsets in lists count bytes of such a row.
constexpr int kGrain = 16;
constexpr int kGrainBytes = kGrain * static_cast<int>(sizeof(float));
// A list is written in whole vectors: what is behind its end may be overwritten by as much.
constexpr std::int64_t kSlack = 16;

// The nonzeros of a run of pixels in one slice of channels. List p is [starts[p], starts[p + 1]),
// of even length:
//   values[i]   the nonzero
//   offsets[i]  its channel within the slice, times kGrainBytes; behind the last: the row of zeros
struct Lists {
  float* values;
  std::int32_t* offsets;
  std::int64_t* starts;
};

// Where elements of a map are: (channel c, pixel p) at from[c * channel_stride + p * pixel_stride];
// one of the strides is 1.
struct Map {
  const float* from;
  std::int64_t channel_stride;
  std::int64_t pixel_stride;
};

// A slice of channels, and whether what is below zero is dropped too; NaN never is.
struct Slice {
  int channels;
  bool relu;
};

// Appends the lists of `pixels` pixels in one slice from list `first` on; starts[first] is set.
// `scratch` has 8 * (channels rounded up to 16) floats.
using Build = void (*)(const Map& map, std::int64_t pixels, const Slice& slice, std::int64_t first,
                       const Lists& lists, float* scratch);

// Continues the sums of `count` pixels of the result by one tap: pixel i, at sums[i * width], reads
// list first + i * step. `panel` is [channels, then a row of zeros][width].
using Visit = void (*)(const Lists& lists, const float* panel, std::int64_t first,
                       std::int64_t step, std::int64_t count, float* sums);

// Where a result goes, plus `bias` and after ReLU where that is asked for: (pixel p, filter f) to
// to[p * pixel_stride + f * filter_stride]; one of the strides is 1.
struct Result {
  float* to;
  std::int64_t pixel_stride;
  std::int64_t filter_stride;
  const float* bias;
  bool relu;
};

// Writes `pixels` sums of `width` filters, of which `filled` are there; `bias` has `width` numbers.
// Overwrites the sums.
using Finish = void (*)(float* sums, std::int64_t pixels, int width, int filled,
                        const Result& result);

// How many of `count` numbers are zeros, or with `relu` become zeros; NaN is none.
using Count = std::int64_t (*)(const float* from, std::int64_t count, bool relu);

struct Loops {
  Build build;
  Visit visit16;
  Visit visit32;
  Visit visit64;
  Finish finish;
  Count zeros;

  static Loops generic();
  static Loops avx2();
  static Loops avx512();
  static Loops neon();
};

}  // namespace sparse_conv
}  // namespace narrowgauge
