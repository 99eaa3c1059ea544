// Which instruction sets this processor and operating system can run. No torch header.
#pragma once

#include <string>
#include <vector>

namespace narrowgauge {

enum class InstructionSet { kGeneric, kAvx2, kAvx512, kNeon };

const char* name_of(InstructionSet set);

// What can run here, best last; the first is always kGeneric.
std::vector<InstructionSet> available_instruction_sets();

// `auto` is the best available. Throws std::invalid_argument, listing what is available, for a name
// that is unknown or that this processor cannot run.
InstructionSet choose_instruction_set(const std::string& name);

}  // namespace narrowgauge
