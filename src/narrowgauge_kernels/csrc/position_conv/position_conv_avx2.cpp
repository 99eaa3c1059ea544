// AVX2: 16 registers of 256 bits, of which 12 hold sums.
#include <immintrin.h>

#include <cmath>

#include "position_conv/position_conv_micro.h"

namespace narrowgauge {
namespace position_conv {
namespace {

struct EightFloats {
  using Vector = __m256;
  static constexpr int kLanes = 8;
  static __m256 load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, __m256 value) { _mm256_storeu_ps(to, value); }
  static __m256 broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static float fused(float a, float b, float c) { return std::fma(a, b, c); }
};

}  // namespace

Loops Loops::avx2() {
  return {{{64, 6, multiply<EightFloats, 2, 6, 64>},
           {32, 6, multiply<EightFloats, 2, 6, 32>},
           {16, 6, multiply<EightFloats, 2, 6, 16>}},
          position_conv::dot<EightFloats>};
}

}  // namespace position_conv
}  // namespace narrowgauge
