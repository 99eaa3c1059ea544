// For any processor. Without a hardware fma, std::fma is a slow but exact library call, so the bits
// stay those of the vector paths.
#include <cmath>

#include "sparse_conv/sparse_conv_micro.h"

namespace narrowgauge {
namespace sparse_conv {
namespace {

struct OneLane {
  using Vector = float;
  static constexpr int kLanes = 1;
  static float load(const float* from) { return *from; }
  static void store(float* to, float value) { *to = value; }
  static float broadcast(const float* from) { return *from; }
  static float zero() { return 0.0f; }
  static float add(float a, float b) { return a + b; }
  static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
};

}  // namespace

Loops Loops::generic() {
  return {build_lists<CompressScalar, TurnScalar>, visit<OneLane, 4, 16>, visit<OneLane, 4, 32>,
          visit<OneLane, 4, 64>, finish_sums<TurnScalar>, zeros_scalar};
}

}  // namespace sparse_conv
}  // namespace narrowgauge
