// The innermost loops of the fake-quantise operator, one set per instruction set. No torch header.
//
// What every implementation here and on the GPU computes for an element x of a channel, and the bits
// they agree on, in fp32 (fp64 for fp64), each operation rounded once:
//
//   reciprocal = 1 / scale       low = quant_min - zero_point       high = quant_max - zero_point
//   value      = x * reciprocal, raised to low, lowered to high; NaN stays NaN
//   result     = round_half_even(value) * scale
//   gradient   = grad, or 0 where round_half_even(x * reciprocal) is below low or above high
//
// Clamping before rounding gives what clamping after it gives, because low and high are integers;
// and a value so clamped is rounded by adding and subtracting 1.5 * 2^23 (2^52), in any vector unit.
// No result is -0.
#pragma once

#include <cstdint>

#include "common/float16.h"

namespace narrowgauge {
namespace fake_quantize {

template <typename T>
struct Wide {
  using Type = float;
};

template <>
struct Wide<double> {
  using Type = double;
};

// One value for all elements (Loops::run), or one per element (Loops::columns).
template <typename A>
struct Steps {
  const A* scale;
  const A* reciprocal;
  const A* low;
  const A* high;
};

// `forward` writes out from x; `backward` writes it from grad and x. All are `count` long.
template <typename T>
struct Loops {
  using A = typename Wide<T>::Type;
  using Forward = void (*)(std::int64_t count, const T* x, const Steps<A>& steps, T* out);
  using Backward = void (*)(std::int64_t count, const T* grad, const T* x, const Steps<A>& steps,
                            T* out);
  Forward run;
  Forward columns;
  Backward run_backward;
  Backward columns_backward;

  static Loops generic();
  static Loops avx2();
  static Loops avx512();
  static Loops neon();
};

}  // namespace fake_quantize
}  // namespace narrowgauge
