// AArch64 Advanced SIMD: 32 registers of 128 bits.
#include "manual_float/manual_float_micro.h"

namespace narrowgauge {
namespace manual {

const Kernel* neon_kernel(Policy policy) { return kernel_for<6, 4, 4, 2, 4, 3>(policy); }

}  // namespace manual
}  // namespace narrowgauge
