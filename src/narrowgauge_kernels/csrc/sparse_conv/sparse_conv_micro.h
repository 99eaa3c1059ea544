// Loops over lists, written once for every vector unit. Included by one file per instruction set.
//
// `V` gives: Vector, kLanes, load, store, broadcast, zero, add, multiply_add(a, b, c) = a * b + c.
#pragma once

#include <cstdint>
#include <cstring>

#include "sparse_conv/sparse_conv.h"

namespace narrowgauge {
namespace sparse_conv {
namespace {

template <int kScale>
inline const float* row_at(const char* panel, std::uint32_t offset) {
  return reinterpret_cast<const float*>(panel + static_cast<std::uint64_t>(offset) * kScale);
}

// One list and kVectors vectors of filters, in registers from its first entry to its last.
template <typename V, int kVectors, int kWidth>
inline void visit_part(const float* values, const std::int32_t* offsets, std::int64_t count,
                       const char* panel, float* sums) {
  using Vector = typename V::Vector;
  constexpr int kScale = kWidth / kGrain;
  Vector even[kVectors];
  Vector odd[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    even[v] = V::load(sums + v * V::kLanes);
    odd[v] = V::zero();
  }
  for (std::int64_t i = 0; i < count; i += 2) {
    // Both offsets by one load: loads are what there are most of.
    std::uint64_t pair;
    std::memcpy(&pair, offsets + i, sizeof(pair));
    const Vector first = V::broadcast(values + i);
    const Vector second = V::broadcast(values + i + 1);
    const float* row = row_at<kScale>(panel, static_cast<std::uint32_t>(pair));
    const float* next = row_at<kScale>(panel, static_cast<std::uint32_t>(pair >> 32));
    for (int v = 0; v < kVectors; ++v) {
      even[v] = V::multiply_add(first, V::load(row + v * V::kLanes), even[v]);
      odd[v] = V::multiply_add(second, V::load(next + v * V::kLanes), odd[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    V::store(sums + v * V::kLanes, V::add(even[v], odd[v]));
  }
}

// kVectors: as many as the registers hold twice; a wider block takes several turns at the list.
template <typename V, int kVectors, int kWidth>
void visit(const Lists& lists, const float* panel, std::int64_t first, std::int64_t step,
           std::int64_t count, float* sums) {
  constexpr int kPart = kVectors * V::kLanes;
  static_assert(kWidth % kPart == 0, "a block is whole parts");
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t list = first + i * step;
    const std::int64_t begin = lists.starts[list];
    const std::int64_t length = lists.starts[list + 1] - begin;
    if (length == 0) {
      continue;
    }
    for (int part = 0; part < kWidth; part += kPart) {
      visit_part<V, kVectors, kWidth>(lists.values + begin, lists.offsets + begin, length,
                                      reinterpret_cast<const char*>(panel + part),
                                      sums + i * kWidth + part);
    }
  }
}

// Makes the length of the list that ends at `end` even; the new end.
inline std::int64_t closed(const Lists& lists, std::int64_t begin, std::int64_t end, int channels) {
  lists.values[end] = 0.0f;
  lists.offsets[end] = channels * kGrainBytes;
  return end + ((end - begin) & 1);
}

// `Compress` appends the nonzeros of contiguous channels and returns the new end.
template <typename Compress>
inline void build_contiguous(const Map& map, std::int64_t pixels, const Slice& slice,
                             std::int64_t first, const Lists& lists, const Compress& compress) {
  std::int64_t end = lists.starts[first];
  for (std::int64_t p = 0; p < pixels; ++p) {
    const std::int64_t begin = end;
    const float* from = map.from + p * map.pixel_stride;
    end = compress(from, slice.channels, lists.values, lists.offsets, end);
    lists.starts[first + p + 1] = end = closed(lists, begin, end, slice.channels);
  }
}

// Eight pixels at a time are turned so that their channels are contiguous: `turn` does this for
// eight channels of eight pixels, [8][from_stride] -> [8][to_stride].
template <typename Compress, typename Turn>
inline void build_turned(const Map& map, std::int64_t pixels, const Slice& slice,
                         std::int64_t first, const Lists& lists, float* scratch,
                         const Compress& compress, const Turn& turn) {
  const int stride = (slice.channels + 15) / 16 * 16;
  for (std::int64_t p = 0; p < pixels; p += 8) {
    const int count = static_cast<int>(pixels - p < 8 ? pixels - p : 8);
    int c = 0;
    for (; count == 8 && c + 8 <= slice.channels; c += 8) {
      turn(map.from + c * map.channel_stride + p, map.channel_stride, scratch + c, stride);
    }
    for (; c < slice.channels; ++c) {
      for (int i = 0; i < count; ++i) {
        scratch[i * stride + c] = map.from[c * map.channel_stride + p + i];
      }
    }
    const Map turned = {scratch, 1, stride};
    build_contiguous(turned, count, slice, first + p, lists, compress);
  }
}

// Without a branch on the value: half of the branches would be guessed wrong.
template <bool kRelu>
inline std::int64_t append_scalar(const float* from, int begin, int end, float* values,
                                  std::int32_t* offsets, std::int64_t at) {
  for (int c = begin; c < end; ++c) {
    values[at] = from[c];
    offsets[at] = c * kGrainBytes;
    at += kRelu ? !(from[c] <= 0.0f) : from[c] != 0.0f;
  }
  return at;
}

template <bool kRelu>
inline std::int64_t count_scalar(const float* from, std::int64_t begin, std::int64_t end) {
  std::int64_t zeros = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    zeros += kRelu ? from[i] <= 0.0f : from[i] == 0.0f;
  }
  return zeros;
}

template <template <bool> class Compress, typename Turn>
void build_lists(const Map& map, std::int64_t pixels, const Slice& slice, std::int64_t first,
                 const Lists& lists, float* scratch) {
  const bool contiguous = map.channel_stride == 1;
  if (contiguous && slice.relu) {
    build_contiguous(map, pixels, slice, first, lists, Compress<true>());
  } else if (contiguous) {
    build_contiguous(map, pixels, slice, first, lists, Compress<false>());
  } else if (slice.relu) {
    build_turned(map, pixels, slice, first, lists, scratch, Compress<true>(), Turn());
  } else {
    build_turned(map, pixels, slice, first, lists, scratch, Compress<false>(), Turn());
  }
}

template <bool kRelu>
struct CompressScalar {
  std::int64_t operator()(const float* from, int channels, float* values, std::int32_t* offsets,
                          std::int64_t at) const {
    return append_scalar<kRelu>(from, 0, channels, values, offsets, at);
  }
};

struct TurnScalar {
  void operator()(const float* from, std::int64_t from_stride, float* to,
                  std::int64_t to_stride) const {
    for (int c = 0; c < 8; ++c) {
      for (int p = 0; p < 8; ++p) {
        to[p * to_stride + c] = from[c * from_stride + p];
      }
    }
  }
};

template <typename Turn>
void finish_sums(float* sums, std::int64_t pixels, int width, int filled, const Result& result) {
  for (std::int64_t p = 0; p < pixels; ++p) {
    float* at = sums + p * width;
    for (int f = 0; f < width; ++f) {
      const float value = at[f] + result.bias[f];
      // NaN is not below zero, and stays.
      at[f] = result.relu && value <= 0.0f ? 0.0f : value;
    }
  }
  const bool together = result.filter_stride == 1;
  const std::int64_t turned = together ? 0 : pixels / 8 * 8;
  const int whole = filled / 8 * 8;
  for (std::int64_t p = 0; p < turned; p += 8) {
    for (int f = 0; f < whole; f += 8) {
      Turn()(sums + p * width + f, width, result.to + p + f * result.filter_stride,
             result.filter_stride);
    }
  }
  for (std::int64_t p = 0; p < pixels; ++p) {
    for (int f = p < turned ? whole : 0; f < filled; ++f) {
      result.to[p * result.pixel_stride + f * result.filter_stride] = sums[p * width + f];
    }
  }
}

inline std::int64_t zeros_scalar(const float* from, std::int64_t count, bool relu) {
  return relu ? count_scalar<true>(from, 0, count) : count_scalar<false>(from, 0, count);
}

}  // namespace
}  // namespace sparse_conv
}  // namespace narrowgauge
