// What a manual convolution is, and what its kernels are given. C++14 without a header of the toolkit, so
// that device code, launchers and tests of the host share it.
#pragma once

namespace narrowgauge {
namespace manual_float {

// One forward convolution; a linear layer is one of 1 x 1 with a row for an image. `channels` and
// `filters` are those of one group. Strides are in elements; x's and weight's may be any, 0 too.
struct Convolution {
  long long batch;
  long long groups;
  long long channels;
  long long filters;
  long long high;  // of x
  long long wide;
  long long taps_high;  // of weight
  long long taps_wide;
  long long out_high;
  long long out_wide;
  long long stride_high;
  long long stride_wide;
  long long padding_high;
  long long padding_wide;
  long long dilation_high;
  long long dilation_wide;
  long long x_batch;  // strides
  long long x_channel;
  long long x_high;
  long long x_wide;
  long long weight_filter;
  long long weight_channel;
  long long weight_high;
  long long weight_wide;
  bool out_channels_last;  // else out is contiguous
};

#if defined(__CUDACC__)
#define MANUAL_BOTH inline __host__ __device__
#else
#define MANUAL_BOTH inline
#endif

MANUAL_BOTH long long divide_up(long long value, long long by) { return (value + by - 1) / by; }

// As a product of matrices, of one group: rows (pixels) x depth times depth x filters.
MANUAL_BOTH long long out_area(const Convolution& conv) { return conv.out_high * conv.out_wide; }
MANUAL_BOTH long long rows_of(const Convolution& conv) { return conv.batch * out_area(conv); }
MANUAL_BOTH long long depth_of(const Convolution& conv) {
  return conv.channels * conv.taps_high * conv.taps_wide;
}
MANUAL_BOTH long long out_count(const Convolution& conv) {
  return rows_of(conv) * conv.groups * conv.filters;
}

// How a tile of x comes to shared memory.
enum class Loader : int {
  kRows,    // neighbouring threads take neighbouring pixels, 4 bytes each
  kQuads,   // the same with 16 bytes: 1 x 1, stride 1, no padding, planes of a multiple of 4
  kDepth,   // neighbouring threads go along the depth: channels last, and linear
};

// A block computes rows x filters outputs; a thread 8 x `own` of them.
struct Tile {
  int rows;
  int filters;
  int own;
};

enum class TileKind : int { kDirect, k128x128, k128x64, k128x32, k64x64, kHeavy128x64, kHeavy64x32 };

constexpr int kStep = 8;             // depth of a chunk
constexpr int kStages = 4;           // chunks in flight
constexpr int kMostTaps = 15;        // along one side: half a word has a bit for each, and one more

MANUAL_BOTH constexpr Tile tile_of(TileKind kind) {
  return kind == TileKind::k128x128       ? Tile{128, 128, 8}
         : kind == TileKind::k128x64      ? Tile{128, 64, 8}
         : kind == TileKind::k128x32      ? Tile{128, 32, 4}
         : kind == TileKind::k64x64       ? Tile{64, 64, 4}
         : kind == TileKind::kHeavy128x64 ? Tile{128, 64, 4}
         : kind == TileKind::kHeavy64x32  ? Tile{64, 32, 4}
                                          : Tile{0, 0, 0};
}

MANUAL_BOTH constexpr int threads_of(const Tile& tile) {
  return tile.rows / 8 * (tile.filters / tile.own);
}

struct Plan {
  TileKind tile;
  Loader loader;
  bool channels_inside;  // depth counts taps, then channels; else channels, then taps
  bool quads_out;        // 16-byte stores along whichever dimension of out is contiguous
  int splits;            // of the depth; above 1, a workspace of splits * out_count floats
  long long chunks;      // of a split
  long long blocks;
};

// What a kernel is given.
struct Task {
  Convolution conv;
  Plan plan;
  const float* x;
  const float* weight;
  const float* bias;  // of all filters of all groups, or null
  float* out;
  float* partial;     // splits * out_count floats where the depth is split
  unsigned int kept;  // the mask of Truncated
  bool prepares;      // false for ExactFp32, which otherwise is Truncated
};

}  // namespace manual_float
}  // namespace narrowgauge
