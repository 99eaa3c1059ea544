// AVX2 with FMA: 16 registers of 256 bits, so 6 × 2 accumulators, two operands and a factor.
#include <immintrin.h>

#include "linear/linear_micro.h"

namespace narrowgauge {
namespace linear {
namespace {

struct EightFloats {
  using Scalar = float;
  using Vector = __m256;
  static constexpr int kLanes = 8;
  static __m256 load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, __m256 value) { _mm256_storeu_ps(to, value); }
  static __m256 broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
};

struct FourDoubles {
  using Scalar = double;
  using Vector = __m256d;
  static constexpr int kLanes = 4;
  static __m256d load(const double* from) { return _mm256_loadu_pd(from); }
  static void store(double* to, __m256d value) { _mm256_storeu_pd(to, value); }
  static __m256d broadcast(const double* from) { return _mm256_broadcast_sd(from); }
  static __m256d multiply_add(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
};

}  // namespace

MicroKernel<float> MicroKernels<float>::avx2() { return make_micro_kernel<EightFloats, 6, 2>(); }

MicroKernel<double> MicroKernels<double>::avx2() { return make_micro_kernel<FourDoubles, 6, 2>(); }

}  // namespace linear
}  // namespace narrowgauge
