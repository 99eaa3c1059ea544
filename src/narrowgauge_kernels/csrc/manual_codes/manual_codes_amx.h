// The AMX kernel of products, where the compiler knows the instructions. No torch header.
#pragma once

#include "manual_codes/manual_codes_product.h"

// GCC before 11 does not, and clang wants them as flags of its own.
#if defined(__x86_64__) && defined(__linux__) && __GNUC__ >= 11 && !defined(__clang__)
#define NARROWGAUGE_HAS_AMX 1
#endif

namespace narrowgauge {
namespace codes {

#if defined(NARROWGAUGE_HAS_AMX)
ProductKernel amx_kernel();

// Whether Linux lets this process use the tiles; to be asked once cpuid has said that they exist.
bool ask_for_amx();
#endif

}  // namespace codes
}  // namespace narrowgauge
