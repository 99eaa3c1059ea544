// For any processor. Without a hardware fma, std::fma is a slow but exact library call, so the bits
// stay those of the vector paths.
#include <cmath>

#include "linear/linear_micro.h"

namespace narrowgauge {
namespace linear {
namespace {

template <typename T>
struct OneLane {
  using Scalar = T;
  using Vector = T;
  static constexpr int kLanes = 1;
  static T load(const T* from) { return *from; }
  static void store(T* to, T value) { *to = value; }
  static T broadcast(const T* from) { return *from; }
  static T multiply_add(T a, T b, T c) { return std::fma(a, b, c); }
};

}  // namespace

MicroKernel<float> MicroKernels<float>::generic() {
  return make_micro_kernel<OneLane<float>, 4, 4>();
}

MicroKernel<double> MicroKernels<double>::generic() {
  return make_micro_kernel<OneLane<double>, 4, 4>();
}

}  // namespace linear
}  // namespace narrowgauge
