// Asynchronous copies to shared memory, from 8.0 on; below at once. And how long a list is. C++14, no
// toolkit header. A test that runs the kernels on emulated threads defines the copies in its own way.
#pragma once

namespace narrowgauge {
namespace position_conv {

#ifndef NARROWGAUGE_EMULATED_THREADS

// kFloats (4 or 1), both ends aligned to them; zeros unless `inside`: `source` is not read then.
template <int kFloats>
inline __device__ void copy_async(float* target, const float* source, bool inside) {
#if __CUDA_ARCH__ >= 800
  // By L1, which has a row for all of its taps, and weights for all blocks of a multiprocessor.
  const unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(target));
  const int bytes = inside ? 4 * kFloats : 0;
  if (kFloats == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
                 :: "r"(address), "l"(source), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(address), "l"(source), "r"(bytes) : "memory");
  }
#else
  if (kFloats == 4) {
    const float4 zeros = {0.0f, 0.0f, 0.0f, 0.0f};
    *reinterpret_cast<float4*>(target) =
        inside ? *reinterpret_cast<const float4*>(source) : zeros;
  } else {
    *target = inside ? *source : 0.0f;
  }
#endif
}

inline __device__ void end_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until no more than the last kGroups groups of this thread's copies are under way.
template <int kGroups>
inline __device__ void copies_left() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

#endif  // NARROWGAUGE_EMULATED_THREADS

// `listed`, or what a count on the device says, if that is fewer.
inline __device__ long long meant(long long listed, const long long* count) {
  return count != nullptr && *count < listed ? *count : listed;
}

}  // namespace position_conv
}  // namespace narrowgauge
