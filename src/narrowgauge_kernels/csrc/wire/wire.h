// The innermost loops of the int8 wire format, one set per instruction set. No torch header.
//
// What every implementation here and on the GPU computes for an element x of a channel, and the bits
// they agree on, in fp32, each operation rounded once:
//
//   scale      = largest magnitude of the channel / 127, at least 2^-126, at most kMostScale; 1 where
//                that is 0; NaN or infinity where that is
//   reciprocal = 1 / scale         limit = 127         both 0 where scale is not finite
//   v          = x * reciprocal, raised to -limit, which NaN becomes, and lowered to limit
//   nearest    = round_half_even(v)
//   value      = nearest, or, with a seed and where draw < |v - nearest|, the integer beyond v
//   x'         = value * scale, then rounded to the type of the result
//
//   draw       = ((bits >> 9) + 0.5) * 2^-23
//   bits       = mix32(lower half of the element's index, keys of seed and upper half)
//
// v - nearest is exact, so a value is an unbiased draw to within 2^-24, and integers stay.
// Magnitudes are compared as bits: NaN is above infinity, and so above all.
#pragma once

#include <cstdint>

#include "common/float16.h"

namespace narrowgauge {
namespace wire {

constexpr float kLeastScale = 1.17549435e-38f;  // 2^-126: its reciprocal is finite
constexpr float kMostScale = 2.67938839e+36f;   // 127 times it is finite

// The magnitude of a T as bits, in the integer of its size; no more than INT_MAX of that.
template <typename T>
struct Magnitude {
  using Type = std::int16_t;
};

template <>
struct Magnitude<float> {
  using Type = std::int32_t;
};

// Of one seed and one upper half of an index; `low` is the lower half of the first element's index.
struct Draws {
  std::uint32_t low;
  std::uint32_t key;
  std::uint32_t other_key;
};

// One value for all elements (`run` loops), or one per element (`columns` loops).
struct Steps {
  const float* reciprocal;
  const float* limit;
};

// `run` loops are over elements of one channel, `columns` loops over elements that each have an
// entry of their own in the tables. With draws, the index of element i is that of the first plus i,
// or plus offset[i]. All are `count` long.
template <typename T>
struct Loops {
  using Bits = typename Magnitude<T>::Type;
  Bits (*largest_run)(std::int64_t count, const T* x, Bits least);
  void (*largest_columns)(std::int64_t count, const T* x, Bits* largest);
  using Pack = void (*)(std::int64_t count, const T* x, const Steps& steps, std::int8_t* values);
  using Draw = void (*)(std::int64_t count, const T* x, const Steps& steps, const Draws& draws,
                        const std::uint32_t* offset, std::int8_t* values);
  using Unpack = void (*)(std::int64_t count, const std::int8_t* values, const float* scale,
                          T* out);
  Pack pack_run;
  Pack pack_columns;
  Draw draw_run;
  Draw draw_columns;
  Unpack unpack_run;
  Unpack unpack_columns;

  static Loops generic();
  static Loops avx2();
  static Loops avx512();
  static Loops neon();
};

}  // namespace wire
}  // namespace narrowgauge
