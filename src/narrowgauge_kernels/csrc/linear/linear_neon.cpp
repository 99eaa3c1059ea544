// unverified: NEON path of the linear operator on real hardware | only an emulator was at hand | on an arm64 host: pytest tests/kernels
// AArch64 Advanced SIMD: 32 registers of 128 bits: 6 × 4 accumulators, four operands, a factor.
#include <arm_neon.h>

#include "linear/linear_micro.h"

namespace narrowgauge {
namespace linear {
namespace {

struct FourFloats {
  using Scalar = float;
  using Vector = float32x4_t;
  static constexpr int kLanes = 4;
  static float32x4_t load(const float* from) { return vld1q_f32(from); }
  static void store(float* to, float32x4_t value) { vst1q_f32(to, value); }
  static float32x4_t broadcast(const float* from) { return vld1q_dup_f32(from); }
  static float32x4_t multiply_add(float32x4_t a, float32x4_t b, float32x4_t c) {
    return vfmaq_f32(c, a, b);
  }
};

struct TwoDoubles {
  using Scalar = double;
  using Vector = float64x2_t;
  static constexpr int kLanes = 2;
  static float64x2_t load(const double* from) { return vld1q_f64(from); }
  static void store(double* to, float64x2_t value) { vst1q_f64(to, value); }
  static float64x2_t broadcast(const double* from) { return vld1q_dup_f64(from); }
  static float64x2_t multiply_add(float64x2_t a, float64x2_t b, float64x2_t c) {
    return vfmaq_f64(c, a, b);
  }
};

}  // namespace

MicroKernel<float> MicroKernels<float>::neon() { return make_micro_kernel<FourFloats, 6, 4>(); }

MicroKernel<double> MicroKernels<double>::neon() { return make_micro_kernel<TwoDoubles, 6, 4>(); }

}  // namespace linear
}  // namespace narrowgauge
