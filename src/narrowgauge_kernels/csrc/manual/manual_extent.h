// Whether a result of these sizes can be had at all.
#pragma once

#include <cstdint>
#include <limits>

#include "common/torch_tensor.h"

namespace narrowgauge {

// torch before 1.9 or so does not look: it multiplies sizes in 64 bits as they wrap around, and gives
// a tensor with less memory than its shape says, or none.
inline void check_extent(const char* op, at::IntArrayRef sizes, std::int64_t bytes) {
  for (const std::int64_t size : sizes) {
    if (size == 0) {
      return;
    }
  }
  std::int64_t most = std::numeric_limits<std::int64_t>::max() / bytes;
  for (const std::int64_t size : sizes) {
    TORCH_CHECK(size <= most, op, ": the result would have shape ", sizes,
                ", which is more than 64 bits address");
    most /= size;
  }
}

}  // namespace narrowgauge
