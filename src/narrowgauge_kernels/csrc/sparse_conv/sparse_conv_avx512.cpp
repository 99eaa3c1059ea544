// AVX-512F: 32 registers of 512 bits: 4 × 2 accumulators, and an instruction that compresses.
#include <immintrin.h>

#include "sparse_conv/sparse_conv_micro.h"
#include "sparse_conv/sparse_conv_turn.h"

namespace narrowgauge {
namespace sparse_conv {
namespace {

struct SixteenFloats {
  using Vector = __m512;
  static constexpr int kLanes = 16;
  static __m512 load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, __m512 value) { _mm512_storeu_ps(to, value); }
  static __m512 broadcast(const float* from) { return _mm512_set1_ps(*from); }
  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
};

template <bool kRelu>
__mmask16 nonzeros(__m512 values) {
  // Unordered comparisons: true of NaN.
  return kRelu ? _mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_NLE_UQ)
               : _mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_NEQ_UQ);
}

int ones(__mmask16 mask) { return __builtin_popcount(mask); }

template <bool kRelu>
struct Compress {
  std::int64_t operator()(const float* from, int channels, float* values, std::int32_t* offsets,
                          std::int64_t at) const {
    __m512i offset = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(kGrainBytes));
    const __m512i step = _mm512_set1_epi32(16 * kGrainBytes);
    int c = 0;
    for (; c + 16 <= channels; c += 16) {
      const __m512 some = _mm512_loadu_ps(from + c);
      const __mmask16 mask = nonzeros<kRelu>(some);
      // By a register: compressing into memory is slow on some processors.
      _mm512_storeu_ps(values + at, _mm512_maskz_compress_ps(mask, some));
      _mm512_storeu_si512(offsets + at, _mm512_maskz_compress_epi32(mask, offset));
      at += ones(mask);
      offset = _mm512_add_epi32(offset, step);
    }
    return append_scalar<kRelu>(from, c, channels, values, offsets, at);
  }
};

template <bool kRelu>
std::int64_t count(const float* from, std::int64_t length) {
  std::int64_t found = 0, i = 0;
  for (; i + 16 <= length; i += 16) {
    found += 16 - ones(nonzeros<kRelu>(_mm512_loadu_ps(from + i)));
  }
  return found + count_scalar<kRelu>(from, i, length);
}

std::int64_t count_zeros(const float* from, std::int64_t length, bool relu) {
  return relu ? count<true>(from, length) : count<false>(from, length);
}

}  // namespace

Loops Loops::avx512() {
  return {build_lists<Compress, TurnAvx>, visit<SixteenFloats, 1, 16>, visit<SixteenFloats, 2, 32>,
          visit<SixteenFloats, 4, 64>, finish_sums<TurnAvx>, count_zeros};
}

}  // namespace sparse_conv
}  // namespace narrowgauge
