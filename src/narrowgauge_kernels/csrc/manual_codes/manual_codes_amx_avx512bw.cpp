// AMX: eight tiles of 16 rows of 64 bytes, so 2 × 2 accumulators, two left and two right operands.
#if !defined(NARROWGAUGE_STAND_INS)
#pragma GCC target("avx512f,avx512bw,amx-tile,amx-int8")
#endif
#include "manual_codes/manual_codes_amx.h"

#if defined(NARROWGAUGE_HAS_AMX)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace narrowgauge {
namespace codes {
namespace {

constexpr int kTileRows = 16;
constexpr int kRows = 2 * kTileRows;
constexpr int kColumns = 2 * kTileRows;
constexpr int kUnits = 16;  // of a left tile's row, and rows of a right tile
constexpr int kUnitBytes = 4;

struct alignas(64) TileConfiguration {
  std::uint8_t palette;
  std::uint8_t start_row;
  std::uint8_t reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

constexpr TileConfiguration kConfiguration = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Memory that the intrinsics below read is written before this line: their asm does not say so.
inline void written(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// Gives this thread the tiles; whoever configured them before (oneDNN does) finds that again.
void begin(KernelState* before) {
  static_assert(sizeof(KernelState) == sizeof(TileConfiguration), "64 bytes");
  written(before);
  _tile_storeconfig(before);
  written(&kConfiguration);
  _tile_loadconfig(&kConfiguration);
}

void end(const KernelState* before) {
  if (before->bytes[0] == 0) {  // the palette: there were none
    _tile_release();
    return;
  }
  written(before);
  _tile_loadconfig(before);
}

// Tiles 0-3 are sums, 4 and 5 left, 6 and 7 right; strides in bytes.
inline void step(const std::uint32_t* left, std::int64_t left_stride, const std::uint32_t* right) {
  const std::uint32_t* lower = left + kTileRows * (left_stride / kUnitBytes);
  _tile_loadd(4, left, left_stride);
  _tile_loadd(6, right, kColumns * kUnitBytes);
  _tile_dpbusd(0, 4, 6);
  _tile_loadd(7, right + kTileRows, kColumns * kUnitBytes);
  _tile_dpbusd(1, 4, 7);
  _tile_loadd(5, lower, left_stride);
  _tile_dpbusd(2, 5, 6);
  _tile_dpbusd(3, 5, 7);
}

// The last units of a row, fewer than a tile has, filled up with zeros.
void step_rest(std::int64_t units, const std::uint32_t* left, std::int64_t left_stride,
               const std::uint32_t* right) {
  alignas(64) std::uint32_t left_rest[kRows * kUnits] = {};
  alignas(64) std::uint32_t right_rest[kUnits * kColumns] = {};
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(left_rest + row * kUnits, left + row * left_stride, units * kUnitBytes);
  }
  std::memcpy(right_rest, right, units * kColumns * kUnitBytes);
  written(left_rest);
  written(right_rest);
  step(left_rest, kUnits * kUnitBytes, right_rest);
}

void steps(std::int64_t units, const std::uint32_t* left, std::int64_t left_stride,
           const std::uint32_t* right) {
  std::int64_t unit = 0;
  for (; unit + kUnits <= units; unit += kUnits) {
    step(left + unit, left_stride * kUnitBytes, right + unit * kColumns);
  }
  if (unit < units) {
    step_rest(units - unit, left + unit, left_stride, right + unit * kColumns);
  }
}

void store_sums(std::int32_t* to, std::int64_t stride) {
  std::int32_t* lower = to + kTileRows * stride;
  _tile_stored(0, to, stride * kUnitBytes);
  _tile_stored(1, to + kTileRows, stride * kUnitBytes);
  _tile_stored(2, lower, stride * kUnitBytes);
  _tile_stored(3, lower + kTileRows, stride * kUnitBytes);
  written(to);
}

// unverified: AMX sums added where they lie | AVX2 at hand; run on stand-ins of its instructions | on such a host: pytest tests/kernels/test_codes.py
// Products are added to the sums where these lie: of few units the rest would take longer.
void add_product(std::int64_t units, const std::uint32_t* left, std::int64_t left_stride,
                 const std::uint32_t* right, std::int32_t* tile, std::int64_t tile_stride) {
  const std::int32_t* lower = tile + kTileRows * tile_stride;
  written(tile);
  _tile_loadd(0, tile, tile_stride * kUnitBytes);
  _tile_loadd(1, tile + kTileRows, tile_stride * kUnitBytes);
  _tile_loadd(2, lower, tile_stride * kUnitBytes);
  _tile_loadd(3, lower + kTileRows, tile_stride * kUnitBytes);
  steps(units, left, left_stride, right);
  store_sums(tile, tile_stride);
}

void product(std::int64_t units, const std::uint32_t* left, std::int64_t left_stride,
             const std::uint32_t* right, std::int32_t* tile, std::int64_t tile_stride,
             std::int32_t coefficient) {
  if (coefficient == 1) {
    add_product(units, left, left_stride, right, tile, tile_stride);
    return;
  }
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  steps(units, left, left_stride, right);
  alignas(64) std::int32_t sums[kRows * kColumns];
  store_sums(sums, kColumns);
  for (int row = 0; row < kRows; ++row) {
    std::int32_t* __restrict to = tile + row * tile_stride;
    for (int column = 0; column < kColumns; ++column) {
      to[column] = static_cast<std::int32_t>(
          static_cast<std::uint32_t>(to[column]) +
          static_cast<std::uint32_t>(coefficient) *
              static_cast<std::uint32_t>(sums[row * kColumns + column]));
    }
  }
}

}  // namespace

ProductKernel amx_kernel() {
  // Packed as for VNNI, whose kernels form what tiles are too large for.
  ProductKernel made = ProductKernel::avx512vnni();
  made.rows = kRows;
  made.columns = kColumns;
  made.run = &product;
  made.begin = &begin;
  made.end = &end;
  return made;
}

bool ask_for_amx() {
  // Of arch_prctl: the tiles' data are state 18 of xsave, which Linux gives a process that asks.
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace codes
}  // namespace narrowgauge

#endif
