// unverified: NEON path of the convolution at positions | neither an arm64 machine nor a compiler for one was at hand | on an arm64 host: pytest tests/kernels
// AArch64 Advanced SIMD: 32 registers of 128 bits, of which 24 hold sums.
#include <arm_neon.h>

#include <cmath>

#include "position_conv/position_conv_micro.h"

namespace narrowgauge {
namespace position_conv {
namespace {

struct FourFloats {
  using Vector = float32x4_t;
  static constexpr int kLanes = 4;
  static float32x4_t load(const float* from) { return vld1q_f32(from); }
  static void store(float* to, float32x4_t value) { vst1q_f32(to, value); }
  static float32x4_t broadcast(const float* from) { return vld1q_dup_f32(from); }
  static float32x4_t zero() { return vdupq_n_f32(0.0f); }
  static float32x4_t multiply_add(float32x4_t a, float32x4_t b, float32x4_t c) {
    return vfmaq_f32(c, a, b);
  }
  static float fused(float a, float b, float c) { return std::fma(a, b, c); }
};

}  // namespace

Loops Loops::neon() {
  return {{{64, 6, multiply<FourFloats, 4, 6, 64>},
           {32, 6, multiply<FourFloats, 4, 6, 32>},
           {16, 6, multiply<FourFloats, 4, 6, 16>}},
          position_conv::dot<FourFloats>};
}

}  // namespace position_conv
}  // namespace narrowgauge
