// AVX-512F: 32 registers of 512 bits.
#include "manual_float/manual_float_micro.h"

namespace narrowgauge {
namespace manual {

const Kernel* avx512_kernel(Policy policy) { return kernel_for<12, 2, 8, 2, 8, 2>(policy); }

}  // namespace manual
}  // namespace narrowgauge
