// For any processor: what the base instruction set has (SSE2 on x86-64).
#include "fake_quantize/fake_quantize_loops.h"

namespace narrowgauge {
namespace fake_quantize {

template <typename T>
Loops<T> Loops<T>::generic() {
  return make_loops<T>();
}

template Loops<float> Loops<float>::generic();
template Loops<double> Loops<double>::generic();
template Loops<Half> Loops<Half>::generic();
template Loops<BFloat16> Loops<BFloat16>::generic();

}  // namespace fake_quantize
}  // namespace narrowgauge
