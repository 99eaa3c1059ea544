// AVX2: 256 bits.
#include "wire/wire_loops.h"

namespace narrowgauge {
namespace wire {

template <typename T>
Loops<T> Loops<T>::avx2() {
  return make_loops<T>();
}

template Loops<float> Loops<float>::avx2();
template Loops<Half> Loops<Half>::avx2();
template Loops<BFloat16> Loops<BFloat16>::avx2();

}  // namespace wire
}  // namespace narrowgauge
