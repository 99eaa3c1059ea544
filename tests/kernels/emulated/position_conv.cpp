// The launchers of convolutions at listed positions and of their lists, with C linkage, on emulated
// threads. Copies happen as late as they may, or, as below 8.0, at once; reads outside of the operands
// are counted.
#include "threads.h"

#include <cmath>

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }

inline float __shfl_xor_sync(unsigned int, float value, int other) {
  std::memcpy(emulated::self().words, &value, sizeof value);
  emulated::wait_for_warp();
  float found;
  const std::size_t from = (emulated::running % 32) ^ static_cast<std::size_t>(other);
  std::memcpy(&found, emulated::lane(from).words, sizeof found);
  emulated::wait_for_warp();
  return found;
}

namespace narrowgauge {
namespace position_conv {

struct Range {
  const float* first;
  const float* last;
};

static Range readable[2];
static int faults = 0;
static bool at_once = false;

template <int kFloats>
inline void copy_async(float* target, const float* source, bool inside) {
  static const float zeros[4] = {};
  if (inside) {
    bool found = false;
    for (const Range& range : readable) {
      found |= source >= range.first && source + kFloats <= range.last;
    }
    found &= reinterpret_cast<std::uintptr_t>(source) % (4 * kFloats) == 0;
    faults += found ? 0 : 1;
    inside = found;
  }
  faults += reinterpret_cast<std::uintptr_t>(target) % (4 * kFloats) == 0 ? 0 : 1;
  emulated::self().copies.push_back({target, inside ? source : zeros, 4 * kFloats});
  if (at_once) {
    emulated::perform(emulated::self().copies);
    emulated::self().copies.clear();
  }
}

inline void end_copies() { codes::end_copies(); }

template <int kGroups>
inline void copies_left() {
  codes::copies_left<kGroups>();
}

template <typename Kernel, typename Given>
inline cudaError_t enqueue(Kernel kernel, long long blocks, int threads, cudaStream_t stream,
                           const Given& task) {
  return codes::enqueue(kernel, dim3(static_cast<unsigned int>(blocks)), threads, 0, stream, task);
}

}  // namespace position_conv
}  // namespace narrowgauge

#include "position_conv/cuda/position_conv.cu"
#include "position_conv/cuda/position_list.cu"

using namespace narrowgauge::position_conv;

extern "C" {

// How many faults there were. sizes: rows, floats of the packed weight, positions listed, channels,
// filters, finish, taps, whether copies happen at once.
int convolve(const long long* sizes, const float* rows, const long long* positions,
             const long long* count, const float* packed, const float* bias, const long long* taps,
             float slope, const float* share, float* out, float* total) {
  Task task{};
  task.rows = rows;
  task.positions = positions;
  task.count = count;
  task.packed = packed;
  task.bias = bias;
  task.share = share;
  task.out = out;
  task.total = total;
  task.listed = sizes[2];
  task.channels = sizes[3];
  task.filters = sizes[4];
  task.finish = static_cast<Finish>(sizes[5]);
  task.tap_count = static_cast<int>(sizes[6]);
  task.depth = sizes[6] * sizes[3];
  task.slope = slope;
  for (int i = 0; i < task.tap_count; ++i) {
    task.taps[i] = taps[i] * task.channels;
  }
  readable[0] = {rows, rows + sizes[0] * sizes[3]};
  readable[1] = {packed, packed + sizes[1]};
  at_once = sizes[7] != 0;
  faults = 0;
  launch_position_conv(task, nullptr);
  return faults;
}

void list(const unsigned char* flags, const long long* limit, long long cells, long long capacity,
          int filled, long long* places, long long* found) {
  std::vector<long long> counts(static_cast<std::size_t>(list_counts(cells)), -7);
  launch_list({flags, limit, counts.data(), places, found, cells, capacity, false, filled != 0},
              nullptr);
}

void near(const long long* positions, const long long* count, long long listed,
          const long long* taps, int tap_count, const bool* inside, long long cells,
          unsigned char* flags) {
  NearTask task{};
  task.positions = positions;
  task.count = count;
  task.inside = inside;
  task.flags = flags;
  task.listed = listed;
  task.cells = cells;
  task.tap_count = tap_count;
  std::memcpy(task.taps, taps, static_cast<std::size_t>(tap_count) * sizeof *taps);
  launch_near(task, nullptr);
}
}
