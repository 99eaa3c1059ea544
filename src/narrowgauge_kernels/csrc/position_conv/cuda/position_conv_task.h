// What kernels of convolutions at listed positions, and of their lists, are given. C++14, no toolkit
// header.
#pragma once

namespace narrowgauge {
namespace position_conv {

constexpr int kMostTaps = 256;  // of a launch's 4 KB of arguments they take half

// Where a result goes: to its own row of `out`, to the row of its position, or added to that.
enum class Finish : int { kPut, kSet, kAdd };

// `listed` positions, of which the first *count are meant, where count is not null. All else is as in
// ../position_conv.h; taps are in floats. For kAdd, `out` is the state.
struct Task {
  const float* rows;
  const long long* positions;
  const long long* count;
  const float* packed;
  const float* bias;
  const float* share;
  float* out;
  float* total;
  long long listed;
  long long channels;
  long long filters;
  long long depth;         // taps times channels
  long long first_filter;  // of the launch's first panel
  int panels;              // of the launch, of one width
  Finish finish;
  float slope;
  bool quads_out;  // rows of the result begin at multiples of 16 bytes
  int tap_count;
  long long taps[kMostTaps];
};

// Flags are bytes, 0 or not, of which the first *limit are meant, where limit is not null. `list`
// gets the places of those that are set, in order, as many as it has room for; what is left of it
// zeros, where it is `filled`; `found` how many there were. `counts` has room for one for each block.
struct ListTask {
  const unsigned char* flags;
  const long long* limit;
  long long* counts;
  long long* list;
  long long* found;
  long long cells;
  long long capacity;
  bool quads;  // flags begin at a multiple of 16 bytes
  bool filled;
};

// The flags of what is a tap away from one of the positions, and inside.
struct NearTask {
  const long long* positions;
  const long long* count;
  const bool* inside;
  unsigned char* flags;
  long long listed;
  long long cells;
  int tap_count;
  long long taps[kMostTaps];  // in rows
};

}  // namespace position_conv
}  // namespace narrowgauge
