// The checks of the wire operators, and where a tensor's channels are in order of memory. Shared by
// CPU and CUDA.
#pragma once

#include <cstdint>

#include "common/torch_tensor.h"

namespace narrowgauge {
namespace wire {

// `samples` times `channels` times `spatial` elements. With `rows`, the channel is the innermost:
// element i in order of memory is of channel i % channels, else of (i / spatial) % channels. Its
// index, which draws go by, is that of [samples, channels, spatial] either way.
struct Order {
  std::int64_t samples;
  std::int64_t channels;
  std::int64_t spatial;
  bool rows;
};

inline at::MemoryFormat channels_last_of(const at::Tensor& x) {
  return x.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
}

inline bool is_channels_last(const at::Tensor& x) {
  return (x.dim() == 4 || x.dim() == 5) && x.is_contiguous(channels_last_of(x));
}

inline bool has_order(const at::Tensor& x) { return x.is_contiguous() || is_channels_last(x); }

// Of a tensor that `has_order`. One channel is one long run, and so are rows of one element.
inline Order order_of(const at::Tensor& x) {
  const std::int64_t samples = x.size(0);
  const std::int64_t channels = x.size(1);
  const std::int64_t spatial = x.numel() == 0 ? 0 : x.numel() / (samples * channels);
  if (!x.is_contiguous()) {
    return {samples, channels, spatial, true};
  }
  if (channels == 1) {
    return {1, 1, x.numel(), false};
  }
  return {samples, channels, spatial, spatial == 1};
}

// x itself, or gathered, so that element i in order of memory is that of `like`.
inline at::Tensor ordered_as(const at::Tensor& x, const at::Tensor& like) {
  return like.is_contiguous() ? x.contiguous() : x.contiguous(channels_last_of(like));
}

inline bool is_narrow_float(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

// Of both directions: `wide` is x or out.
inline void check_both(const char* operation, const char* name, const at::Tensor& wide,
                       const at::Tensor& values, const at::Tensor& scale) {
  TORCH_CHECK(is_narrow_float(wide.scalar_type()), operation, ": ", name, " is ",
              wide.scalar_type(), "; it must be float32, float16 or bfloat16");
  TORCH_CHECK(wide.dim() >= 2, operation, ": ", name, " has shape ", wide.sizes(),
              "; it must be [B, C, ...]");
  TORCH_CHECK(values.scalar_type() == at::kChar, operation, ": values is ", values.scalar_type(),
              "; it must be ", at::kChar);
  TORCH_CHECK(values.sizes() == wide.sizes(), operation, ": values has shape ", values.sizes(),
              " and ", name, " has shape ", wide.sizes(), "; they must be equal");
  TORCH_CHECK(scale.scalar_type() == at::kFloat, operation, ": scale is ", scale.scalar_type(),
              "; it must be ", at::kFloat);
  TORCH_CHECK(scale.dim() == 1 && scale.size(0) == wide.size(1), operation, ": scale has shape ",
              scale.sizes(), " and ", name, " has shape ", wide.sizes(), "; it must be [",
              wide.size(1), "]");
}

inline void check_written(const char* operation, const char* name, const at::Tensor& written) {
  TORCH_CHECK(has_order(written), operation, ": ", name, " has shape ", written.sizes(),
              " and strides ", written.strides(), "; it must be contiguous or channels_last");
}

inline void check_pack(const at::Tensor& x, std::int64_t first, const at::Tensor& values,
                       const at::Tensor& scale) {
  check_both("pack_int8", "x", x, values, scale);
  check_written("pack_int8", "values", values);
  check_written("pack_int8", "scale", scale);
  TORCH_CHECK(first >= 0, "pack_int8: first=", first, "; an index is not negative");
}

inline void check_unpack(const at::Tensor& values, const at::Tensor& scale,
                         const at::Tensor& out) {
  check_both("unpack_int8", "out", out, values, scale);
  check_written("unpack_int8", "out", out);
}

inline void check_copy(const at::Tensor& x, const at::Tensor& out) {
  TORCH_CHECK(x.scalar_type() == out.scalar_type(), "mapped_copy: x is ", x.scalar_type(),
              " and out is ", out.scalar_type(), "; they must be equal");
  TORCH_CHECK(x.sizes() == out.sizes(), "mapped_copy: x has shape ", x.sizes(),
              " and out has shape ", out.sizes(), "; they must be equal");
  TORCH_CHECK(x.is_non_overlapping_and_dense() && (x.strides() == out.strides() ||
                                                   (x.is_contiguous() && out.is_contiguous())),
              "mapped_copy: x has strides ", x.strides(), " and out has strides ", out.strides(),
              "; they must be equal and without gaps");
}

}  // namespace wire
}  // namespace narrowgauge
