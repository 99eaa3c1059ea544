// 16-bit floats as bits: the instruction sets' files see no header whose inline functions the linker
// could take from the wrong one of them.
#pragma once

#include <cstdint>

namespace narrowgauge {

struct Half {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

}  // namespace narrowgauge
