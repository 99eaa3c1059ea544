// What one thread does for its tiles of a sparse convolution on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "sparse_conv/sparse_conv.h"
#include "sparse_conv/sparse_conv_problem.h"
#include "sparse_conv/sparse_conv_tiles.h"

namespace narrowgauge {
namespace sparse_conv {
namespace {

constexpr std::int64_t kLine = 64;
constexpr int kWidest = 64;

// Memory that grows and is never cleared, aligned to a line of the cache.
template <typename T>
class Room {
 public:
  T* at_least(std::int64_t count) {
    if (count > size_) {
      memory_.reset(new char[count * sizeof(T) + kLine]);
      size_ = count;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
    return reinterpret_cast<T*>((address + kLine - 1) / kLine * kLine);
  }

 private:
  std::unique_ptr<char[]> memory_;
  std::int64_t size_ = 0;
};

// What one thread needs for its tiles, one after the other.
class Worker {
 public:
  Worker(const Problem& problem, const Tiling& tiling, const Loops& loops)
      : problem_(problem), tiling_(tiling), packing_(tiling.packing()), shape_(tiling.shape()),
        loops_(loops) {}

  void run(const Tile& tile) {
    make_lists(tile);
    for (std::int64_t index = tile.blocks.begin; index < tile.blocks.end; ++index) {
      const Block& block = packing_.blocks()[index];
      const std::int64_t count = tile.rows.size() * tile.columns.size() * block.width;
      float* sums = sums_.at_least(count);
      std::fill(sums, sums + count, 0.0f);
      for (std::int64_t slice = 0; slice < packing_.slices(); ++slice) {
        add_slice(tile, block, slice, sums);
      }
      finish(tile, block, sums);
    }
  }

 private:
  std::int64_t pixels(const Tile& tile) const {
    return tile.map_rows.size() * tile.map_columns.size();
  }

  Lists lists_of(const Tile& tile, std::int64_t slice) {
    return {values_.at_least(0), offsets_.at_least(0),
            starts_.at_least(0) + slice * (pixels(tile) + 1)};
  }

  void make_lists(const Tile& tile) {
    const std::int64_t most = pixels(tile) * (shape_.channels + packing_.slices()) + kSlack;
    values_.at_least(most);
    offsets_.at_least(most);
    starts_.at_least(packing_.slices() * (pixels(tile) + 1));
    std::int64_t end = 0;
    for (std::int64_t slice = 0; slice < packing_.slices(); ++slice) {
      const Lists lists = lists_of(tile, slice);
      lists.starts[0] = end;
      make_slice(tile, packing_.slice(slice), lists);
      end = lists.starts[pixels(tile)];
    }
  }

  void make_slice(const Tile& tile, const Range& channels, const Lists& lists) {
    const int count = static_cast<int>(channels.size());
    const Slice slice = {count, problem_.relu_input};
    const std::int64_t plane = shape_.height * shape_.width;
    const float* image = problem_.x.data_ptr<float>() + tile.image * shape_.channels * plane;
    // Rows that are whole follow each other in memory.
    const bool whole = tile.map_columns.size() == shape_.width;
    const std::int64_t runs = whole ? 1 : tile.map_rows.size();
    const std::int64_t length = pixels(tile) / std::max<std::int64_t>(runs, 1);
    float* scratch = scratch_.at_least(8 * (count + kSlack));
    for (std::int64_t run = 0; run < runs; ++run) {
      const std::int64_t pixel =
          (tile.map_rows.begin + run) * shape_.width + tile.map_columns.begin;
      const Map map = problem_.channels_last
                          ? Map{image + pixel * shape_.channels + channels.begin, 1,
                                shape_.channels}
                          : Map{image + channels.begin * plane + pixel, plane, 1};
      loops_.build(map, length, slice, run * length, lists, scratch);
    }
  }

  void add_slice(const Tile& tile, const Block& block, std::int64_t slice, float* sums) {
    const Lists lists = lists_of(tile, slice);
    if (lists.starts[0] == lists.starts[pixels(tile)]) {
      return;
    }
    const float* packed = problem_.packed.data_ptr<float>();
    for (std::int64_t r = 0; r < shape_.kernel_height; ++r) {
      for (std::int64_t s = 0; s < shape_.kernel_width; ++s) {
        const std::int64_t tap = r * shape_.kernel_width + s;
        const Panel panel = {packed + packing_.panel(block, slice, tap),
                             packing_.panel_floats(block, slice)};
        add_tap(tile, block, lists, r, s, panel, sums);
      }
    }
  }

