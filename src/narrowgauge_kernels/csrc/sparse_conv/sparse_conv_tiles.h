// How a sparse convolution is divided: into tiles of the result, slices of channels, and blocks of
// filters. No torch header.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sparse_conv/sparse_conv.h"

namespace narrowgauge {
namespace sparse_conv {

struct Shape {
  std::int64_t batch, channels, height, width;
  std::int64_t filters, kernel_height, kernel_width;
  std::int64_t stride_height, stride_width, padding_height, padding_width;
  std::int64_t out_height, out_width;
};

// Filters [first, first + filled), computed as `width` of them.
struct Block {
  std::int64_t first;
  std::int64_t filled;
  int width;
};

struct Range {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t size() const { return end - begin; }
};

// A part of the result, and the pixels of the map that it reads.
struct Tile {
  std::int64_t image;
  Range rows, columns;
  Range map_rows, map_columns;
  Range blocks;
};

// Sums of a tile and its lists should stay in the second cache, a panel of weights in the first: of
// 32 KiB it takes all, and is still faster than a half, because lists are longer.
constexpr std::int64_t kTilePixels = 512;
constexpr std::int64_t kTileColumns = 64;
constexpr std::int64_t kPanelFloats = 8192;
// Tiles for each thread, so that none waits long for the last.
constexpr std::int64_t kTilesPerThread = 4;

inline std::int64_t parts(std::int64_t whole, std::int64_t part) {
  return (whole + part - 1) / part;
}

inline Range piece(std::int64_t whole, std::int64_t count, std::int64_t index) {
  return {whole * index / count, whole * (index + 1) / count};
}

// Pixels of the map under the windows of a range of the result.
inline Range under(const Range& range, std::int64_t stride, std::int64_t padding,
                   std::int64_t kernel, std::int64_t length) {
  const std::int64_t begin = range.begin * stride - padding;
  const std::int64_t end = (range.end - 1) * stride - padding + kernel;
  const std::int64_t low = std::min(std::max<std::int64_t>(begin, 0), length);
  return {low, std::max(low, std::min(end, length))};
}

// A weight in the order in which it is read: for each block, slice and tap a panel of
// [channels of the slice, then a row of zeros][width].
class Packing {
 public:
  Packing(std::int64_t filters, std::int64_t channels, std::int64_t taps)
      : channels_(channels), taps_(taps) {
    for (std::int64_t first = 0; first < filters;) {
      const std::int64_t rest = filters - first;
      const int width = rest > 32 ? 64 : rest > 16 ? 32 : 16;
      blocks_.push_back({first, std::min<std::int64_t>(rest, width), width});
      first += width;
    }
    const std::int64_t widest = blocks_.empty() ? kGrain : blocks_.front().width;
    slice_ = kPanelFloats / widest;
  }

  const std::vector<Block>& blocks() const { return blocks_; }
  std::int64_t slices() const { return parts(channels_, slice_); }
  Range slice(std::int64_t index) const {
    return {index * slice_, std::min(channels_, (index + 1) * slice_)};
  }
  std::int64_t panel_floats(const Block& block, std::int64_t slice_index) const {
    return (slice(slice_index).size() + 1) * block.width;
  }
  // Where a panel begins. Blocks before this one are as wide as the first.
  std::int64_t panel(const Block& block, std::int64_t slice_index, std::int64_t tap) const {
    const std::int64_t rows = block.first * taps_ * (channels_ + slices());
    const std::int64_t within = slice(slice_index).begin + slice_index;
    return rows + within * taps_ * block.width + tap * panel_floats(block, slice_index);
  }
  std::int64_t floats() const {
    const std::int64_t width = blocks_.empty() ? 0 : blocks_.back().first + blocks_.back().width;
    return width * taps_ * (channels_ + slices());
  }

 private:
  std::vector<Block> blocks_;
  std::int64_t slice_ = 0;
  std::int64_t channels_, taps_;
};

class Tiling {
 public:
  Tiling(const Shape& shape, std::int64_t threads)
      : shape_(shape),
        packing_(shape.filters, shape.channels, shape.kernel_height * shape.kernel_width) {
    across_ = parts(shape.out_width, kTileColumns);
    const std::int64_t columns = parts(shape.out_width, across_);
    down_ = parts(shape.out_height, std::max<std::int64_t>(1, kTilePixels / columns));
    // Each group of blocks makes its lists anew, each tile those of its edge.
    if (threads > 1) {
      const std::int64_t wanted = threads * kTilesPerThread;
      const std::int64_t tiles = shape.batch * across_ * down_;
      const std::int64_t blocks = packing_.blocks().size();
      groups_ = std::min(blocks, parts(wanted, tiles));
      const std::int64_t more = parts(wanted, tiles * groups_);
      down_ = std::min(down_ * more, std::max(down_, parts(shape.out_height, 2)));
    }
  }

  const Shape& shape() const { return shape_; }
  const Packing& packing() const { return packing_; }
  std::int64_t count() const { return shape_.batch * down_ * across_ * groups_; }

  Tile tile(std::int64_t index) const {
    Tile made;
    made.blocks = piece(packing_.blocks().size(), groups_, index % groups_);
    index /= groups_;
    made.columns = piece(shape_.out_width, across_, index % across_);
    index /= across_;
    made.rows = piece(shape_.out_height, down_, index % down_);
    made.image = index / down_;
    made.map_rows = under(made.rows, shape_.stride_height, shape_.padding_height,
                          shape_.kernel_height, shape_.height);
    made.map_columns = under(made.columns, shape_.stride_width, shape_.padding_width,
                             shape_.kernel_width, shape_.width);
    return made;
  }

 private:
  Shape shape_;
  Packing packing_;
  std::int64_t across_ = 1, down_ = 1, groups_ = 1;
};

}  // namespace sparse_conv
}  // namespace narrowgauge
