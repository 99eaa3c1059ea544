// The innermost loops of convolutions at listed positions, one set per instruction set. No torch.
//
// For a position p and a filter f, in this order of taps t and channels c, each product and sum one
// rounding (fma):
//
//   sum = 0;  sum = fma(rows[p + tap[t]][c], weight[t][c][f], sum) for all t, c
//
// so the bits depend neither on threads, nor on the instruction set, nor on which other positions
// are in the list. One filter alone (`dot`) is summed in kDotLanes partial sums, which are then added
// in order.
#pragma once

#include <cstdint>

namespace narrowgauge {
namespace position_conv {

constexpr int kWidest = 64;   // filters of one panel, at most
constexpr int kNarrowest = 16;
constexpr int kMostRows = 16;  // positions at once, at most
constexpr int kDotLanes = 16;

// The windows of some positions: `at[r]` is the row of position r, `taps` are in floats from there.
struct Windows {
  const float* const* at;
  const std::int64_t* taps;
  std::int64_t tap_count;
  std::int64_t channels;
};

// sums[r * width + f] of as many positions as `rows` says of that width.
using Multiply = void (*)(const Windows& windows, const float* panel, float* sums);

struct Panel {
  int width;
  int rows;
  Multiply multiply;
};

struct Loops {
  Panel panels[3];  // 64, 32 and 16 filters
  float (*dot)(const Windows& windows, const float* weight);  // of position 0

  static Loops generic();
  static Loops avx2();
  static Loops avx512();
  static Loops neon();
};

}  // namespace position_conv
}  // namespace narrowgauge
