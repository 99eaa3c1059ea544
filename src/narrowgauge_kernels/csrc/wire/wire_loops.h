// The bodies of the loops, for the compiler to vectorise. Included once by each
// wire_<instructions>.cpp, which then names the set it makes. For the anonymous namespace see
// numeric_loops.h.
#pragma once

#include "common/numeric_loops.h"
#include "wire/wire.h"

namespace narrowgauge {
namespace wire {
namespace {

inline std::int32_t magnitude_of(float x) {
  return static_cast<std::int32_t>(bits_of(x) & 0x7fffffffu);
}
inline std::int16_t magnitude_of(Half x) { return static_cast<std::int16_t>(x.bits & 0x7fffu); }
inline std::int16_t magnitude_of(BFloat16 x) { return static_cast<std::int16_t>(x.bits & 0x7fffu); }

template <typename T>
typename Magnitude<T>::Type largest_run(std::int64_t count, const T* __restrict x,
                                        typename Magnitude<T>::Type least) {
  typename Magnitude<T>::Type largest = least;
  for (std::int64_t i = 0; i < count; ++i) {
    const typename Magnitude<T>::Type one = magnitude_of(x[i]);
    largest = one > largest ? one : largest;
  }
  return largest;
}

template <typename T>
void largest_columns(std::int64_t count, const T* __restrict x,
                     typename Magnitude<T>::Type* __restrict largest) {
  for (std::int64_t i = 0; i < count; ++i) {
    const typename Magnitude<T>::Type one = magnitude_of(x[i]);
    largest[i] = one > largest[i] ? one : largest[i];
  }
}

// Which way round the first comparison is decides that NaN becomes -limit. The limit is no constant:
// paths on which v is known would be split off, and the loop around them not be vectorised.
inline float scaled(float x, float reciprocal, float limit) {
  const float value = x * reciprocal;
  const float raised = value > -limit ? value : -limit;
  return raised < limit ? raised : limit;
}

// The low byte of a whole number in [-2^22, 2^22] plus 1.5 * 2^23 is that number in two's complement.
inline std::int32_t whole(float rounded) {
  return static_cast<std::int32_t>(bits_of(rounded + 12582912.0f));
}

inline std::uint32_t mix32(std::uint32_t low, const Draws& draws) {
  std::uint32_t bits = low ^ draws.key;
  bits ^= bits >> 16;
  bits *= 0x7feb352du;
  bits ^= bits >> 15;
  bits += draws.other_key;
  bits *= 0x846ca68bu;
  bits ^= bits >> 16;
  return bits;
}

inline std::int8_t nearest(float v) {
  return static_cast<std::int8_t>(whole(round_half_even(v)));
}

// Comparisons are of bits: those of floats might trap, and the loop not be vectorised.
inline std::int8_t drawn(float v, std::uint32_t bits) {
  const float rounded = round_half_even(v);
  const float rest = v - rounded;
  const float draw = (static_cast<float>(static_cast<std::int32_t>(bits >> 9)) + 0.5f) *
                     1.1920928955078125e-7f;  // 2^-23
  const std::uint32_t step = (0u - (bits_of(rest) >> 31)) | 1u;  // 1, or -1 where v is below
  const std::uint32_t taken = select(magnitude_of(draw) < magnitude_of(rest), step, 0u);
  return static_cast<std::int8_t>(static_cast<std::uint32_t>(whole(rounded)) + taken);
}

template <typename T, bool Columns>
void pack(std::int64_t count, const T* __restrict x, const Steps& steps,
          std::int8_t* __restrict values) {
  const float* __restrict reciprocal = steps.reciprocal;
  const float* __restrict limit = steps.limit;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t c = Columns ? i : 0;
    values[i] = nearest(scaled(Numeric<T>::widen(x[i]), reciprocal[c], limit[c]));
  }
}

template <typename T, bool Columns>
void draw(std::int64_t count, const T* __restrict x, const Steps& steps, const Draws& draws,
          const std::uint32_t* __restrict offset, std::int8_t* __restrict values) {
  const float* __restrict reciprocal = steps.reciprocal;
  const float* __restrict limit = steps.limit;
  const Draws own = draws;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t c = Columns ? i : 0;
    const std::uint32_t low = own.low + (Columns ? offset[i] : static_cast<std::uint32_t>(i));
    values[i] = drawn(scaled(Numeric<T>::widen(x[i]), reciprocal[c], limit[c]), mix32(low, own));
  }
}

template <typename T, bool Columns>
void unpack(std::int64_t count, const std::int8_t* __restrict values,
            const float* __restrict scale, T* __restrict out) {
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = Numeric<T>::narrow(static_cast<float>(values[i]) * scale[Columns ? i : 0]);
  }
}

template <typename T>
Loops<T> make_loops() {
  return {largest_run<T>, largest_columns<T>, pack<T, false>,   pack<T, true>,
          draw<T, false>, draw<T, true>,      unpack<T, false>, unpack<T, true>};
}

}  // namespace
}  // namespace wire
}  // namespace narrowgauge
