// The bodies of the loops, for the compiler to vectorise. Included once by each
// fake_quantize_<instructions>.cpp, which then names the set it makes.
//
// The anonymous namespace is load-bearing: each including file has its own compiler flags, and a
// shared inline function would let the linker keep, say, the AVX-512 copy for everyone.
#pragma once

#include "fake_quantize/fake_quantize.h"
#include "common/numeric_loops.h"

namespace narrowgauge {
namespace fake_quantize {
namespace {

template <typename T, bool Columns>
void forward(std::int64_t count, const T* __restrict x,
             const Steps<typename Wide<T>::Type>& steps, T* __restrict out) {
  using A = typename Wide<T>::Type;
  const A* __restrict scale = steps.scale;
  const A* __restrict reciprocal = steps.reciprocal;
  const A* __restrict low = steps.low;
  const A* __restrict high = steps.high;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t c = Columns ? i : 0;
    const A value = clamp(Numeric<T>::widen(x[i]) * reciprocal[c], low[c], high[c]);
    out[i] = Numeric<T>::narrow(round_half_even(value) * scale[c]);
  }
}

template <typename T, bool Columns>
void backward(std::int64_t count, const T* __restrict grad, const T* __restrict x,
              const Steps<typename Wide<T>::Type>& steps, T* __restrict out) {
  using A = typename Wide<T>::Type;
  const A* __restrict reciprocal = steps.reciprocal;
  const A* __restrict low = steps.low;
  const A* __restrict high = steps.high;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t c = Columns ? i : 0;
    // One step beyond the ends is outside, and still small enough to round.
    const A value =
        clamp(Numeric<T>::widen(x[i]) * reciprocal[c], low[c] - A(1), high[c] + A(1));
    const A rounded = round_half_even(value);
    const bool outside = (rounded < low[c]) | (rounded > high[c]);
    out[i] = Numeric<T>::zero_if(outside, grad[i]);
  }
}

template <typename T>
Loops<T> make_loops() {
  return {forward<T, false>, forward<T, true>, backward<T, false>, backward<T, true>};
}

}  // namespace
}  // namespace fake_quantize
}  // namespace narrowgauge
