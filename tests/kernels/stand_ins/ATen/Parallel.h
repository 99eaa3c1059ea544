// What the kernels over codes take from torch, without torch: one thread.
#pragma once

#include <cstdint>

namespace at {

inline int get_num_threads() { return 1; }

template <typename Work>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t, const Work& work) {
  work(begin, end);
}

}  // namespace at
