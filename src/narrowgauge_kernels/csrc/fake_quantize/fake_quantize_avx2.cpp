// AVX2: 256 bits.
#include "fake_quantize/fake_quantize_loops.h"

namespace narrowgauge {
namespace fake_quantize {

template <typename T>
Loops<T> Loops<T>::avx2() {
  return make_loops<T>();
}

template Loops<float> Loops<float>::avx2();
template Loops<double> Loops<double>::avx2();
template Loops<Half> Loops<Half>::avx2();
template Loops<BFloat16> Loops<BFloat16>::avx2();

}  // namespace fake_quantize
}  // namespace narrowgauge
