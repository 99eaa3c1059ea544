// The vectors of the manual operators, those that this file's flags allow: AVX-512F, AVX2 with FMA,
// NEON, or plain floats. Each is an Ops of manual_mac.h with load and store.
//
// unverified: the NEON lanes of the manual operators | no arm64 host at hand, not even emulated | on such a host: pytest tests/kernels/test_manual.py
#pragma once

#include <cstdint>

#include "manual/manual_mac.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace narrowgauge {
namespace mac {
namespace {

#if defined(__AVX512F__)

typedef float Lanes __attribute__((vector_size(64)));
typedef unsigned int Words __attribute__((vector_size(64)));

template <>
struct Ops<Lanes> {
  using U = Words;
  static MAC_INLINE U bits(Lanes value) { return reinterpret_cast<U>(value); }
  static MAC_INLINE Lanes floats(U value) { return reinterpret_cast<Lanes>(value); }
  static MAC_INLINE Lanes splat(float value) { return reinterpret_cast<Lanes>(_mm512_set1_ps(value)); }
  static MAC_INLINE U splat_word(unsigned int value) {
    return reinterpret_cast<U>(_mm512_set1_epi32(static_cast<int>(value)));
  }
  static MAC_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
  static MAC_INLINE Lanes multiply(Lanes a, Lanes b) { return a * b; }
  // With a mask that takes all: the plain ones warn of what GCC 12 leaves undefined on purpose.
  static MAC_INLINE __m512i product(__m512i a, __m512i b) {
    return _mm512_maskz_mul_epu32(0xff, a, b);
  }
  static MAC_INLINE __m512i upper(__m512i a) { return _mm512_maskz_srli_epi64(0xff, a, 32); }
  static MAC_INLINE U high_sum(U a, U b, U c, U d) {
    const __m512i first = reinterpret_cast<__m512i>(a);
    const __m512i second = reinterpret_cast<__m512i>(b);
    const __m512i third = reinterpret_cast<__m512i>(c);
    const __m512i fourth = reinterpret_cast<__m512i>(d);
    const __m512i even = _mm512_add_epi64(product(first, second), product(third, fourth));
    const __m512i odd =
        _mm512_add_epi64(product(upper(first), second), product(upper(third), fourth));
    return reinterpret_cast<U>(_mm512_mask_blend_epi32(0xaaaa, upper(even), odd));
  }
  static MAC_INLINE Lanes flushed(Lanes a, Lanes b) {
    const __m512 product = _mm512_mul_ps(a, b);
    const __mmask16 large =
        _mm512_cmp_ps_mask(_mm512_abs_ps(product), _mm512_set1_ps(1.17549435e-38f), _CMP_NLT_UQ);
    return _mm512_maskz_mov_ps(large, product);
  }
  static MAC_INLINE Lanes load(const float* from) { return _mm512_loadu_ps(from); }
  static MAC_INLINE void store(float* to, Lanes value) { _mm512_storeu_ps(to, value); }
};

#elif defined(__AVX2__)

typedef float Lanes __attribute__((vector_size(32)));
typedef unsigned int Words __attribute__((vector_size(32)));

template <>
struct Ops<Lanes> {
  using U = Words;
  static MAC_INLINE U bits(Lanes value) { return reinterpret_cast<U>(value); }
  static MAC_INLINE Lanes floats(U value) { return reinterpret_cast<Lanes>(value); }
  static MAC_INLINE Lanes splat(float value) { return _mm256_set1_ps(value); }
  static MAC_INLINE U splat_word(unsigned int value) {
    return reinterpret_cast<U>(_mm256_set1_epi32(static_cast<int>(value)));
  }
  static MAC_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
  static MAC_INLINE Lanes multiply(Lanes a, Lanes b) { return a * b; }
  static MAC_INLINE U high_sum(U a, U b, U c, U d) {
    const __m256i first = reinterpret_cast<__m256i>(a);
    const __m256i second = reinterpret_cast<__m256i>(b);
    const __m256i third = reinterpret_cast<__m256i>(c);
    const __m256i fourth = reinterpret_cast<__m256i>(d);
    const __m256i even =
        _mm256_add_epi64(_mm256_mul_epu32(first, second), _mm256_mul_epu32(third, fourth));
    const __m256i odd = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(first, 32), second),
                                         _mm256_mul_epu32(_mm256_srli_epi64(third, 32), fourth));
    return reinterpret_cast<U>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
  }
  static MAC_INLINE Lanes flushed(Lanes a, Lanes b) {
    const __m256 product = _mm256_mul_ps(a, b);
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), product);
    return _mm256_and_ps(product, _mm256_cmp_ps(size, _mm256_set1_ps(1.17549435e-38f), _CMP_NLT_UQ));
  }
  static MAC_INLINE Lanes load(const float* from) { return _mm256_loadu_ps(from); }
  static MAC_INLINE void store(float* to, Lanes value) { _mm256_storeu_ps(to, value); }
};

