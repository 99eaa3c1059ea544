// Packing, blocking and threads around the kernels of manual_float_kernel.h: what is the same for every
// policy and instruction set. A direct convolution: pixels are gathered into panels of one block at a
// time, at most kBlockDepth x kBlockColumns per thread, and never as a matrix of the whole.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "manual_float/manual_float_kernel.h"

namespace narrowgauge {
namespace manual {

// Pixels and terms in one block: with 4 bytes each, panels of 256 KiB.
constexpr std::int64_t kBlockColumns = 256;
constexpr std::int64_t kBlockDepth = 256;
// Filters that share a block's pixels: with them, sums of 512 KiB.
constexpr std::int64_t kBlockFilters = 512;
// Weights are packed for all threads together, so much at a time.
constexpr std::int64_t kPackedBytes = std::int64_t(32) << 20;
// Below this many terms, waking threads costs more than it saves.
constexpr double kLeastParallelWork = 32768;

inline std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

// Memory that starts on a cache line and holds nothing yet.
class Scratch {
 public:
  explicit Scratch(std::int64_t bytes) : storage_(new unsigned char[bytes + kLine]) {
    const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(storage_.get());
    data_ = reinterpret_cast<unsigned char*>((start + kLine - 1) / kLine * kLine);
  }
  unsigned char* bytes() { return data_; }
  float* floats() { return reinterpret_cast<float*>(data_); }

