// unverified: NEON loops of the int8 wire format | no arm64 host was at hand | on an arm64 host: pytest tests/kernels
// AArch64 Advanced SIMD: 128 bits.
#include "wire/wire_loops.h"

namespace narrowgauge {
namespace wire {

template <typename T>
Loops<T> Loops<T>::neon() {
  return make_loops<T>();
}

template Loops<float> Loops<float>::neon();
template Loops<Half> Loops<Half>::neon();
template Loops<BFloat16> Loops<BFloat16>::neon();

}  // namespace wire
}  // namespace narrowgauge
