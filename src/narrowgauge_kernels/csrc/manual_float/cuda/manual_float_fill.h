// How chunks of x and weight come to shared memory in manual_float.cuh: copies, the table of steps, the
// pixels of a tile, and which thread copies what. Device code; C++14, no toolkit header.
#pragma once

#include "manual/manual_mac.h"
#include "manual_float/cuda/manual_float_task.h"

namespace narrowgauge {
namespace manual_float {

// Of one step of the depth, in x: an offset in the image in bytes, and two bits for the tap's row and
// column. Past the end of the depth, a bit that is outside for every pixel.
struct __align__(8) Step {
  unsigned int x;
  unsigned int tap;
};

constexpr unsigned int kPastTheEnd = 1u << kMostTaps;
constexpr unsigned int kNoWeight = ~0u;

// Of one output pixel.
struct Pixel {
  long long x;           // offset of its first tap, which may lie before the image
  long long out;         // offset of its output of filter 0 of group 0; negative past the last pixel
  unsigned int outside;  // which bits of taps are outside x: all of them past the last pixel
};

constexpr int kAhead = 2;     // chunks between the one that is filled and the one that is used
constexpr int kWindow = 128;  // steps that are decoded at a time, in turns in two halves of a table
constexpr int kPitch = 4;     // more floats than a row of a tile has: keeps writes along the depth
                              // off one bank

#if !defined(MANUAL_FLOAT_EMULATED)
// Copies `Bytes` (4 or 16) to shared memory, zeros unless `inside`; `source` is not read then.
template <int Bytes>
inline __device__ void copy_async(float* target, const float* source, bool inside) {
#if __CUDA_ARCH__ >= 800
  const unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(target));
  const int size = inside ? Bytes : 0;
  if (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(address), "l"(source), "r"(size) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(address), "l"(source), "r"(size) : "memory");
  }
#else
  if (Bytes == 16) {
    const float4 zeros = {0.0f, 0.0f, 0.0f, 0.0f};
    *reinterpret_cast<float4*>(target) =
        inside ? *reinterpret_cast<const float4*>(source) : zeros;
  } else {
    *target = inside ? *source : 0.0f;
  }
#endif
}

inline __device__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most `Pending` of this thread's groups are under way.
template <int Pending>
inline __device__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" :: "n"(Pending) : "memory");
#endif
}
#endif

inline __device__ unsigned int taps_outside(long long first, long long dilation, long long taps,
                                           long long extent) {
  unsigned int bits = (1u << (kMostTaps + 1)) - 1;
  for (int tap = 0; tap < taps; ++tap) {
    const long long at = first + tap * dilation;
    bits &= at >= 0 && at < extent ? ~(1u << tap) : ~0u;
  }
  return bits;
}

inline __device__ Pixel pixel_at(const Convolution& conv, long long row) {
  if (row >= rows_of(conv)) {
    return {0, -1, ~0u};
  }
  const long long area = out_area(conv);
  const long long filters = conv.groups * conv.filters;
  const long long image = row / area;
  const long long at = row - image * area;
  const long long high = at / conv.out_wide * conv.stride_high - conv.padding_high;
  const long long across = at % conv.out_wide * conv.stride_wide - conv.padding_wide;
  return {image * conv.x_batch + high * conv.x_high + across * conv.x_wide,
          conv.out_channels_last ? row * filters : image * filters * area + at,
          taps_outside(high, conv.dilation_high, conv.taps_high, conv.high) << (kMostTaps + 1) |
              taps_outside(across, conv.dilation_wide, conv.taps_wide, conv.wide)};
}

// The tap, of the tall half of a word, and of its wide half.
inline __device__ unsigned int tap_bits(int row, int column) {
  return 1u << (row + kMostTaps + 1) | 1u << column;
}

// Decodes one step for x and, an offset in a filter in bytes, for weight.
inline __device__ void decode_step(const Convolution& conv, bool channels_inside, long long depth,
                                   Step& step, unsigned int& weight) {
  if (depth >= depth_of(conv)) {
    step = {0, kPastTheEnd};
    weight = kNoWeight;
    return;
  }
  const unsigned int at = static_cast<unsigned int>(depth);
  const unsigned int taps = static_cast<unsigned int>(conv.taps_high * conv.taps_wide);
  const unsigned int inner = channels_inside ? static_cast<unsigned int>(conv.channels) : taps;
  const unsigned int outer = at / inner;
  const unsigned int rest = at - outer * inner;
  const int channel = static_cast<int>(channels_inside ? rest : outer);
  const unsigned int tap = channels_inside ? outer : rest;
  const unsigned int across = static_cast<unsigned int>(conv.taps_wide);
  const int row = static_cast<int>(tap / across);
  const int column = static_cast<int>(tap % across);
  step.x = 4u * static_cast<unsigned int>(channel * conv.x_channel +
                                          row * conv.dilation_high * conv.x_high +
                                          column * conv.dilation_wide * conv.x_wide);
  step.tap = tap_bits(row, column);
  weight = 4u * static_cast<unsigned int>(channel * conv.weight_channel + row * conv.weight_high +
                                          column * conv.weight_wide);
}

