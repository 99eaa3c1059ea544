// Which kernel computes a sum of products of 8-bit codes on a GPU, in which tiles, and in how many
// ranges of depth; and the sweeps that a list of terms becomes. Pure: no GPU, no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "manual_codes/manual_codes.h"

namespace narrowgauge {
namespace codes {

// kTensor: int8 tensor cores, 8.0 and later. kDot: dp4a. kTable: rows of a table in shared memory.
// kDirect: one lookup per product, for shapes that leave the others' tiles empty.
enum class Path { kTensor, kDot, kTable, kDirect };

struct Machine {
  int capability;  // 90 for 9.0
  int multiprocessors;
  int shared_bytes;  // that a block may ask for
};

// One product of operands on a GPU: of one group, but for `groups`.
struct Extents {
  std::int64_t pixels;
  std::int64_t outputs;
  std::int64_t depth;       // with the padded channels
  std::int64_t true_depth;  // without
  std::int64_t groups;
  int passes;    // masked products, 1 for a table
  bool shifts;   // whether a sum is shifted, and must not wrap
  bool lowers;   // whether its sizes fit 32-bit coordinates
};

// Tiles of a path, by their number in its list.
struct TileCost {
  int pixels;
  int channels;
  int blocks_per_sm;
  int shared_bytes;
  double step;     // clocks of 16 of depth, all of an SM's blocks at it
  double written;  // clocks of 32 results, and of 32 that are added to others'
  double added;
};

struct Plan {
  Path path;
  int tile;
  std::int64_t tiles;   // blocks along x
  int splits;           // blocks along y
  int split_depth;
};

// Ranges of depth are multiples of what a kernel loads at once.
inline std::int64_t split_unit(Path path) { return path == Path::kTable ? 16 : 64; }

// The largest depth whose shifted sum of eight products of bytes, each at most 255 * 255, is an int32.
constexpr int kShiftedDepth = 4096;

constexpr int kChannelUnit = 4;  // of x and weight in the tiled paths, which zeros fill up
constexpr int kOutputPad = 32;   // of weight in kTable

inline std::int64_t divided_up(std::int64_t value, std::int64_t by) {
  return (value + by - 1) / by;
}

inline std::int64_t padded_channels(const Geometry& geometry) {
  return divided_up(geometry.group_channels(), kChannelUnit) * kChannelUnit;
}

// Codes [images, channels, pixels], to be transposed to [images, pixels, padded channels].
struct Planes {
  std::int64_t images;
  std::int64_t channels;
  std::int64_t pixels;

