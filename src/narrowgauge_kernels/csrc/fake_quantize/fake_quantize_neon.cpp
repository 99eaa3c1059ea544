// unverified: NEON loops of the fake-quantise operator | no arm64 host was at hand | on an arm64 host: pytest tests/kernels
// AArch64 Advanced SIMD: 128 bits.
#include "fake_quantize/fake_quantize_loops.h"

namespace narrowgauge {
namespace fake_quantize {

template <typename T>
Loops<T> Loops<T>::neon() {
  return make_loops<T>();
}

template Loops<float> Loops<float>::neon();
template Loops<double> Loops<double>::neon();
template Loops<Half> Loops<Half>::neon();
template Loops<BFloat16> Loops<BFloat16>::neon();

}  // namespace fake_quantize
}  // namespace narrowgauge
