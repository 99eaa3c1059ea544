// unverified: NEON path of the sparse convolution | neither an arm64 machine nor a compiler for one was at hand | on an arm64 host: pytest tests/kernels
// AArch64 Advanced SIMD: 32 registers of 128 bits: 8 × 2 accumulators. It cannot compress:
// lists are made without it.
#include <arm_neon.h>

#include "sparse_conv/sparse_conv_micro.h"

namespace narrowgauge {
namespace sparse_conv {
namespace {

struct FourFloats {
  using Vector = float32x4_t;
  static constexpr int kLanes = 4;
  static float32x4_t load(const float* from) { return vld1q_f32(from); }
  static void store(float* to, float32x4_t value) { vst1q_f32(to, value); }
  static float32x4_t broadcast(const float* from) { return vld1q_dup_f32(from); }
  static float32x4_t zero() { return vdupq_n_f32(0.0f); }
  static float32x4_t add(float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }
  static float32x4_t multiply_add(float32x4_t a, float32x4_t b, float32x4_t c) {
    return vfmaq_f32(c, a, b);
  }
};

}  // namespace

Loops Loops::neon() {
  return {build_lists<CompressScalar, TurnScalar>, visit<FourFloats, 4, 16>,
          visit<FourFloats, 8, 32>, visit<FourFloats, 8, 64>, finish_sums<TurnScalar>,
          zeros_scalar};
}

}  // namespace sparse_conv
}  // namespace narrowgauge