  std::int64_t padded() const { return divided_up(channels, kChannelUnit) * kChannelUnit; }
};

// Whether the kernel that transposes planes takes these: there is something to do, within its 32-bit
// coordinates and the grid's limits.
inline bool transposes(const Planes& planes) {
  constexpr std::int64_t kMost = std::int64_t(1) << 30;
  return planes.images > 0 && planes.channels > 0 && planes.channels < (std::int64_t(1) << 21) &&
         planes.pixels > 1 && planes.pixels < kMost &&
         planes.images < kMost / divided_up(planes.pixels, 16);
}

// Whether coordinates and depth fit the 32 bits that tiled paths have for them, with room for sums.
inline bool lowers(const Geometry& geometry) {
  constexpr std::int64_t kMost = std::int64_t(1) << 28;
  const std::int64_t reach_h = geometry.dilation[0] * geometry.kernel_height;
  const std::int64_t reach_w = geometry.dilation[1] * geometry.kernel_width;
  const std::int64_t taps = geometry.kernel_height * geometry.kernel_width;
  return geometry.height < kMost && geometry.width < kMost && geometry.padding[0] < kMost &&
         geometry.padding[1] < kMost && reach_h < kMost && reach_w < kMost &&
         geometry.stride[0] < kMost && geometry.stride[1] < kMost &&
         geometry.out_height * geometry.out_width < (std::int64_t(1) << 31) &&
         geometry.group_outputs() < kMost && padded_channels(geometry) * taps < kMost;
}

inline const std::vector<TileCost>& tiles_of(Path path) {
  // Clocks as in manual_codes_structured.cuh; by table as 27 layers took on an H200, which these
  // explain to 3 %.
  static const std::vector<TileCost> tensor = {{256, 128, 1, 98304, 210, 1, 3},
                                               {128, 64, 2, 49152, 120, 1, 3}};
  static const std::vector<TileCost> dot = {{64, 64, 4, 4608, 1100, 1, 3}};
  static const std::vector<TileCost> table = {{1024, 32, 1, 98304, 23700, 4, 10},
                                              {896, 32, 1, 94208, 21300, 4, 10},
                                              {1024, 32, 1, 65536, 25200, 4, 10},
                                              {512, 32, 1, 49152, 16100, 4, 10}};
  static const std::vector<TileCost> none;
  switch (path) {
    case Path::kTensor:
      return tensor;
    case Path::kDot:
      return dot;
    case Path::kTable:
      return table;
    case Path::kDirect:
      break;
  }
  return none;
}

// Clocks of starting a block and of writing its results once, and of writing them beside others'.
inline double plan_clocks(const TileCost& tile, const Extents& extents, const Machine& machine,
                          std::int64_t splits, std::int64_t split_depth) {
  const std::int64_t tiles =
      divided_up(extents.pixels, tile.pixels) * divided_up(extents.outputs, tile.channels);
  const std::int64_t blocks = tiles * extents.groups * splits;
  const std::int64_t waves =
      divided_up(blocks, std::int64_t(machine.multiprocessors) * tile.blocks_per_sm);
  const double results = static_cast<double>(tile.pixels) * tile.channels / 32;
  const double each = tile.step * extents.passes * static_cast<double>(split_depth) / 16;
  return static_cast<double>(waves) *
         (each + 2500 + results * (splits > 1 ? tile.added : tile.written));
}

// The cheapest tile and number of ranges. Shared memory rules some out; the last always fits.
inline Plan plan_tiles(Path path, const Extents& extents, const Machine& machine) {
  const std::vector<TileCost>& tiles = tiles_of(path);
  const std::int64_t unit = split_unit(path);
  const std::int64_t least =
      extents.shifts ? divided_up(extents.depth, kShiftedDepth) : std::int64_t(1);
  Plan best{path, -1, 0, 1, 0};
  double best_clocks = 0;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if (tiles[i].shared_bytes > machine.shared_bytes) {
      continue;
    }
    for (std::int64_t splits = least; splits <= std::max<std::int64_t>(least, 64); ++splits) {
      const std::int64_t depth =
          divided_up(divided_up(extents.depth, splits), unit) * unit;
      const std::int64_t used = divided_up(extents.depth, depth);
      const double clocks = plan_clocks(tiles[i], extents, machine, used, depth);
      if (best.tile < 0 || clocks < best_clocks) {
        best_clocks = clocks;
        best.tile = static_cast<int>(i);
        best.tiles = divided_up(extents.pixels, tiles[i].pixels) *
                     divided_up(extents.outputs, tiles[i].channels);
        best.splits = static_cast<int>(used);
        best.split_depth = static_cast<int>(depth);
      }
    }
  }
  return best;
}

// Whether tiles would be so empty that a lookup per product takes less. Rates are relative, per
// product: a lookup from L1 1, of tensor cores 300, of dp4a 30, of rows of a table 8.
inline bool prefers_direct(Path path, const Extents& extents) {
  const double rate = path == Path::kTensor ? 300 : path == Path::kDot ? 30 : 8;
  const TileCost& least = tiles_of(path).back();
  const double pixels =
      static_cast<double>(divided_up(extents.pixels, least.pixels)) * least.pixels;
  const double outputs =
      static_cast<double>(divided_up(extents.outputs, least.channels)) * least.channels;
  const double depth = static_cast<double>(divided_up(extents.depth, 16)) * 16;
  const double tiled = pixels * outputs * depth * extents.passes / rate;
  const double direct = static_cast<double>(extents.pixels) *
                        static_cast<double>(extents.outputs) *
                        static_cast<double>(extents.true_depth);
  return direct < tiled;
}

inline bool fits_grid(const Plan& plan, const Extents& extents) {
  return plan.tiles < (std::int64_t(1) << 31) && plan.splits < 65536 && extents.groups < 65536;
}

inline Plan direct_plan() { return {Path::kDirect, 0, 0, 1, 0}; }

inline Plan plan_of(Path path, const Extents& extents, const Machine& machine) {
  if (path == Path::kDirect || !extents.lowers) {
    return direct_plan();
  }
  const Plan plan = plan_tiles(path, extents, machine);
  return fits_grid(plan, extents) ? plan : direct_plan();
}

// What a product takes where nobody says: table or not.
inline Plan plan_automatically(bool table, const Extents& extents, const Machine& machine) {
  const Path path = table                      ? Path::kTable
                    : machine.capability >= 80 ? Path::kTensor
                                               : Path::kDot;
  return prefers_direct(path, extents) ? direct_plan() : plan_of(path, extents, machine);
}

// One sum of masked products: (sum >> shift) * coefficient. Masks are bytes, the first lowest.
struct FoldedSweep {
  std::uint64_t a_masks;
  std::uint64_t b_masks;
  int passes;
  std::int32_t coefficient;
  int shift;
};

constexpr int kPassesAtOnce = 8;

// Shifts are folded: as the lower bits of its mask are cleared, a factor shifted right is the masked
// code divided, without remainder, so that a term is coefficient / 2^shifts times a product of masked
// codes, each of 8 bits. Terms of one ratio share a sweep. No term is the exact product.
inline std::vector<FoldedSweep> fold(const std::vector<Term>& terms) {
  if (terms.empty()) {
    return {{0xff, 0xff, 1, 1, 0}};
  }
  std::vector<FoldedSweep> sweeps;
  for (const Term& term : terms) {
    const std::uint64_t a_mask = term.a_mask & 0xff & ~((1u << term.a_shift) - 1);
    const std::uint64_t b_mask = term.b_mask & 0xff & ~((1u << term.b_shift) - 1);
    if (a_mask == 0 || b_mask == 0 || term.coefficient == 0) {
      continue;
    }
    std::int32_t coefficient = term.coefficient;
    int shift = term.a_shift + term.b_shift;
    while (shift > 0 && coefficient % 2 == 0) {
      coefficient /= 2;
      --shift;
    }
    const auto same = [&](const FoldedSweep& sweep) {
      return sweep.coefficient == coefficient && sweep.shift == shift &&
             sweep.passes < kPassesAtOnce;
    };
    auto sweep = std::find_if(sweeps.begin(), sweeps.end(), same);
    if (sweep == sweeps.end()) {
      sweep = sweeps.insert(sweep, {0, 0, 0, coefficient, shift});
    }
    sweep->a_masks |= a_mask << (8 * sweep->passes);
    sweep->b_masks |= b_mask << (8 * sweep->passes);
    ++sweep->passes;
  }
  return sweeps;
}

// Without sweeps, by a table.
inline Extents extents_of(const Geometry& geometry, const std::vector<FoldedSweep>& sweeps) {
  Extents extents{geometry.pixels(),
                  geometry.group_outputs(),
                  padded_channels(geometry) * geometry.kernel_height * geometry.kernel_width,
                  geometry.depth(),
                  geometry.groups,
                  sweeps.empty() ? 1 : 0,
                  false,
                  lowers(geometry)};
  for (const FoldedSweep& sweep : sweeps) {
    extents.passes += sweep.passes;
    extents.shifts = extents.shifts || sweep.shift > 0;
  }
  return extents;
}

}  // namespace codes
}  // namespace narrowgauge