// Which outputs a block computes, and over which part of the depth.
struct Block {
  long long row;
  long long filter;  // in its group
  long long group;
  long long split;
  long long first_chunk;
  int chunks;
};

template <int Rows, int Filters>
inline __device__ Block block_of(const Task& task, unsigned int index) {
  // Neighbouring blocks share the pixels, which are more than the weights.
  const unsigned int wide = static_cast<unsigned int>(divide_up(task.conv.filters, Filters));
  const unsigned int tall = static_cast<unsigned int>(divide_up(rows_of(task.conv), Rows));
  const unsigned int groups = static_cast<unsigned int>(task.conv.groups);
  Block block;
  block.filter = static_cast<long long>(index % wide) * Filters;
  index /= wide;
  block.row = static_cast<long long>(index % tall) * Rows;
  index /= tall;
  block.group = index % groups;
  block.split = index / groups;
  block.first_chunk = block.split * task.plan.chunks;
  const long long left = divide_up(depth_of(task.conv), kStep) - block.first_chunk;
  block.chunks = static_cast<int>(left < task.plan.chunks ? left : task.plan.chunks);
  return block;
}

template <int Rows, int Filters>
struct Shared {
  float x[kStages][kStep][Rows + kPitch];
  float weight[kStages][kStep][Filters + kPitch];
  Step steps[2 * kWindow];
  unsigned int weight_steps[2 * kWindow];
  Pixel pixels[Rows];
};

// Fills shared memory and prepares what lies there, a chunk at a time.
template <typename Policy, int Rows, int Filters, int Count>
class Filler {
 public:
  __device__ Filler(const Task& task, const Block& block, Shared<Rows, Filters>& shared)
      : task_(task), block_(block), shared_(shared),
        x_(reinterpret_cast<const char*>(
            task.x + block.group * task.conv.channels * task.conv.x_channel)),
        weight_(reinterpret_cast<const char*>(
            task.weight + (block.group * task.conv.filters + block.filter + threadIdx.x / kStep) *
                              task.conv.weight_filter)),
        thread_(static_cast<int>(threadIdx.x)) {
    for (int row = thread_; row < Rows; row += Count) {
      shared.pixels[row] = pixel_at(task.conv, block.row + row);
    }
    decode(0);
    __syncthreads();
    if (task.plan.loader != Loader::kDepth) {
      const Pixel own = shared.pixels[task.plan.loader == Loader::kQuads ? thread_ % kQuads * 4
                                                                         : thread_ % Rows];
      x_ += own.x * 4;
      outside_ = own.outside;
    }
    const long long left = task.conv.filters - block.filter;
    filters_left_ = static_cast<int>(left < Filters ? left : Filters) - thread_ / kStep;
  }

  // Begins to copy a chunk, counted from the block's first.
  __device__ void fill(int chunk) {
    if (chunk % (kWindow / kStep) == 0) {
      decode(chunk / (kWindow / kStep) + 1);
    }
    const int stage = chunk % kStages;
    const int at = chunk % (2 * kWindow / kStep) * kStep;
    const Step* const steps = shared_.steps + at;
    switch (task_.plan.loader) {
      case Loader::kQuads:
        fill_quads(stage, steps);
        break;
      case Loader::kRows:
        fill_rows(stage, steps);
        break;
      case Loader::kDepth:
        fill_depth(stage, steps);
        break;
    }
    fill_weight(stage, shared_.weight_steps + at);
  }

  // Prepares a chunk whose copies, any thread's, a barrier has shown; the next one shows the result.
  // Each thread takes its own elements, four at a time: whether one is NaN, of policies that ask.
  __device__ bool prepare(int chunk) {
    const int stage = chunk % kStages;
    bool nan = false;
#pragma unroll
    for (int first = 0; first < kStep * kQuads; first += Count) {
      const int quad = first + thread_;
      nan |= prepare_quad<false>(&shared_.x[stage][quad / kQuads][quad % kQuads * 4]);
    }
#pragma unroll
    for (int first = 0; first < kStep * kFilterQuads; first += Count) {
      const int quad = first + thread_;
      if (kStep * kFilterQuads % Count == 0 || quad < kStep * kFilterQuads) {
        nan |= prepare_quad<true>(
            &shared_.weight[stage][quad / kFilterQuads][quad % kFilterQuads * 4]);
      }
    }
    return nan;
  }

