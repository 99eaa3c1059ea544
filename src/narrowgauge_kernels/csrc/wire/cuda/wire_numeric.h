// The arithmetic of the int8 wire format in device code, that of ../wire.h, and its accesses. C++14, no
// toolkit header: NVRTC 11.8 and nvcc 13 take it as it is.
#pragma once

#include "common/cuda/numeric.h"

namespace narrowgauge {
namespace wire {

// Lanes elements that are loaded and stored at once, by 16 bytes at most.
template <typename T, int Lanes>
struct __align__(sizeof(T) * Lanes < 16 ? sizeof(T) * Lanes : 16) Pack {
  T lanes[Lanes];
};

template <typename T, int Lanes>
inline __device__ Pack<T, Lanes> load(const T* from) {
  return *reinterpret_cast<const Pack<T, Lanes>*>(from);
}

template <typename T, int Lanes>
inline __device__ void store(T* to, const Pack<T, Lanes>& pack) {
  *reinterpret_cast<Pack<T, Lanes>*>(to) = pack;
}

// 64-bit division is slow, and few tensors need it. Neither is negative.
inline __device__ long long divide(long long a, long long b) {
  if (((a | b) >> 31) == 0) {
    return static_cast<unsigned int>(a) / static_cast<unsigned int>(b);
  }
  return a / b;
}

template <typename T>
inline __device__ int magnitude_of(T x) {
  return __float_as_int(Numeric<T>::widen(x)) & 0x7fffffff;
}

struct Step {
  float scale;
  float reciprocal;
  float limit;
};

// From the magnitude as bits. The constants are kLeastScale and kMostScale of ../wire.h.
inline __device__ Step step_of(int largest) {
  constexpr int kInfinity = 0x7f800000;
  if (largest >= kInfinity) {
    return {__int_as_float(largest > kInfinity ? 0x7fc00000 : kInfinity), 0.0f, 0.0f};
  }
  if (largest == 0) {
    return {1.0f, 1.0f, 127.0f};
  }
  const float exact = __fdiv_rn(__int_as_float(largest), 127.0f);
  const float raised = exact < 1.17549435e-38f ? 1.17549435e-38f : exact;
  const float scale = raised > 2.67938839e+36f ? 2.67938839e+36f : raised;
  return {scale, __frcp_rn(scale), 127.0f};
}

struct Keys {
  unsigned int one;
  unsigned int other;
};

// Of a seed, for the 2^32 elements whose index has this upper half. Not inline: once per thread, but
// for tensors that are larger.
static __noinline__ __device__ Keys keys_of(unsigned long long seed, unsigned long long high) {
  unsigned long long mixed = seed + 0x9e3779b97f4a7c15ull * (high + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
  mixed ^= mixed >> 31;
  return {static_cast<unsigned int>(mixed), static_cast<unsigned int>(mixed >> 32)};
}

inline __device__ unsigned int mix32(unsigned int low, Keys keys) {
  unsigned int bits = low ^ keys.one;
  bits ^= bits >> 16;
  bits *= 0x7feb352du;
  bits ^= bits >> 15;
  bits += keys.other;
  bits *= 0x846ca68bu;
  bits ^= bits >> 16;
  return bits;
}

// Rounds the elements of one thread: to the nearest, or by draws of its index.
class Rounding {
 public:
  inline __device__ Rounding(bool drawing, unsigned long long seed, unsigned long long first)
      : drawing_(drawing), seed_(seed), high_(first >> 32), keys_{0, 0} {
    if (drawing) {
      keys_ = keys_of(seed, high_);
    }
  }
  inline __device__ signed char operator()(float x, const Step& step,
                                           unsigned long long index) const {
    const float value = __fmul_rn(x, step.reciprocal);
    const float raised = value > -step.limit ? value : -step.limit;  // NaN too
    const float v = raised < step.limit ? raised : step.limit;
    const float rounded = __fadd_rn(__fadd_rn(v, 12582912.0f), -12582912.0f);
    int whole = static_cast<int>(rounded);
    if (drawing_) {
      const float rest = __fadd_rn(v, -rounded);
      const unsigned long long high = index >> 32;
      const Keys keys = high == high_ ? keys_ : keys_of(seed_, high);
      const unsigned int bits = mix32(static_cast<unsigned int>(index), keys);
      const float draw =
          __fmul_rn(__fadd_rn(static_cast<float>(bits >> 9), 0.5f), 1.1920928955078125e-7f);
      if (draw < fabsf(rest)) {
        whole += rest < 0.0f ? -1 : 1;
      }
    }
    return static_cast<signed char>(whole);
  }

 private:
  bool drawing_;
  unsigned long long seed_;
  unsigned long long high_;
  Keys keys_;
};

}  // namespace wire
}  // namespace narrowgauge
