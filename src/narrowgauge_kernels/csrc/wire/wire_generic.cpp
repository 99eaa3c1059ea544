// For any processor: what the base instruction set has (SSE2 on x86-64).
#include "wire/wire_loops.h"

namespace narrowgauge {
namespace wire {

template <typename T>
Loops<T> Loops<T>::generic() {
  return make_loops<T>();
}

template Loops<float> Loops<float>::generic();
template Loops<Half> Loops<Half>::generic();
template Loops<BFloat16> Loops<BFloat16>::generic();

}  // namespace wire
}  // namespace narrowgauge
