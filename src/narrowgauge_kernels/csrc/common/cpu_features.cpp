#include "common/cpu_features.h"

#include <stdexcept>

namespace narrowgauge {

const char* name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::kGeneric:
      return "generic";
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kAvx512:
      return "avx512";
    case InstructionSet::kNeon:
      return "neon";
  }
  return "unknown";
}

std::vector<InstructionSet> available_instruction_sets() {
  std::vector<InstructionSet> sets{InstructionSet::kGeneric};
#if defined(__x86_64__)
  // __builtin_cpu_supports asks cpuid, and xgetbv for whether the system saves the wide registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) {
    sets.push_back(InstructionSet::kAvx2);
  }
  if (avx2 && __builtin_cpu_supports("avx512f")) {
    sets.push_back(InstructionSet::kAvx512);
  }
#elif defined(__aarch64__)
  sets.push_back(InstructionSet::kNeon);  // part of the base architecture
#endif
  return sets;
}

InstructionSet choose_instruction_set(const std::string& name) {
  const std::vector<InstructionSet> sets = available_instruction_sets();
  if (name == "auto") {
    return sets.back();
  }
  std::string known = "auto";
  for (const InstructionSet set : sets) {
    if (name == name_of(set)) {
      return set;
    }
    known += std::string(", ") + name_of(set);
  }
  throw std::invalid_argument("no instruction set '" + name + "' on this processor; there is " +
                              known);
}

}  // namespace narrowgauge
