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

struct Loops {
  // The sum of x, and of (x - mean)^2.
  double (*sum)(const Channel& channel, const float* x);
  double (*squares)(const Channel& channel, const float* x, float mean);
  // out = (x - mean) * factor + shift
  void (*normalise)(const Channel& channel, const float* x, float mean, float factor, float shift,
                    float* out);
  // The sum of grad into sums[0], and of grad * (x - mean) into sums[1].
  void (*sums)(const Channel& channel, const float* grad, const float* x, float mean, double* sums);
  // out = (grad - offset - (x - mean) * slope) * factor
  void (*differentiate)(const Channel& channel, const float* grad, const float* x, float mean,
                        float offset, float slope, float factor, float* out);

  static Loops generic();
  static Loops avx2();
  static Loops avx512();
  static Loops neon();
};

}  // namespace batch_norm
}  // namespace narrowgauge
