// For any processor. Without a hardware fma, fmaf is a slow but exact library call.
#include "manual_float/manual_float_micro.h"

namespace narrowgauge {
namespace manual {

const Kernel* generic_kernel(Policy policy) { return kernel_for<4, 4, 4, 1, 4, 2>(policy); }

}  // namespace manual
}  // namespace narrowgauge
