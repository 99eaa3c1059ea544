// Device code of the timing loop: the kernel that holds a stream, and kernels of chosen length to
// calibrate it with. C++14, no include: NVRTC 11.8 and nvcc 13 take it as it is.
#pragma once

namespace narrowgauge {
namespace harness {

inline __device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Words in page-locked host memory that the device sees. Each holds the number of a hold: the last
// one released by the host, the last one ended, and the last one that ended by itself.
template <typename Number>
struct Gate {
  Number released;
  Number ended;
  Number given_up;
};

// Ends when the host has released `number`, or after `limit_ns`. One thread.
template <typename Number>
__global__ void hold(volatile Gate<Number>* gate, Number number, unsigned long long limit_ns) {
  const unsigned long long began = nanoseconds();
  while (gate->released < number) {
    if (nanoseconds() - began > limit_ns) {
      gate->given_up = number;
      break;
    }
  }
  __threadfence_system();  // whoever sees `ended` sees `given_up`
  gate->ended = number;
}

template <int Threads>
__global__ void nothing() {}

// to[i] = from[i], so many times over.
template <typename Word>
__global__ void copy(const Word* from, Word* to, long long words, long long repeats) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long repeat = 0; repeat < repeats; ++repeat) {
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < words;
         i += stride) {
      to[i] = from[i];
    }
  }
}

// to[i] += from[i], so many times over.
template <typename Word>
__global__ void add(const Word* from, Word* to, long long words, long long repeats) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long repeat = 0; repeat < repeats; ++repeat) {
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < words;
         i += stride) {
      const Word addend = from[i];
      Word sum = to[i];
      sum.x += addend.x;
      sum.y += addend.y;
      sum.z += addend.z;
      sum.w += addend.w;
      to[i] = sum;
    }
  }
}

// A chain of `repeats` dependent fused multiply-adds in every thread: its length is its latency.
template <typename Real>
__global__ void multiply_add_chain(Real* to, long long repeats) {
  Real value = static_cast<Real>(threadIdx.x);
  for (long long repeat = 0; repeat < repeats; ++repeat) {
    value = __fmaf_rn(value, static_cast<Real>(0.999), static_cast<Real>(0.001));
  }
  to[blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x] = value;
}

// What harness.cu launches. Spelt out because NVRTC sees no launch and would compile none of it.
template __global__ void hold<unsigned int>(volatile Gate<unsigned int>*, unsigned int,
                                            unsigned long long);
template __global__ void nothing<32>();
template __global__ void copy<float4>(const float4*, float4*, long long, long long);
template __global__ void add<float4>(const float4*, float4*, long long, long long);
template __global__ void multiply_add_chain<float>(float*, long long);

}  // namespace harness
}  // namespace narrowgauge
