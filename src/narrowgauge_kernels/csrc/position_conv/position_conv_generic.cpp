// For any processor. Without a hardware fma, std::fma is a slow but exact library call, so the bits
// stay those of the vector paths.
#include <cmath>

#include "position_conv/position_conv_micro.h"

namespace narrowgauge {
namespace position_conv {
namespace {

struct OneLane {
  using Vector = float;
  static constexpr int kLanes = 1;
  static float load(const float* from) { return *from; }
  static void store(float* to, float value) { *to = value; }
  static float broadcast(const float* from) { return *from; }
  static float zero() { return 0.0f; }
  static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
  static float fused(float a, float b, float c) { return std::fma(a, b, c); }
};

}  // namespace

Loops Loops::generic() {
  return {{{64, 1, multiply<OneLane, 8, 1, 64>},
           {32, 1, multiply<OneLane, 8, 1, 32>},
           {16, 1, multiply<OneLane, 8, 1, 16>}},
          position_conv::dot<OneLane>};
}

}  // namespace position_conv
}  // namespace narrowgauge
