// AVX-512F: 32 registers of 512 bits, so 12 × 2 accumulators, two operands and a factor.
#include <immintrin.h>

#include "linear/linear_micro.h"

namespace narrowgauge {
namespace linear {
namespace {

struct SixteenFloats {
  using Scalar = float;
  using Vector = __m512;
  static constexpr int kLanes = 16;
  static __m512 load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, __m512 value) { _mm512_storeu_ps(to, value); }
  static __m512 broadcast(const float* from) { return _mm512_set1_ps(*from); }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
};

struct EightDoubles {
  using Scalar = double;
  using Vector = __m512d;
  static constexpr int kLanes = 8;
  static __m512d load(const double* from) { return _mm512_loadu_pd(from); }
  static void store(double* to, __m512d value) { _mm512_storeu_pd(to, value); }
  static __m512d broadcast(const double* from) { return _mm512_set1_pd(*from); }
  static __m512d multiply_add(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
};

}  // namespace

MicroKernel<float> MicroKernels<float>::avx512() {
  return make_micro_kernel<SixteenFloats, 12, 2>();
}

MicroKernel<double> MicroKernels<double>::avx512() {
  return make_micro_kernel<EightDoubles, 12, 2>();
}

}  // namespace linear
}  // namespace narrowgauge
