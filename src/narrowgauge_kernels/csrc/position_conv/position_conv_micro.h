// Products of listed positions, written once for every vector unit. Included by one file per
// instruction set.
//
// `V` gives: Vector, kLanes, load, store, broadcast, zero, multiply_add(a, b, c) = a * b + c.
#pragma once

#include "position_conv/position_conv.h"

namespace narrowgauge {
namespace position_conv {
namespace {

// The loops over positions and vectors are unrolled by order: left to itself GCC 12 may keep the sums
// in memory, at less than half the speed.
//
// kVectors vectors of filters, from vector `first` of a panel on, for kRows positions.
template <typename V, int kVectors, int kRows, int kWidth>
inline void multiply_part(const Windows& windows, const float* panel, int first, float* sums) {
  using Vector = typename V::Vector;
  Vector sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = V::zero();
    }
  }
  const float* weight = panel + first * V::kLanes;
  for (std::int64_t t = 0; t < windows.tap_count; ++t) {
    const std::int64_t tap = windows.taps[t];
    const float* from[kRows];
    for (int r = 0; r < kRows; ++r) {
      from[r] = windows.at[r] + tap;
    }
    for (std::int64_t c = 0; c < windows.channels; ++c, weight += kWidth) {
      Vector row[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        row[v] = V::load(weight + v * V::kLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vector given = V::broadcast(from[r] + c);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = V::multiply_add(given, row[v], sum[r][v]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      V::store(sums + r * kWidth + (first + v) * V::kLanes, sum[r][v]);
    }
  }
}

// As many vectors at once as registers hold beside the others; a wider panel takes several turns.
template <typename V, int kVectors, int kRows, int kWidth>
void multiply(const Windows& windows, const float* panel, float* sums) {
  static_assert(kWidth % (kVectors * V::kLanes) == 0, "a panel is whole parts");
  static_assert(kRows <= kMostRows, "there are so many pointers");
  for (int first = 0; first < kWidth / V::kLanes; first += kVectors) {
    multiply_part<V, kVectors, kRows, kWidth>(windows, panel, first, sums);
  }
}

template <typename V>
float dot(const Windows& windows, const float* weight) {
  using Vector = typename V::Vector;
  constexpr int kVectors = kDotLanes / V::kLanes;
  Vector sum[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    sum[v] = V::zero();
  }
  float rest = 0.0f;
  const std::int64_t whole = windows.channels / kDotLanes * kDotLanes;
  for (std::int64_t t = 0; t < windows.tap_count; ++t, weight += windows.channels) {
    const float* from = windows.at[0] + windows.taps[t];
    for (std::int64_t c = 0; c < whole; c += kDotLanes) {
      for (int v = 0; v < kVectors; ++v) {
        const std::int64_t lane = c + v * V::kLanes;
        sum[v] = V::multiply_add(V::load(from + lane), V::load(weight + lane), sum[v]);
      }
    }
    for (std::int64_t c = whole; c < windows.channels; ++c) {
      rest = V::fused(from[c], weight[c], rest);
    }
  }
  float lanes[kDotLanes];
  for (int v = 0; v < kVectors; ++v) {
    V::store(lanes + v * V::kLanes, sum[v]);
  }
  for (const float lane : lanes) {
    rest += lane;
  }
  return rest;
}

}  // namespace
}  // namespace position_conv
}  // namespace narrowgauge