#elif defined(__aarch64__)

typedef float Lanes __attribute__((vector_size(16)));
typedef unsigned int Words __attribute__((vector_size(16)));

template <>
struct Ops<Lanes> {
  using U = Words;
  static MAC_INLINE U bits(Lanes value) { return reinterpret_cast<U>(value); }
  static MAC_INLINE Lanes floats(U value) { return reinterpret_cast<Lanes>(value); }
  static MAC_INLINE Lanes splat(float value) { return reinterpret_cast<Lanes>(vdupq_n_f32(value)); }
  static MAC_INLINE U splat_word(unsigned int value) {
    return reinterpret_cast<U>(vdupq_n_u32(value));
  }
  static MAC_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
    return reinterpret_cast<Lanes>(
        vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a),
                  reinterpret_cast<float32x4_t>(b)));
  }
  static MAC_INLINE Lanes multiply(Lanes a, Lanes b) { return a * b; }
  static MAC_INLINE U high_sum(U a, U b, U c, U d) {
    const uint32x4_t first = reinterpret_cast<uint32x4_t>(a);
    const uint32x4_t third = reinterpret_cast<uint32x4_t>(c);
    const uint32x2_t second = vget_low_u32(reinterpret_cast<uint32x4_t>(b));
    const uint32x2_t fourth = vget_low_u32(reinterpret_cast<uint32x4_t>(d));
    const uint64x2_t low =
        vmlal_u32(vmull_u32(vget_low_u32(first), second), vget_low_u32(third), fourth);
    const uint64x2_t high =
        vmlal_u32(vmull_u32(vget_high_u32(first), second), vget_high_u32(third), fourth);
    return reinterpret_cast<U>(vcombine_u32(vshrn_n_u64(low, 32), vshrn_n_u64(high, 32)));
  }
  static MAC_INLINE Lanes flushed(Lanes a, Lanes b) {
    const Lanes product = a * b;
    const U word = bits(product);
    return floats((word & 0x7f800000u) == 0u ? word & 0x80000000u : word);
  }
  static MAC_INLINE Lanes load(const float* from) {
    return reinterpret_cast<Lanes>(vld1q_f32(from));
  }
  static MAC_INLINE void store(float* to, Lanes value) {
    vst1q_f32(to, reinterpret_cast<float32x4_t>(value));
  }
};

#else

using Lanes = float;

#endif

// to[d * to_stride + i] = from[i * stride + d], 4 x 4.
inline void turn_four(const float* from, std::int64_t stride, float* to, std::int64_t to_stride) {
#if defined(__SSE__)
  __m128 rows[4];
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm_loadu_ps(from + i * stride);
  }
  _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
  for (int i = 0; i < 4; ++i) {
    _mm_storeu_ps(to + i * to_stride, rows[i]);
  }
#else
  for (int d = 0; d < 4; ++d) {
    for (int i = 0; i < 4; ++i) {
      to[d * to_stride + i] = from[i * stride + d];
    }
  }
#endif
}

// Of one float the loads are these; Ops<float> itself is also the GPU's.
template <typename F>
MAC_INLINE F load(const float* from) {
  return Ops<F>::load(from);
}
template <>
MAC_INLINE float load<float>(const float* from) {
  return *from;
}
template <typename F>
MAC_INLINE void store(float* to, F value) {
  Ops<F>::store(to, value);
}
template <>
MAC_INLINE void store<float>(float* to, float value) {
  *to = value;
}

}  // namespace
}  // namespace mac
}  // namespace narrowgauge