  struct Panel {
    const float* from;
    std::int64_t floats;
  };

  void add_tap(const Tile& tile, const Block& block, const Lists& lists, std::int64_t r,
               std::int64_t s, const Panel& panel, float* sums) {
    const Range rows = inside(tile.rows, shape_.stride_height, shape_.padding_height - r,
                              shape_.height);
    const Range columns = inside(tile.columns, shape_.stride_width, shape_.padding_width - s,
                                 shape_.width);
    if (rows.size() == 0 || columns.size() == 0) {
      return;
    }
    const auto visit = block.width == 64   ? loops_.visit64
                       : block.width == 32 ? loops_.visit32
                                           : loops_.visit16;
    const std::int64_t share = parts(panel.floats, rows.size());
    for (std::int64_t y = rows.begin; y < rows.end; ++y) {
      ask_for(panel, (y - rows.begin) * share, share);
      const std::int64_t map_row = y * shape_.stride_height - shape_.padding_height + r;
      const std::int64_t map_column =
          columns.begin * shape_.stride_width - shape_.padding_width + s;
      const std::int64_t list = (map_row - tile.map_rows.begin) * tile.map_columns.size() +
                                map_column - tile.map_columns.begin;
      const std::int64_t pixel = (y - tile.rows.begin) * tile.columns.size() + columns.begin -
                                 tile.columns.begin;
      visit(lists, panel.from, list, shape_.stride_width, columns.size(),
            sums + pixel * block.width);
    }
  }

  // A part of the panel that comes after this one in memory, which is used next, into the second
  // cache. There is none after the last; asking for it does nothing.
  static void ask_for(const Panel& panel, std::int64_t first, std::int64_t floats) {
    const auto next = reinterpret_cast<const char*>(panel.from + panel.floats + first);
    for (std::int64_t at = 0; at < floats * static_cast<std::int64_t>(sizeof(float)); at += kLine) {
      __builtin_prefetch(next + at, 0, 2);
    }
  }

  // The part of a range of the result where i * stride - before lies on the map.
  static Range inside(const Range& range, std::int64_t stride, std::int64_t before,
                      std::int64_t length) {
    const std::int64_t low = before > 0 ? parts(before, stride) : 0;
    const std::int64_t last = length - 1 + before;
    const std::int64_t high = last < 0 ? 0 : last / stride + 1;
    const std::int64_t begin = std::max(range.begin, low);
    return {begin, std::max(begin, std::min(range.end, high))};
  }

  void finish(const Tile& tile, const Block& block, float* sums) {
    float bias[kWidest] = {};
    if (problem_.bias.defined()) {
      const float* from = problem_.bias.data_ptr<float>() + block.first;
      std::copy(from, from + block.filled, bias);
    }
    const std::int64_t plane = shape_.out_height * shape_.out_width;
    float* image = problem_.out.data_ptr<float>() + tile.image * shape_.filters * plane;
    const bool whole = tile.columns.size() == shape_.out_width;
    const std::int64_t runs = whole ? 1 : tile.rows.size();
    const std::int64_t length = tile.rows.size() * tile.columns.size() / runs;
    for (std::int64_t run = 0; run < runs; ++run) {
      const std::int64_t pixel =
          (tile.rows.begin + run) * shape_.out_width + tile.columns.begin;
      const Result result =
          problem_.channels_last
              ? Result{image + pixel * shape_.filters + block.first, shape_.filters, 1, bias,
                       problem_.relu_output}
              : Result{image + block.first * plane + pixel, 1, plane, bias,
                       problem_.relu_output};
      loops_.finish(sums + run * length * block.width, length, block.width,
                    static_cast<int>(block.filled), result);
    }
  }

  const Problem& problem_;
  const Tiling& tiling_;
  const Packing& packing_;
  const Shape& shape_;
  const Loops& loops_;
  Room<float> values_, sums_, scratch_;
  Room<std::int32_t> offsets_;
  Room<std::int64_t> starts_;
};

}  // namespace
}  // namespace sparse_conv
}  // namespace narrowgauge