 private:
  static constexpr std::uintptr_t kLine = 64;
  std::unique_ptr<unsigned char[]> storage_;
  unsigned char* data_;
};

// Neighbouring pixels of one output row: columns [first, first + count) of a block.
struct Run {
  std::int64_t first;
  std::int64_t count;
  std::int64_t image;
  std::int64_t y;
  std::int64_t x;
};

// Pixels of all images, counted through.
inline std::vector<Run> runs_of(const Problem& problem, std::int64_t start, std::int64_t count) {
  std::vector<Run> runs;
  for (std::int64_t first = 0; first < count;) {
    const std::int64_t pixel = start + first;
    const std::int64_t line = pixel / problem.out_width;
    const std::int64_t x = pixel % problem.out_width;
    const std::int64_t length = std::min(count - first, problem.out_width - x);
    runs.push_back({first, length, line / problem.out_height, line % problem.out_height, x});
    first += length;
  }
  return runs;
}

// One term's pixels of a run, zeros where the kernel is over the padding.
inline void gather_run(const Problem& problem, const Run& run, const float* channel,
                       std::int64_t r, std::int64_t s, float* to) {
  const std::int64_t row = run.y * problem.stride[0] - problem.padding[0] + r * problem.dilation[0];
  const std::int64_t offset = s * problem.dilation[1] - problem.padding[1];
  const std::int64_t step = problem.stride[1];
  // The pixels x whose x * step + offset is in [0, width).
  std::int64_t low = run.count;
  std::int64_t high = run.count;
  if (row >= 0 && row < problem.height) {
    const std::int64_t from = offset >= 0 ? 0 : divide_up(-offset, step);
    const std::int64_t end = offset >= problem.width ? 0 : divide_up(problem.width - offset, step);
    low = std::min(std::max(from - run.x, std::int64_t(0)), run.count);
    high = std::max(std::min(end - run.x, run.count), low);
  }
  std::fill(to, to + low, 0.0f);
  const std::int64_t pitch = step * problem.x_strides.column;
  const float* source = channel + run.image * problem.x_strides.image + row * problem.x_strides.row +
                        ((run.x + low) * step + offset) * problem.x_strides.column;
  if (pitch == 1) {
    std::copy(source, source + (high - low), to + low);
  } else {
    for (std::int64_t i = low; i < high; ++i, source += pitch) {
      to[i] = *source;
    }
  }
  std::fill(to + high, to + run.count, 0.0f);
}

// The pixels of a block for terms [first_depth, first_depth + depth): panels [depth][columns].
inline void pack_pixels(const Problem& problem, const Kernel& kernel, unsigned int kept,
                        const std::vector<Run>& runs, std::int64_t group, std::int64_t first_depth,
                        std::int64_t depth, std::int64_t panels, float* line, float* to) {
  const std::int64_t taps = problem.kernel_height * problem.kernel_width;
  std::int64_t c = first_depth / taps;
  std::int64_t r = first_depth % taps / problem.kernel_width;
  std::int64_t s = first_depth % problem.kernel_width;
  for (std::int64_t d = 0; d < depth; ++d) {
    const float* channel =
        problem.x + (group * problem.channels + c) * problem.x_strides.channel;
    for (const Run& run : runs) {
      gather_run(problem, run, channel, r, s, line + run.first);
    }
    kernel.pack_activations(line, panels, kept, to + d * kernel.columns, depth * kernel.columns);
    if (++s == problem.kernel_width) {
      s = 0;
      if (++r == problem.kernel_height) {
        r = 0;
        ++c;
      }
    }
  }
}

// The block's sums, filter by filter in `tile`, to where they belong, with the bias.
inline void store_tile(const Problem& problem, const std::vector<Run>& runs, const float* tile,
                       std::int64_t tile_stride, std::int64_t first_filter, std::int64_t filters) {
  const Strides& strides = problem.out_strides;
  for (const Run& run : runs) {
    float* const start = problem.out + run.image * strides.image + run.y * strides.row +
                         run.x * strides.column + first_filter * strides.channel;
    const float* const from = tile + run.first;
    const auto bias = [&](std::int64_t f) {
      return problem.bias == nullptr ? 0.0f : problem.bias[first_filter + f];
    };
    const bool has_bias = problem.bias != nullptr;
    if (strides.column == 1) {
      for (std::int64_t f = 0; f < filters; ++f) {
        const float added = bias(f);
        float* const to = start + f * strides.channel;
        for (std::int64_t i = 0; i < run.count; ++i) {
          const float sum = from[f * tile_stride + i];
          to[i] = has_bias ? sum + added : sum;
        }
      }
    } else {
      for (std::int64_t i = 0; i < run.count; ++i) {
        float* const to = start + i * strides.column;
        for (std::int64_t f = 0; f < filters; ++f) {
          const float sum = from[f * tile_stride + i];
          to[f * strides.channel] = has_bias ? sum + bias(f) : sum;
        }
      }
    }
  }
}

// Weights [first_group, first_group + groups) x [first_filter, first_filter + filters), packed: each
// group's filters in panels of kernel.rows, the last one of what is left, each [depth][rows].
struct Pass {
  std::int64_t first_group;
  std::int64_t groups;
  std::int64_t first_filter;
  std::int64_t filters;
  const unsigned char* packed;
};

// What the tasks of a pass are: blocks of filters by blocks of pixels, for each group.
struct Blocks {
  std::int64_t filters;
  std::int64_t columns;
};

// As large as the caches like, halved until every thread has one.
inline Blocks choose_blocks(const Pass& pass, std::int64_t pixels, const Kernel& kernel,
                            std::int64_t threads) {
  std::int64_t high = divide_up(std::min(pass.filters, kBlockFilters), kernel.rows);
  std::int64_t wide = divide_up(std::min(pixels, kBlockColumns), kernel.columns);
  const auto count = [&] {
    return pass.groups * divide_up(pass.filters, high * kernel.rows) *
           divide_up(pixels, wide * kernel.columns);
  };
  while (count() < threads && (high > 1 || wide > 1)) {
    std::int64_t& larger = high * kernel.rows >= wide * kernel.columns && high > 1 ? high : wide;
    std::int64_t& taken = larger > 1 ? larger : high;
    taken = divide_up(taken, 2);
  }
  return {high * kernel.rows, wide * kernel.columns};
}

// One thread's memory.
struct Room {
  Room(const Blocks& block, std::int64_t depth)
      : line(block.columns * 4), pixels(block.columns * std::min(depth, kBlockDepth) * 4),
        tile(block.filters * block.columns * 4) {}
  Scratch line;
  Scratch pixels;
  Scratch tile;
};

// One block: filters [filter, filter + filters) of the pass's group by pixels [start, start + count).
inline void run_block(const Problem& problem, const Kernel& kernel, unsigned int kept,
                      const Pass& pass, std::int64_t group, std::int64_t filter,
                      std::int64_t filters, std::int64_t start, std::int64_t count, Room& room) {
  const std::int64_t depth =
      problem.channels * problem.kernel_height * problem.kernel_width;
  const std::int64_t panels = divide_up(count, kernel.columns);
  const std::int64_t width = panels * kernel.columns;
  const std::vector<Run> runs = runs_of(problem, start, count);
  float* const line = room.line.floats();
  float* const tile = room.tile.floats();
  std::fill(line + count, line + width, 0.0f);  // surplus pixels, whose sums nobody stores
  std::fill(tile, tile + filters * width, 0.0f);
  const unsigned char* const weights =
      pass.packed +
      ((group * pass.filters + filter) * depth) * static_cast<std::int64_t>(kernel.weight_bytes);
  for (std::int64_t d = 0; d < depth; d += kBlockDepth) {
    const std::int64_t steps = std::min(kBlockDepth, depth - d);
    pack_pixels(problem, kernel, kept, runs, pass.first_group + group, d, steps, panels, line,
                room.pixels.floats());
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      for (std::int64_t row = 0; row < filters; row += kernel.rows) {
        const std::int64_t rows = std::min<std::int64_t>(kernel.rows, filters - row);
        kernel.run[rows](steps, room.pixels.floats() + panel * steps * kernel.columns,
                         weights + (row * depth + d * rows) * kernel.weight_bytes,
                         tile + row * width + panel * kernel.columns, width);
      }
    }
  }
  store_tile(problem, runs, tile, width,
             (pass.first_group + group) * problem.filters + pass.first_filter + filter, filters);
}

template <typename Body>
void in_parallel(std::int64_t count, std::int64_t threads, const Body& body) {
  if (threads == 1) {
    body(0, count);
  } else {
    at::parallel_for(0, count, 1, body);
  }
}

inline void pack_pass(const Problem& problem, const Kernel& kernel, unsigned int kept,
                      const Pass& pass, std::int64_t threads, unsigned char* to) {
  const std::int64_t depth = problem.channels * problem.kernel_height * problem.kernel_width;
  const std::int64_t panels = divide_up(pass.filters, kernel.rows);
  in_parallel(pass.groups * panels, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t group = index / panels;
      const std::int64_t filter = index % panels * kernel.rows;
      const std::int64_t rows = std::min<std::int64_t>(kernel.rows, pass.filters - filter);
      const std::int64_t source =
          (pass.first_group + group) * problem.filters + pass.first_filter + filter;
      kernel.pack_weights(problem.weight + source * depth, depth, depth, static_cast<int>(rows),
                          kept,
                          to + (group * pass.filters + filter) * depth * kernel.weight_bytes);
    }
  });
}

