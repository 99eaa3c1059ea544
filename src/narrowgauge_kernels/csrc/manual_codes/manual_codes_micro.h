// The bodies of the kernels of products and tables over a vector type. Included once by each
// manual_codes_<instructions>.cpp; the anonymous namespace is load-bearing, as in
// manual_codes_expand.h.
#pragma once

#include <cstdint>

#include "manual_codes/manual_codes_product.h"
#include "manual_codes/manual_codes_table.h"

namespace narrowgauge {
namespace codes {
namespace {

// Lanes: Operand, Vector of kLanes sums, zero(), load(units), broadcast(unit), multiply_add(left,
// right, sum), accumulate(tile, sum, coefficient), which adds coefficient * sum to kLanes numbers.
// Unrolled by pragma: GCC otherwise keeps the array of sums in memory.
template <typename Lanes, int Rows, int Vectors>
void product_tile(std::int64_t units, const std::uint32_t* left, std::int64_t left_stride,
                  const std::uint32_t* right, std::int32_t* tile, std::int64_t tile_stride,
                  std::int32_t coefficient) {
  typename Lanes::Vector sums[Rows * Vectors];
#pragma GCC unroll 32
  for (int i = 0; i < Rows * Vectors; ++i) {
    sums[i] = Lanes::zero();
  }
  for (std::int64_t unit = 0; unit < units; ++unit, right += Vectors * Lanes::kLanes) {
    typename Lanes::Operand operand[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      operand[v] = Lanes::load(right + v * Lanes::kLanes);
    }
#pragma GCC unroll 32
    for (int i = 0; i < Rows * Vectors; ++i) {
      const typename Lanes::Operand factor =
          Lanes::broadcast(left + i / Vectors * left_stride + unit);
      sums[i] = Lanes::multiply_add(factor, operand[i % Vectors], sums[i]);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < Rows * Vectors; ++i) {
    Lanes::accumulate(tile + i / Vectors * tile_stride + i % Vectors * Lanes::kLanes, sums[i],
                      coefficient);
  }
}

template <typename Lanes, int Pixels>
void lane_tile(std::int64_t units, const std::uint32_t* left, const std::int64_t* offsets,
               const std::uint32_t* right, std::int64_t width, std::int32_t* tile,
               std::int32_t coefficient) {
  typename Lanes::Vector sums[Pixels];
#pragma GCC unroll 8
  for (int pixel = 0; pixel < Pixels; ++pixel) {
    sums[pixel] = Lanes::zero();
  }
  for (std::int64_t unit = 0; unit < units; ++unit, right += width) {
    const typename Lanes::Operand factor = Lanes::load(right);
    const std::uint32_t* const from = left + offsets[unit];
#pragma GCC unroll 8
    for (int pixel = 0; pixel < Pixels; ++pixel) {
      sums[pixel] = Lanes::multiply_add(Lanes::load(from + pixel * width), factor, sums[pixel]);
    }
  }
#pragma GCC unroll 8
  for (int pixel = 0; pixel < Pixels; ++pixel) {
    Lanes::accumulate(tile + pixel * width, sums[pixel], coefficient);
  }
}

template <typename Lanes>
void lane_products(std::int64_t units, const std::uint32_t* left, const std::int64_t* offsets,
                   const std::uint32_t* right, std::int64_t width, std::int64_t pixels,
                   std::int32_t* tile, std::int32_t coefficient) {
  constexpr int kPixels = 4;
  for (std::int64_t lane = 0; lane < width; lane += Lanes::kLanes) {
    std::int64_t pixel = 0;
    for (; pixel + kPixels <= pixels; pixel += kPixels) {
      const std::int64_t at = pixel * width + lane;
      lane_tile<Lanes, kPixels>(units, left + at, offsets, right + lane, width, tile + at,
                                coefficient);
    }
    for (; pixel < pixels; ++pixel) {
      const std::int64_t at = pixel * width + lane;
      lane_tile<Lanes, 1>(units, left + at, offsets, right + lane, width, tile + at, coefficient);
    }
  }
}

template <typename Lanes>
std::uint32_t dot_product(std::int64_t units, const std::uint32_t* left,
                          const std::uint32_t* right) {
  constexpr int kLanes = Lanes::kLanes;
  typename Lanes::Vector even = Lanes::zero();
  typename Lanes::Vector odd = Lanes::zero();
  std::int64_t unit = 0;
  for (; unit + 2 * kLanes <= units; unit += 2 * kLanes) {
    even = Lanes::multiply_add(Lanes::load(left + unit), Lanes::load(right + unit), even);
    odd = Lanes::multiply_add(Lanes::load(left + unit + kLanes),
                              Lanes::load(right + unit + kLanes), odd);
  }
  if (unit < units) {
    even = Lanes::multiply_add(Lanes::load(left + unit), Lanes::load(right + unit), even);
  }
  std::int32_t sums[kLanes] = {};
  Lanes::accumulate(sums, even, 1);
  Lanes::accumulate(sums, odd, 1);
  std::uint32_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    total += static_cast<std::uint32_t>(sums[lane]);
  }
  return total;
}

// Words: Vector of kLanes uint16, load, store, add, upper (each lane's upper byte), and
// transpose8x8(from, from_stride, to, to_stride) of uint16.
template <typename Words>
void table_expand(const std::uint16_t* plane, const std::uint8_t* codes, std::int64_t stride,
                  std::uint16_t* to) {
  for (int first = 0; first < Words::kLanes; first += 8) {
    const std::uint16_t* rows[8];
    for (int lane = 0; lane < 8; ++lane) {
      rows[lane] = plane + codes[(first + lane) * stride] * kTableEntries;
    }
    for (int a = 0; a < kTableEntries; a += 8) {
      Words::transpose8x8(rows, a, to + a * Words::kLanes + first, Words::kLanes);
    }
  }
}

template <typename Words>
void table_sweep(std::int64_t count, const std::uint8_t* indices, const std::uint16_t* expanded,
                 std::uint16_t* sums) {
  constexpr int kLanes = Words::kLanes;
  for (std::int64_t row = 0; row < count; ++row, indices += kTableStep, sums += 2 * kLanes) {
    typename Words::Vector sum = Words::load(sums);
    typename Words::Vector upper = Words::load(sums + kLanes);
    for (int step = 0; step < kTableStep; ++step) {
      const typename Words::Vector products =
          Words::load(expanded + (step * kTableEntries + indices[step]) * kLanes);
      sum = Words::add(sum, products);
      upper = Words::add(upper, Words::upper(products));
    }
    Words::store(sums, sum);
    Words::store(sums + kLanes, upper);
  }
}

// Left to the compiler: once per kTableDepth products.
template <int Lanes>
void table_flush(std::int64_t count, std::uint16_t* __restrict sums, int shift,
                 std::int32_t* __restrict wide) {
  for (std::int64_t row = 0; row < count; ++row, sums += 2 * Lanes, wide += Lanes) {
    for (int lane = 0; lane < Lanes; ++lane) {
      const std::uint32_t upper = sums[Lanes + lane];
      const std::uint32_t lower = (sums[lane] - (upper << 8)) & 0xFFFFu;
      const std::uint32_t sum = ((upper << 8) + lower) << shift;
      wide[lane] = static_cast<std::int32_t>(static_cast<std::uint32_t>(wide[lane]) + sum);
      sums[lane] = 0;
      sums[Lanes + lane] = 0;
    }
  }
}

template <typename Words>
TableKernel make_table_kernel() {
  return {Words::kLanes, &table_expand<Words>, &table_sweep<Words>, &table_flush<Words::kLanes>};
}

}  // namespace
}  // namespace codes
}  // namespace narrowgauge
