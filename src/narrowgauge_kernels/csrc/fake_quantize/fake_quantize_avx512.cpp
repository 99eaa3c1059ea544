// AVX-512: 512 bits.
#include "fake_quantize/fake_quantize_loops.h"

namespace narrowgauge {
namespace fake_quantize {

template <typename T>
Loops<T> Loops<T>::avx512() {
  return make_loops<T>();
}

template Loops<float> Loops<float>::avx512();
template Loops<double> Loops<double>::avx512();
template Loops<Half> Loops<Half>::avx512();
template Loops<BFloat16> Loops<BFloat16>::avx512();

}  // namespace fake_quantize
}  // namespace narrowgauge