inline void run_pass(const Problem& problem, const Kernel& kernel, unsigned int kept,
                     const Pass& pass, std::int64_t threads) {
  const std::int64_t depth = problem.channels * problem.kernel_height * problem.kernel_width;
  const std::int64_t pixels = problem.images * problem.out_height * problem.out_width;
  const Blocks block = choose_blocks(pass, pixels, kernel, threads);
  const std::int64_t high = divide_up(pass.filters, block.filters);
  const std::int64_t wide = divide_up(pixels, block.columns);
  in_parallel(pass.groups * high * wide, threads, [&](std::int64_t begin, std::int64_t end) {
    Room room(block, depth);
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t start = index % wide * block.columns;
      const std::int64_t filter = index / wide % high * block.filters;
      run_block(problem, kernel, kept, pass, index / wide / high, filter,
                std::min(block.filters, pass.filters - filter), start,
                std::min(block.columns, pixels - start), room);
    }
  });
}

// The whole problem, whose weight is contiguous.
inline void run_blocked(const Problem& problem, const Kernel& kernel, unsigned int kept) {
  const std::int64_t depth = problem.channels * problem.kernel_height * problem.kernel_width;
  const double work = static_cast<double>(problem.images) * problem.out_height *
                      problem.out_width * problem.groups * problem.filters * depth;
  const std::int64_t threads = work < kLeastParallelWork ? 1 : at::get_num_threads();
  const std::int64_t filter_bytes = depth * static_cast<std::int64_t>(kernel.weight_bytes);
  const std::int64_t fitting = std::max<std::int64_t>(kPackedBytes / filter_bytes, 1);
  // Whole panels of filters; whole groups where those fit.
  const std::int64_t filters =
      std::min(problem.filters, std::max<std::int64_t>(fitting / kernel.rows, 1) * kernel.rows);
  const std::int64_t groups =
      filters < problem.filters
          ? 1
          : std::min(problem.groups, std::max<std::int64_t>(fitting / problem.filters, 1));
  Scratch packed(groups * filters * filter_bytes);
  for (std::int64_t group = 0; group < problem.groups; group += groups) {
    for (std::int64_t filter = 0; filter < problem.filters; filter += filters) {
      const Pass pass = {group, std::min(groups, problem.groups - group), filter,
                         std::min(filters, problem.filters - filter), packed.bytes()};
      pack_pass(problem, kernel, kept, pass, threads, packed.bytes());
      run_pass(problem, kernel, kept, pass, threads);
    }
  }
}

}  // namespace manual
}  // namespace narrowgauge
