// Few pixels by many filters, as in a linear layer of one row: what stands around the turned kernels of
// manual_float_kernel.h, and which way a problem goes.
#pragma once

#include "manual_float/manual_float_blocked.h"

namespace narrowgauge {
namespace manual {

// Pixels above which a panel of them is better: they are taken kMostTurned at a time.
constexpr std::int64_t kFewPixels = 2 * kMostTurned;
// Terms of a turned panel, which stays in the first cache.
constexpr std::int64_t kTurnedDepth = 128;

// Pixels of one group for every term, [depth][pixels].
inline void gather_few(const Problem& problem, const Kernel& kernel, unsigned int kept,
                       const std::vector<Run>& runs, std::int64_t group, std::int64_t pixels,
                       float* to) {
  float* at = to;
  for (std::int64_t c = 0; c < problem.channels; ++c) {
    const float* channel =
        problem.x + (group * problem.channels + c) * problem.x_strides.channel;
    for (std::int64_t r = 0; r < problem.kernel_height; ++r) {
      for (std::int64_t s = 0; s < problem.kernel_width; ++s, at += pixels) {
        for (const Run& run : runs) {
          gather_run(problem, run, channel, r, s, at + run.first);
        }
      }
    }
  }
  kernel.prepare_activations(to, at - to, kept);
}

// The sums of `count` filters from `first` on, [pixel][filter].
inline void run_panel(const Problem& problem, const Kernel& kernel, unsigned int kept,
                      std::int64_t first, std::int64_t count, std::int64_t pixels,
                      const float* few, float* panel, float* sums) {
  const std::int64_t depth = problem.channels * problem.kernel_height * problem.kernel_width;
  const std::int64_t width = kernel.turned_columns;
  std::fill_n(sums, pixels * width, 0.0f);
  for (std::int64_t d = 0; d < depth; d += kTurnedDepth) {
    const std::int64_t steps = std::min(kTurnedDepth, depth - d);
    kernel.pack_turned(problem.weight + first * depth + d, depth, steps, static_cast<int>(count),
                       kept, panel);
    for (std::int64_t pixel = 0; pixel < pixels; pixel += kMostTurned) {
      const std::int64_t rows = std::min<std::int64_t>(kMostTurned, pixels - pixel);
      kernel.run_turned[rows](steps, few + pixel * depth + d * rows, panel, sums + pixel * width,
                              width);
    }
  }
}

// Few pixels by many filters: a panel of filters is turned a block of depth at a time, so that weights
// are read once and every lane has a filter. Steps and their order are those of the other kernels.
inline void run_turned(const Problem& problem, const Kernel& kernel, unsigned int kept,
                       std::int64_t pixels) {
  const std::int64_t depth = problem.channels * problem.kernel_height * problem.kernel_width;
  const std::int64_t width = kernel.turned_columns;
  const double work = static_cast<double>(pixels) * problem.filters * static_cast<double>(depth);
  const std::int64_t threads = work < kLeastParallelWork ? 1 : at::get_num_threads();
  const std::vector<Run> runs = runs_of(problem, 0, pixels);
  Scratch few(depth * pixels * 4);
  for (std::int64_t group = 0; group < problem.groups; ++group) {
    for (std::int64_t pixel = 0; pixel < pixels; pixel += kMostTurned) {
      const std::int64_t rows = std::min<std::int64_t>(kMostTurned, pixels - pixel);
      gather_few(problem, kernel, kept, runs_of(problem, pixel, rows), group, rows,
                 few.floats() + pixel * depth);
    }
    const std::int64_t panels = divide_up(problem.filters, width);
    in_parallel(panels, threads, [&](std::int64_t begin, std::int64_t end) {
      Scratch panel(kTurnedDepth * width * 4);
      Scratch sums(pixels * width * 4);
      Scratch tile(pixels * width * 4);
      for (std::int64_t filter = begin * width; filter < end * width; filter += width) {
        const std::int64_t count = std::min(width, problem.filters - filter);
        const std::int64_t first = group * problem.filters + filter;
        run_panel(problem, kernel, kept, first, count, pixels, few.floats(), panel.floats(),
                  sums.floats());
        for (std::int64_t f = 0; f < count; ++f) {
          for (std::int64_t pixel = 0; pixel < pixels; ++pixel) {
            tile.floats()[f * pixels + pixel] = sums.floats()[pixel * width + f];
          }
        }
        store_tile(problem, runs, tile.floats(), pixels, first, count);
      }
    });
  }
}

// The whole problem, whose weight is contiguous.
inline void run_any(const Problem& problem, const Kernel& kernel, unsigned int kept) {
  const std::int64_t pixels = problem.images * problem.out_height * problem.out_width;
  if (pixels <= kFewPixels && problem.filters >= kernel.turned_columns) {
    run_turned(problem, kernel, kept, pixels);
  } else {
    run_blocked(problem, kernel, kept);
  }
}

}  // namespace manual
}  // namespace narrowgauge
