// The kernels over 8-bit codes that this processor and operating system can run. No torch header.
#pragma once

#include <vector>

#include "manual_codes/manual_codes_product.h"
#include "manual_codes/manual_codes_table.h"

namespace narrowgauge {
namespace codes {

template <typename Kernel>
struct Variant {
  const char* name;
  Kernel kernel;
};

// Best last; the first is always `generic`.
std::vector<Variant<ProductKernel>> product_variants();
std::vector<Variant<TableKernel>> table_variants();

}  // namespace codes
}  // namespace narrowgauge
