// The instruction set that a caller names, as an operator of torch refuses one.
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

}  // namespace narrowgauge
