// The kernels of an exit's decision on emulated threads (tests/kernels/emulated), with C linkage.
// exit_decision.cuh is what the lab hands to the compiler.
#include "threads.h"

#include <cmath>

inline float __fmul_rn(float a, float b) { return a * b; }
inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
inline void __syncwarp() { emulated::wait_for_warp(); }

inline float __uint_as_float(unsigned int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline double __hiloint2double(int high, int low) {
  const int halves[2] = {low, high};
  double value;
  std::memcpy(&value, halves, sizeof value);
  return value;
}

template <typename Word>
inline Word __shfl_xor_sync(unsigned int, Word value, unsigned int other) {
  static_assert(sizeof value == 4, "one word of a lane");
  std::memcpy(emulated::self().words, &value, sizeof value);
  emulated::wait_for_warp();
  Word found;
  std::memcpy(&found, emulated::lane(emulated::running % 32 ^ other).words, sizeof found);
  emulated::wait_for_warp();
  return found;
}

inline unsigned int __ballot_sync(unsigned int, bool vote) {
  emulated::self().words[0] = vote ? 1 : 0;
  emulated::wait_for_warp();
  unsigned int votes = 0;
  for (unsigned int i = 0; i < 32; ++i) {
    votes |= emulated::lane(i).words[0] << i;
  }
  emulated::wait_for_warp();
  return votes;
}

inline int __syncthreads_or(int vote) {
  emulated::self().words[0] = vote != 0 ? 1 : 0;
  emulated::wait_for_block();
  std::uint32_t any = 0;
  for (const emulated::Thread& thread : emulated::threads) {
    any |= thread.words[0];
  }
  emulated::wait_for_block();
  return static_cast<int>(any);
}

inline unsigned int atomicAdd(unsigned int* to, unsigned int value) {
  const unsigned int before = *to;
  *to += value;
  return before;
}

// What the conditions with these handles, 1 to 63, were last set to.
static unsigned int conditions[64];

inline void cudaGraphSetConditional(unsigned long long handle, unsigned int value) {
  conditions[handle] = value;
}

#include "exit_decision.cuh"

extern "C" {

unsigned int condition(unsigned int handle) { return conditions[handle]; }
void reset_condition(unsigned int handle, unsigned int value) { conditions[handle] = value; }

// By ctypes: addresses in the order of the kernel's arguments, then its numbers.
void launch_decide(unsigned int blocks, unsigned int threads, void* const* at,
                   const unsigned int* n) {
  narrowgauge::codes::enqueue(
      decide, dim3(blocks), static_cast<int>(threads), 0, nullptr,
      static_cast<const float*>(at[0]), static_cast<float*>(at[1]),
      static_cast<long long*>(at[2]), static_cast<double*>(at[3]), static_cast<bool*>(at[4]),
      static_cast<bool*>(at[5]), static_cast<unsigned int*>(at[6]),
      static_cast<const double*>(at[7]), static_cast<const unsigned long long*>(at[8]), n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8],
      n[9]);
}

void launch_pack(unsigned int blocks, unsigned int threads, void* const* at,
                 const unsigned int* n) {
  narrowgauge::codes::enqueue(
      pack, dim3(blocks), static_cast<int>(threads), 0, nullptr, static_cast<const float*>(at[0]),
      static_cast<float*>(at[1]), static_cast<long long*>(at[2]), static_cast<double*>(at[3]),
      static_cast<const double*>(at[4]), static_cast<const long long*>(at[5]),
      static_cast<long long*>(at[6]), static_cast<long long*>(at[7]),
      static_cast<long long*>(at[8]), static_cast<const long long*>(at[9]),
      static_cast<const unsigned long long*>(at[10]), n[0], n[1], n[2], n[3], n[4], n[5], n[6],
      n[7], n[8], n[9], n[10], n[11]);
}
}
