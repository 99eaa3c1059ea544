// AVX-512: 512 bits.
#include "wire/wire_loops.h"

namespace narrowgauge {
namespace wire {

template <typename T>
Loops<T> Loops<T>::avx512() {
  return make_loops<T>();
}

template Loops<float> Loops<float>::avx512();
template Loops<Half> Loops<Half>::avx512();
template Loops<BFloat16> Loops<BFloat16>::avx512();

}  // namespace wire
}  // namespace narrowgauge
