// Rows of codes in order of depth: an output pixel's, gathered from the image, or an output
// channel's. No torch header.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "manual_codes/manual_codes.h"

namespace narrowgauge {
namespace codes {

inline std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

// Depth runs over (kernel row, kernel column, channel), channel fastest. Codes are raw bytes.
class Rows {
 public:
  virtual ~Rows() = default;
  virtual std::int64_t count() const = 0;
  // Writes codes [depth_first, depth_first + depth) of rows [first, first + count) to
  // to[row * stride + d].
  virtual void gather(std::int64_t first, std::int64_t count, std::int64_t depth_first,
                      std::int64_t depth, std::uint8_t* to, std::int64_t stride) const = 0;
};

// Output pixels in order, without a division per pixel.
struct Walk {
  Walk(const Geometry& geometry, std::int64_t pixel)
      : height(geometry.out_height),
        width(geometry.out_width),
        image(pixel / (height * width)),
        y(pixel / width % height),
        x(pixel % width) {}

  void next() {
    if (++x == width) {
      x = 0;
      if (++y == height) {
        y = 0;
        ++image;
      }
    }
  }

  std::int64_t height;
  std::int64_t width;
  std::int64_t image;
  std::int64_t y;
  std::int64_t x;
};

// weight[O / groups, R, S, C / groups] of one group, contiguous.
class WeightRows : public Rows {
 public:
  WeightRows(const Geometry& geometry, const std::uint8_t* weight, std::int64_t group)
      : geometry_(geometry),
        weight_(weight + group * geometry.group_outputs() * geometry.depth()) {}

  std::int64_t count() const override { return geometry_.group_outputs(); }

  const std::uint8_t* row(std::int64_t index) const {
    return weight_ + index * geometry_.depth();
  }

  void gather(std::int64_t first, std::int64_t count, std::int64_t depth_first, std::int64_t depth,
              std::uint8_t* to, std::int64_t stride) const override {
    for (std::int64_t index = 0; index < count; ++index) {
      std::memcpy(to + index * stride, row(first + index) + depth_first, depth);
    }
  }

 private:
  Geometry geometry_;
  const std::uint8_t* weight_;
};

// Output pixels of x[N, H, W, C], contiguous, as one group sees them.
class PixelRows : public Rows {
 public:
  PixelRows(const Geometry& geometry, const std::uint8_t* x, std::int64_t group,
            std::uint8_t padding_code)
      : geometry_(geometry),
        x_(x + group * geometry.group_channels()),
        padding_code_(padding_code) {}

  std::int64_t count() const override { return geometry_.pixels(); }

  // Whether a row lies in the image as it is: then there is nothing to gather.
  bool lie_whole() const {
    return geometry_.kernel_height == 1 && geometry_.kernel_width == 1 &&
           geometry_.padding[0] == 0 && geometry_.padding[1] == 0;
  }

  // Where rows [first, first + count) begin, of rows that lie whole.
  void find(std::int64_t first, std::int64_t count, const std::uint8_t** to) const {
    Walk at(geometry_, first);
    for (std::int64_t row = 0; row < count; ++row, at.next()) {
      const std::int64_t y = at.image * geometry_.height + at.y * geometry_.stride[0];
      to[row] = x_ + (y * geometry_.width + at.x * geometry_.stride[1]) * geometry_.channels;
    }
  }

  void gather(std::int64_t first, std::int64_t count, std::int64_t depth_first, std::int64_t depth,
              std::uint8_t* to, std::int64_t stride) const override {
    const std::vector<Run> runs = runs_of(depth_first, depth);
    const std::vector<Run> merged = merge(runs);
    Walk at(geometry_, first);
    for (std::int64_t row = 0; row < count; ++row, to += stride, at.next()) {
      const std::int64_t y = at.y * geometry_.stride[0] - geometry_.padding[0];
      const std::int64_t x = at.x * geometry_.stride[1] - geometry_.padding[1];
      const std::int64_t image = at.image * geometry_.height;
      if (inside(y, x)) {
        copy_runs(merged, x_ + ((image + y) * geometry_.width + x) * geometry_.channels, to);
      } else {
        copy_checked(runs, image, y, x, to);
      }
    }
  }

 private:
  // `length` codes of one kernel element (after merging, of several): `offset` codes from the
  // pixel's first, to `at` of the row.
  struct Run {
    std::int64_t y;
    std::int64_t x;
    std::int64_t offset;
    std::int64_t at;
    std::int64_t length;
  };

  std::vector<Run> runs_of(std::int64_t depth_first, std::int64_t depth) const {
    const std::int64_t channels = geometry_.group_channels();
    std::vector<Run> runs;
    for (std::int64_t at = 0; at < depth;) {
      const std::int64_t element = (depth_first + at) / channels;
      const std::int64_t channel = (depth_first + at) % channels;
      const std::int64_t y = element / geometry_.kernel_width * geometry_.dilation[0];
      const std::int64_t x = element % geometry_.kernel_width * geometry_.dilation[1];
      const std::int64_t length = std::min(channels - channel, depth - at);
      const std::int64_t offset = (y * geometry_.width + x) * geometry_.channels + channel;
      runs.push_back({y, x, offset, at, length});
      at += length;
    }
    return runs;
  }

  static std::vector<Run> merge(const std::vector<Run>& runs) {
    std::vector<Run> merged;
    for (const Run& run : runs) {
      if (!merged.empty() && merged.back().offset + merged.back().length == run.offset) {
        merged.back().length += run.length;
      } else {
        merged.push_back(run);
      }
    }
    return merged;
  }

  bool inside(std::int64_t y, std::int64_t x) const {
    return y >= 0 && x >= 0 &&
           y + (geometry_.kernel_height - 1) * geometry_.dilation[0] < geometry_.height &&
           x + (geometry_.kernel_width - 1) * geometry_.dilation[1] < geometry_.width;
  }

  static void copy_runs(const std::vector<Run>& runs, const std::uint8_t* from, std::uint8_t* to) {
    for (const Run& run : runs) {
      if (run.length == 1) {
        to[run.at] = from[run.offset];
      } else {
        std::memcpy(to + run.at, from + run.offset, run.length);
      }
    }
  }

  void copy_checked(const std::vector<Run>& runs, std::int64_t image, std::int64_t y,
                    std::int64_t x, std::uint8_t* to) const {
    const std::int64_t pixel = ((image + y) * geometry_.width + x) * geometry_.channels;
    for (const Run& run : runs) {
      const bool there = y + run.y >= 0 && y + run.y < geometry_.height && x + run.x >= 0 &&
                         x + run.x < geometry_.width;
      if (there) {
        std::memcpy(to + run.at, x_ + (pixel + run.offset), run.length);
      } else {
        std::memset(to + run.at, padding_code_, run.length);
      }
    }
  }

  Geometry geometry_;
  const std::uint8_t* x_;
  std::uint8_t padding_code_;
};

// Where the output of a pixel and a channel of one group is.
struct Output {
  std::int32_t* data;  // of the group's first channel
  std::int64_t area;   // pixels of an image
  std::int64_t image_stride;
  std::int64_t pixel_stride;
  std::int64_t channel_stride;

  std::int32_t* pixel(std::int64_t index) const {
    return data + index / area * image_stride + index % area * pixel_stride;
  }
};

}  // namespace codes
}  // namespace narrowgauge
