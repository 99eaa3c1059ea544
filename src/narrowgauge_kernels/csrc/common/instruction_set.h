// The instruction set that a caller names, as an operator of torch refuses one, and the loops of it.
#pragma once

#include <stdexcept>
#include <string>

#include "common/cpu_features.h"
#include "common/torch_tensor.h"

namespace narrowgauge {

inline InstructionSet instruction_set(const std::string& isa) {
  try {
    return choose_instruction_set(isa);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK(false, error.what());
  }
}

// What `Of` has for an instruction set: Of::generic(), or that of one of this machine's own.
template <typename Of>
auto loops_for(InstructionSet set) -> decltype(Of::generic()) {
  switch (set) {
#if defined(__x86_64__)
    case InstructionSet::kAvx2:
      return Of::avx2();
    case InstructionSet::kAvx512:
      return Of::avx512();
#elif defined(__aarch64__)
    case InstructionSet::kNeon:
      return Of::neon();
#endif
    default:
      return Of::generic();
  }
}

}  // namespace narrowgauge
