// AVX2 with FMA: 16 registers of 256 bits.
#include "manual_float/manual_float_micro.h"

namespace narrowgauge {
namespace manual {

const Kernel* avx2_kernel(Policy policy) { return kernel_for<6, 2, 4, 1, 4, 2>(policy); }

}  // namespace manual
}  // namespace narrowgauge
