// A sum of masked products in device code. No toolkit header.
#pragma once

namespace narrowgauge {
namespace codes {

// One sum of up to 8 masked products; (sum >> shift) * coefficient goes to the output, with `add` to
// what others add to. Masks are bytes, the first pass's lowest: an array of them, indexed in a loop,
// would be copied to local memory.
struct Sweep {
  unsigned long long a_masks;
  unsigned long long b_masks;
  int passes;
  int coefficient;
  int shift;
  bool add;
};

// The mask of one pass in each byte.
inline __device__ unsigned int mask_of(unsigned long long masks, int pass) {
  return (static_cast<unsigned int>(masks >> (8 * pass)) & 0xffu) * 0x01010101u;
}

inline __device__ unsigned int weighed(const Sweep& sweep, int sum) {
  return static_cast<unsigned int>(sum >> sweep.shift) *
         static_cast<unsigned int>(sweep.coefficient);
}

}  // namespace codes
}  // namespace narrowgauge