 private:
  // Between two barriers, of four chunks in a row one is used, the next prepared, the third under
  // way, and the fastest thread begins to fill the last.
  static_assert(kStages > kAhead + 1, "a stage is filled while others are used and prepared");
  static constexpr int kQuads = Rows / 4;
  static constexpr int kFilterQuads = Filters / 4;
  static constexpr int kQuadSteps = Count / kQuads;
  static constexpr int kLines = Count / kStep;
  static_assert(Count % Rows == 0 && kStep * kQuads % Count == 0, "threads divide a tile evenly");
  static_assert(kStep * Filters % Count == 0, "threads divide a tile evenly");

  template <bool Weight>
  __device__ float prepared(float value) const {
    return Weight ? Policy::prepare_weight(value, task_.kept)
                  : Policy::prepare_activation(value, task_.kept);
  }

  template <bool Weight>
  __device__ bool prepare_quad(float* own) const {
    float4* const quad = reinterpret_cast<float4*>(own);
    const float4 raw = *quad;
    const float4 four = {prepared<Weight>(raw.x), prepared<Weight>(raw.y), prepared<Weight>(raw.z),
                         prepared<Weight>(raw.w)};
    *quad = four;
    return mac::WithoutNan<Policy>::differs && (is_nan(four.x) | is_nan(four.y) | is_nan(four.z) |
                                                is_nan(four.w));
  }

  static __device__ bool is_nan(float value) {
    return mac::is_nan_word(mac::Ops<float>::bits(value));
  }

  // The half of the table that window is in was last read before the last barrier.
  __device__ void decode(int window) {
    const long long first = block_.first_chunk * kStep + static_cast<long long>(window) * kWindow;
    for (int step = thread_; step < kWindow; step += Count) {
      const int at = window % 2 * kWindow + step;
      decode_step(task_.conv, task_.plan.channels_inside, first + step, shared_.steps[at],
                  shared_.weight_steps[at]);
    }
  }

  // Steps are read before the first copy: between copies, a read of shared memory waits.
  __device__ void fill_quads(int stage, const Step* steps) {
    constexpr int kEach = kStep * kQuads / Count;
    Step own[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      own[i] = steps[thread_ / kQuads + i * kQuadSteps];
    }
    float* const target = &shared_.x[stage][thread_ / kQuads][thread_ % kQuads * 4];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      copy_async<16>(target + i * kQuadSteps * (Rows + kPitch), floats_at(x_ + own[i].x),
                     (outside_ & own[i].tap) == 0);
    }
  }

  __device__ void fill_rows(int stage, const Step* steps) {
    constexpr int kEach = kStep * Rows / Count;
    Step own[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      own[i] = steps[thread_ / Rows + i * (Count / Rows)];
    }
    float* const target = &shared_.x[stage][thread_ / Rows][thread_ % Rows];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      copy_async<4>(target + i * (Count / Rows) * (Rows + kPitch), floats_at(x_ + own[i].x),
                    (outside_ & own[i].tap) == 0);
    }
  }

  __device__ void fill_depth(int stage, const Step* steps) {
    constexpr int kEach = kStep * Rows / Count;
    const Step step = steps[thread_ % kStep];
    const char* const first = x_ + step.x;
    float* const target = &shared_.x[stage][thread_ % kStep][thread_ / kStep];
    const Pixel* const pixels = shared_.pixels + thread_ / kStep;
    const float* sources[kEach];
    bool inside[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      sources[i] = floats_at(first + pixels[i * kLines].x * 4);
      inside[i] = (pixels[i * kLines].outside & step.tap) == 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      copy_async<4>(target + i * kLines, sources[i], inside[i]);
    }
  }

  __device__ void fill_weight(int stage, const unsigned int* steps) {
    const unsigned int step = steps[thread_ % kStep];
    const int filters = step != kNoWeight ? filters_left_ : 0;
    const char* source = weight_ + step;
    float* const target = &shared_.weight[stage][thread_ % kStep][thread_ / kStep];
#pragma unroll
    for (int i = 0; i < kStep * Filters / Count; ++i) {
      copy_async<4>(target + i * kLines, floats_at(source), i * kLines < filters);
      source += kLines * 4 * task_.conv.weight_filter;
    }
  }

  static __device__ const float* floats_at(const char* bytes) {
    return reinterpret_cast<const float*>(bytes);
  }

  const Task& task_;
  const Block& block_;
  Shared<Rows, Filters>& shared_;
  const char* x_;       // of this thread's pixel, or of the group
  const char* weight_;  // of this thread's first filter
  int thread_;
  unsigned int outside_ = 0;
  int filters_left_;  // of the tile, from this thread's first
};

}  // namespace manual_float
}  // namespace narrowgauge
