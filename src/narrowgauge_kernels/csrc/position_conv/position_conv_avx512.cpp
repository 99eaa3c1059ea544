// AVX-512F: 32 registers of 512 bits, of which 8 to 24 hold sums; so few positions at once
// that their pointers stay in registers, too.
#include <immintrin.h>

#include <cmath>

#include "position_conv/position_conv_micro.h"

namespace narrowgauge {
namespace position_conv {
namespace {

struct SixteenFloats {
  using Vector = __m512;
  static constexpr int kLanes = 16;
  static __m512 load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, __m512 value) { _mm512_storeu_ps(to, value); }
  static __m512 broadcast(const float* from) { return _mm512_set1_ps(*from); }
  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static float fused(float a, float b, float c) { return std::fma(a, b, c); }
};

}  // namespace

Loops Loops::avx512() {
  return {{{64, 6, multiply<SixteenFloats, 4, 6, 64>},
           {32, 8, multiply<SixteenFloats, 2, 8, 32>},
           {16, 8, multiply<SixteenFloats, 1, 8, 16>}},
          position_conv::dot<SixteenFloats>};
}

}  // namespace position_conv
}  // namespace narrowgauge
