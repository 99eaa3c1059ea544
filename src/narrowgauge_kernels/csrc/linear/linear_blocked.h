// Packing, blocking and threads around a micro-kernel: what is the same for every instruction set.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "linear/linear.h"

namespace narrowgauge {
namespace linear {

// A matrix of `extent` rows (or columns) by depth, anywhere in memory; strides in elements, or 0.
template <typename T>
struct Operand {
  const T* data;
  std::int64_t extent;
  std::int64_t stride;
  std::int64_t depth_stride;
};

// 128 × 256 accumulators and the panels that feed them for 256 steps of depth: 512 KiB in fp32, the
// size of a second-level cache.
constexpr std::int64_t kBlockRows = 128;
constexpr std::int64_t kBlockColumns = 256;
constexpr std::int64_t kBlockDepth = 256;
// Below this many multiply-accumulates, waking threads costs more than it saves.
constexpr double kLeastParallelWork = 65536;

inline std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

// Scratch that starts on a cache line.
template <typename T>
class Scratch {
 public:
  explicit Scratch(std::int64_t count) : storage_(count * sizeof(T) + kLine) {
    void* start = storage_.data();
    std::size_t space = storage_.size();
    data_ = static_cast<T*>(std::align(kLine, count * sizeof(T), start, space));
  }
  T* data() { return data_; }

 private:
  static constexpr std::size_t kLine = 64;
  std::vector<unsigned char> storage_;
  T* data_;
};

// Copies count × depth into panels of `width`: element (i, d) of panel p goes to
// [(p * depth + d) * width + i]. The last panel is filled up with zeros; its surplus outputs are
// never stored.
template <typename In, typename T>
void pack(const Operand<In>& operand, std::int64_t first, std::int64_t count,
          std::int64_t first_depth, std::int64_t depth, int width, T* to) {
  for (std::int64_t start = 0; start < count; start += width, to += depth * width) {
    const int filled = static_cast<int>(std::min<std::int64_t>(width, count - start));
    const In* from =
        operand.data + (first + start) * operand.stride + first_depth * operand.depth_stride;
    for (std::int64_t d = 0; d < depth; ++d) {
      T* line = to + d * width;
      const In* source = from + d * operand.depth_stride;
      for (int i = 0; i < filled; ++i) {
        line[i] = static_cast<T>(source[i * operand.stride]);
      }
      std::fill(line + filled, line + width, T(0));
    }
  }
}

struct Blocks {
  std::int64_t rows;
  std::int64_t columns;
};

// Blocks as large as the cache likes, halved until every thread has one.
template <typename T>
Blocks choose_blocks(std::int64_t rows, std::int64_t columns, const MicroKernel<T>& kernel,
                     std::int64_t threads) {
  std::int64_t high = divide_up(std::min(rows, kBlockRows), kernel.rows);
  std::int64_t wide = divide_up(std::min(columns, kBlockColumns), kernel.columns);
  const auto count = [&] {
    return divide_up(rows, high * kernel.rows) * divide_up(columns, wide * kernel.columns);
  };
  while (count() < threads && (high > 1 || wide > 1)) {
    std::int64_t& larger = high >= wide ? high : wide;
    larger = divide_up(larger, 2);
  }
  return {high * kernel.rows, wide * kernel.columns};
}

// One block of the output: rows [row, row + height) × columns [column, column + width).
template <typename In, typename T>
void run_block(const MicroKernel<T>& kernel, const Operand<In>& left, const Operand<In>& right,
               const In* bias, In* out, std::int64_t depth, std::int64_t row, std::int64_t height,
               std::int64_t column, std::int64_t width, T* left_panels, T* right_panels, T* tile) {
  const std::int64_t padded_height = divide_up(height, kernel.rows) * kernel.rows;
  const std::int64_t padded_width = divide_up(width, kernel.columns) * kernel.columns;
  std::fill(tile, tile + padded_height * padded_width, T(0));
  for (std::int64_t d = 0; d < depth; d += kBlockDepth) {
    const std::int64_t steps = std::min(kBlockDepth, depth - d);
    pack(left, row, height, d, steps, kernel.rows, left_panels);
    pack(right, column, width, d, steps, kernel.columns, right_panels);
    for (std::int64_t c = 0; c < padded_width; c += kernel.columns) {
      for (std::int64_t r = 0; r < padded_height; r += kernel.rows) {
        kernel.run(steps, left_panels + r * steps, right_panels + c * steps,
                   tile + r * padded_width + c, padded_width);
      }
    }
  }
  for (std::int64_t r = 0; r < height; ++r) {
    In* line = out + (row + r) * right.extent + column;
    for (std::int64_t c = 0; c < width; ++c) {
      const T sum = tile[r * padded_width + c];
      line[c] = static_cast<In>(bias == nullptr ? sum : sum + static_cast<T>(bias[column + c]));
    }
  }
}

// out[left.extent, right.extent], contiguous; bias is null or right.extent long.
template <typename In, typename T>
void run_blocked(const MicroKernel<T>& kernel, const Operand<In>& left, const Operand<In>& right,
                 const In* bias, In* out, std::int64_t depth) {
  const std::int64_t rows = left.extent;
  const std::int64_t columns = right.extent;
  const double work = static_cast<double>(rows) * static_cast<double>(columns) *
                      static_cast<double>(depth);
  const std::int64_t threads = work < kLeastParallelWork ? 1 : at::get_num_threads();
  const Blocks block = choose_blocks(rows, columns, kernel, threads);
  const std::int64_t blocks_wide = divide_up(columns, block.columns);
  const std::int64_t blocks = divide_up(rows, block.rows) * blocks_wide;
  const auto work_through = [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t steps = std::min(depth, kBlockDepth);
    Scratch<T> left_panels(block.rows * steps);
    Scratch<T> right_panels(block.columns * steps);
    Scratch<T> tile(block.rows * block.columns);
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t row = index / blocks_wide * block.rows;
      const std::int64_t column = index % blocks_wide * block.columns;
      run_block(kernel, left, right, bias, out, depth, row, std::min(block.rows, rows - row),
                column, std::min(block.columns, columns - column), left_panels.data(),
                right_panels.data(), tile.data());
    }
  };
  if (threads == 1) {
    work_through(0, blocks);
  } else {
    at::parallel_for(0, blocks, 1, work_through);
  }
}

}  // namespace linear
}  // namespace narrowgauge
