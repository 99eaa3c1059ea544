// Which tiles, how x is loaded, and into how many parts the depth is split: a pure function of a manual
// convolution's sizes and what a product costs. For the host; C++14, without a header of the toolkit.
#pragma once

#include "manual_float/cuda/manual_float_task.h"

namespace narrowgauge {
namespace manual_float {

constexpr int kMostSplits = 32;
constexpr int kLeastChunks = 16;  // of a split

// Which tiles there are for a policy: many sums per thread where a product is cheap beside its
// operands' way to the registers, fewer where an operand takes several registers itself.
enum class Family : int { kLight, kMiddle, kHeavy };

struct Choices {
  TileKind tiles[4];
  int count;
};

inline Choices choices_of(Family family) {
  switch (family) {
    case Family::kLight:
      return {{TileKind::k128x128, TileKind::k128x64, TileKind::k128x32, TileKind::k64x64}, 4};
    case Family::kMiddle:
      return {{TileKind::k128x64, TileKind::kHeavy64x32}, 2};
    default:
      return {{TileKind::kHeavy128x64, TileKind::kHeavy64x32}, 2};
  }
}

// What a product costs in issue slots of a scheduler, for plan_for.
struct Cost {
  double slots;
  Family family;
};

namespace planning {

// Whether 32 bits hold every offset in bytes inside one image and one filter, and the depth.
inline bool small_offsets(const Convolution& conv) {
  const double image =
      static_cast<double>(conv.x_channel) * (conv.channels - 1) +
      static_cast<double>(conv.x_high) * conv.dilation_high * (conv.taps_high - 1) +
      static_cast<double>(conv.x_wide) * conv.dilation_wide * (conv.taps_wide - 1);
  const double filter = static_cast<double>(conv.weight_channel) * (conv.channels - 1) +
                        static_cast<double>(conv.weight_high) * (conv.taps_high - 1) +
                        static_cast<double>(conv.weight_wide) * (conv.taps_wide - 1);
  return image < 1073741823.0 && filter < 1073741823.0 && depth_of(conv) < 2147480000;
}

inline Loader loader_for(const Convolution& conv, bool aligned) {
  const bool point = conv.taps_high == 1 && conv.taps_wide == 1 && conv.stride_high == 1 &&
                     conv.stride_wide == 1 && conv.padding_high == 0 && conv.padding_wide == 0;
  const bool planes = conv.x_wide == 1 && conv.x_high == conv.wide &&
                      out_area(conv) % 4 == 0 && conv.x_channel % 4 == 0 && conv.x_batch % 4 == 0;
  if (point && planes && aligned) {
    return Loader::kQuads;
  }
  const bool pixels_apart = conv.out_wide == 1 && conv.out_high == 1 ? conv.x_batch > 1
                                                                     : conv.x_wide > 1;
  return conv.x_channel == 1 && pixels_apart ? Loader::kDepth : Loader::kRows;
}

// Of the kernel's rate with this tile, 1 being the largest tile's: what loads and barriers leave.
inline double rate_of(TileKind kind) {
  switch (kind) {
    case TileKind::k128x128:
    case TileKind::kHeavy128x64:
      return 1.0;
    case TileKind::k128x64:
      return 0.93;
    case TileKind::k64x64:
      return 0.80;
    default:
      return 0.75;
  }
}

struct Estimate {
  double clocks;
  int splits;
  long long chunks;
  long long blocks;
};

// Clocks of the whole device. A multiprocessor with few warps does not reach its rate; the partial
// sums of splits are written and read once, at about 1,500 bytes per clock, by a launch more.
inline Estimate estimate(const Convolution& conv, const Cost& cost, TileKind kind, int splits,
                         int multiprocessors) {
  constexpr double kFilling = 6.0;  // chunks' time that a block takes to begin and to store
  const Tile tile = tile_of(kind);
  const long long all = divide_up(depth_of(conv), kStep);
  const long long chunks = divide_up(all, splits);
  const int used = static_cast<int>(divide_up(all, chunks));
  const long long blocks = divide_up(rows_of(conv), tile.rows) *
                           divide_up(conv.filters, tile.filters) * conv.groups * used;
  const long long turns = divide_up(blocks, multiprocessors);
  const double resident = static_cast<double>(turns) * threads_of(tile);
  const double hidden = resident >= 512 ? 1.0 : resident >= 256 ? 0.85 : 0.5;
  const double per_chunk =
      static_cast<double>(tile.rows) * tile.filters * kStep / 128.0 * cost.slots;
  double clocks = static_cast<double>(turns) * (chunks + kFilling) * per_chunk /
                  (rate_of(kind) * hidden);
  if (used > 1) {
    clocks += 3000.0 + static_cast<double>(out_count(conv)) * 4.0 * (2.0 * used + 1.0) / 1500.0;
  }
  return {clocks, used, chunks, blocks};
}

}  // namespace planning

// The plan of `conv` on a device of `multiprocessors`; `aligned`: x begins at a multiple of 16 bytes.
inline Plan plan_for(const Convolution& conv, const Cost& cost, int multiprocessors,
                     bool aligned) {
  constexpr int kLeastFilters = 8;  // fewer of a group leave most of a tile empty
  constexpr int kLeastDepth = 8;
  Plan plan{TileKind::kDirect, planning::loader_for(conv, aligned), false, false, 1, 0, 0};
  plan.channels_inside = plan.loader == Loader::kDepth;
  plan.quads_out = conv.out_channels_last
                       ? conv.filters % 4 == 0
                       : out_area(conv) % 4 == 0;
  if (conv.taps_high > kMostTaps || conv.taps_wide > kMostTaps ||
      !planning::small_offsets(conv) || depth_of(conv) < kLeastDepth ||
      (conv.filters < kLeastFilters && conv.groups > 1)) {
    return plan;
  }
  const Choices choices = choices_of(cost.family);
  const long long chunks = divide_up(depth_of(conv), kStep);
  double best = 0;
  for (int index = 0; index < choices.count; ++index) {
    for (int splits = 1; splits <= kMostSplits; ++splits) {
      if (splits > 1 && chunks / splits < kLeastChunks) {
        break;
      }
      const planning::Estimate found =
          planning::estimate(conv, cost, choices.tiles[index], splits, multiprocessors);
      if (plan.tile == TileKind::kDirect || found.clocks < best) {
        best = found.clocks;
        plan.tile = choices.tiles[index];
        plan.splits = found.splits;
        plan.chunks = found.chunks;
        plan.blocks = found.blocks;
      }
    }
  }
  return plan;
}

}  // namespace manual_float
}  // namespace narrowgauge
