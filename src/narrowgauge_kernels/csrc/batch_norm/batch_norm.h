// The loops of batch normalisation on a CPU over one channel, one set per instruction set. No torch
// header.
//
// Sums are taken in lanes, in fp32 over some kBlock values and in fp64 over lanes and blocks, in an
// order that no instruction set changes: results have the same bits on all.
#pragma once

#include <cstdint>

namespace narrowgauge {
namespace batch_norm {

constexpr std::int64_t kBlock = 4096;

// The values of a channel: `images` runs of `inner` neighbours, `stride` apart.
struct Channel {
  std::int64_t images;
  std::int64_t stride;
  std::int64_t inner;
};

struct Normalised {
  float mean, factor, shift;
  const float* residual;  // nullptr: none
  bool rectify;
};

// A gradient as it comes in, and with it the result, whose values above 0 let it pass; nullptr: all
// of them do. NaN does.
struct Above {
  const float* grad;
  const float* result;
};

struct Slopes {
  float mean, offset, slope, factor;
};

struct Loops {
  // The sum of x; and of x - mean into sums[0], and of its square into sums[1].
  double (*sum)(const Channel& channel, const float* x);
  void (*apart)(const Channel& channel, const float* x, float mean, double* sums);
  // out = (x - mean) * factor + shift, and the residual, and 0 where that is negative
  void (*normalise)(const Channel& channel, const float* x, const Normalised& how, float* out);
  // The sum of the gradient that passes into sums[0], and of its product by x - mean into sums[1].
  void (*sums)(const Channel& channel, const Above& above, const float* x, float mean,
               double* sums);
  // out = (what passes - offset - (x - mean) * slope) * factor; passed: what passes, unless nullptr
  void (*differentiate)(const Channel& channel, const Above& above, const float* x,
                        const Slopes& by, float* out, float* passed);

  static Loops generic();
  static Loops avx2();
  static Loops avx512();
  static Loops neon();
};

}  // namespace batch_norm
}  // namespace narrowgauge
