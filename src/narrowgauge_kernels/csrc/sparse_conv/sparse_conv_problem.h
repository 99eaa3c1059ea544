// The checks of the sparse convolution, and its tensors as the loops take them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "manual/manual_extent.h"
#include "sparse_conv/sparse_conv_tiles.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace sparse_conv {

using Sizes = std::vector<std::int64_t>;

struct Window {
  Sizes stride;
  Sizes padding;
};

// x is contiguous or channels_last, and out is like it. `packed` is the weight as Packing has it.
struct Problem {
  at::Tensor x;
  at::Tensor packed;
  at::Tensor bias;
  at::Tensor out;
  Window window;
  bool channels_last;
  bool relu_input;
  bool relu_output;
};

inline void check_tensor(const char* name, const at::Tensor& tensor, std::int64_t dimensions,
                         const at::Tensor& x) {
  TORCH_CHECK(tensor.device() == x.device(), "sparse_conv2d: ", name, " is on ", tensor.device(),
              " but x is on ", x.device());
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, "sparse_conv2d: ", name, " is ",
              tensor.scalar_type(), "; it must be float32");
  TORCH_CHECK(tensor.dim() == dimensions, "sparse_conv2d: ", name, " has shape ", tensor.sizes(),
              "; it needs ", dimensions, " dimensions");
}

inline void check_pair(const char* name, const Sizes& pair, std::int64_t least) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  TORCH_CHECK(pair.size() == 2, "sparse_conv2d: ", name, " has ", pair.size(),
              " numbers; it needs two, (height, width)");
  for (const std::int64_t each : pair) {
    TORCH_CHECK(each >= least && each <= kMost, "sparse_conv2d: ", name, " is ", each,
                "; it must be from ", least, " to ", kMost);
  }
}

inline std::int64_t result_length(const at::Tensor& x, const at::Tensor& weight,
                                  const Window& window, int axis) {
  const std::int64_t room = x.size(2 + axis) + 2 * window.padding[axis] - weight.size(2 + axis);
  TORCH_CHECK(room >= 0, "sparse_conv2d: x of shape ", x.sizes(), " with padding ",
              window.padding[axis], " is smaller than the window of a weight of shape ",
              weight.sizes());
  return room / window.stride[axis] + 1;
}

// Checks, and gives the shape of the result.
inline Sizes result_sizes(const at::Tensor& x, const at::Tensor& weight,
                          const c10::optional<at::Tensor>& bias, const Window& window) {
  check_tensor("x", x, 4, x);
  check_tensor("weight", weight, 4, x);
  TORCH_CHECK(x.size(1) == weight.size(1), "sparse_conv2d: x has shape ", x.sizes(),
              " and weight has shape ", weight.sizes(),
              "; x[B, C, H, W] and weight[F, C, kh, kw] must agree in C");
  TORCH_CHECK(weight.size(2) > 0 && weight.size(3) > 0, "sparse_conv2d: weight of shape ",
              weight.sizes(), " has no window");
  if (bias.has_value()) {
    check_tensor("bias", *bias, 1, x);
    TORCH_CHECK(bias->size(0) == weight.size(0), "sparse_conv2d: bias has shape ", bias->sizes(),
                " but there are ", weight.size(0), " filters");
  }
  check_pair("stride", window.stride, 1);
  check_pair("padding", window.padding, 0);
  Sizes sizes = {x.size(0), weight.size(0), result_length(x, weight, window, 0),
                 result_length(x, weight, window, 1)};
  check_extent("sparse_conv2d", sizes, sizeof(float));
  return sizes;
}

inline bool is_channels_last(const at::Tensor& x) {
  return x.is_contiguous(at::MemoryFormat::ChannelsLast) && !x.is_contiguous();
}

inline at::Tensor empty_result(const at::Tensor& x, const Sizes& sizes) {
  const auto format =
      is_channels_last(x) ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  return at::empty(sizes, x.options().memory_format(format));
}

// A window of one pixel with a stride reads a part of the map only; lists are made of that part.
inline at::Tensor read_part(const at::Tensor& x, const at::Tensor& weight, Window* window) {
  at::Tensor part = x;
  for (int axis = 0; axis < 2; ++axis) {
    if (weight.size(2 + axis) == 1 && window->padding[axis] == 0 && window->stride[axis] > 1) {
      part = part.slice(2 + axis, 0, part.size(2 + axis), window->stride[axis]);
      window->stride[axis] = 1;
    }
  }
  return part;
}

inline Packing packing_of(const at::Tensor& weight) {
  return Packing(weight.size(0), weight.size(1), weight.size(2) * weight.size(3));
}

inline void check_packed(const at::Tensor& packed, const at::Tensor& weight) {
  check_tensor("packed", packed, 1, weight);
  TORCH_CHECK(packed.numel() == packing_of(weight).floats() && packed.is_contiguous(),
              "sparse_conv2d: packed has ", packed.numel(), " numbers and is not what sparse_pack "
              "gives for a weight of shape ", weight.sizes());
}

inline Problem problem(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& packed,
                       const c10::optional<at::Tensor>& bias, Window window, bool relu_input,
                       bool relu_output) {
  const Sizes sizes = result_sizes(x, weight, bias, window);
  check_packed(packed, weight);
  const bool last = is_channels_last(x);
  const auto format = last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  const at::Tensor out = empty_result(x, sizes);
  const at::Tensor given = read_part(x, weight, &window).contiguous(format);
  return {given,  packed, bias.has_value() ? bias->contiguous() : at::Tensor(), out,
          window, last,   relu_input, relu_output};
}

}  // namespace sparse_conv
}  // namespace narrowgauge
