#include "manual_codes/manual_codes_variants.h"

#include "manual_codes/manual_codes_amx.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace narrowgauge {
namespace codes {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports asks cpuid, and xgetbv for whether the system saves the wide registers.
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") != 0;
}

bool has_avx512bw() { return has_avx2() && __builtin_cpu_supports("avx512bw") != 0; }

bool has_vnni() { return has_avx512bw() && __builtin_cpu_supports("avx512vnni") != 0; }
#endif

#if defined(NARROWGAUGE_HAS_AMX)
bool has_amx() {
  constexpr unsigned kTile = 1u << 24;
  constexpr unsigned kInt8 = 1u << 25;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_vnni() || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 ||
      (d & (kTile | kInt8)) != (kTile | kInt8)) {
    return false;
  }
  // The kernel refuses where the system or a container does not save the tiles.
  static const bool allowed = ask_for_amx();
  return allowed;
}
#endif

}  // namespace

std::vector<Variant<ProductKernel>> product_variants() {
  std::vector<Variant<ProductKernel>> found{{"generic", ProductKernel::generic()}};
#if defined(__x86_64__)
  if (has_avx2()) {
    found.push_back({"avx2", ProductKernel::avx2()});
  }
  if (has_vnni()) {
    found.push_back({"avx512vnni", ProductKernel::avx512vnni()});
  }
#elif defined(__aarch64__)
  found.push_back({"neon", ProductKernel::neon()});
#endif
#if defined(NARROWGAUGE_HAS_AMX)
  if (has_amx()) {
    found.push_back({"amx", amx_kernel()});
  }
#endif
  return found;
}

std::vector<Variant<TableKernel>> table_variants() {
  std::vector<Variant<TableKernel>> found{{"generic", TableKernel::generic()}};
#if defined(__x86_64__)
  if (has_avx2()) {
    found.push_back({"avx2", TableKernel::avx2()});
  }
  if (has_avx512bw()) {
    found.push_back({"avx512bw", TableKernel::avx512bw()});
  }
#elif defined(__aarch64__)
  found.push_back({"neon", TableKernel::neon()});
#endif
  return found;
}

}  // namespace codes
}  // namespace narrowgauge
