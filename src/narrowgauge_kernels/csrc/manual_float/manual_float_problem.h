// The checks of the manual operators, and the Problem of one call. Shared by CPU and CUDA.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "manual/manual_extent.h"
#include "manual_float/manual_float.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace manual {

using Sizes = std::vector<std::int64_t>;

// A call's policy: `kept` is the mask of Truncated (manual_mac.h), `library` is of kCustom.
struct Choice {
  Policy policy;
  unsigned int kept;
  std::string library;
};

inline Choice choice_of(const char* op, const std::string& mac, std::int64_t bits,
                        const std::string& library) {
  static const char* const kNames[] = {"exact_fp32", "axfpm_faithful", "axfpm_fixed", "axbf16",
                                       "truncated",  "mitchell",       "custom"};
  for (int index = 0; index <= static_cast<int>(Policy::kCustom); ++index) {
    if (mac != kNames[index]) {
      continue;
    }
    const Policy policy = static_cast<Policy>(index);
    const bool truncated = policy == Policy::kTruncated;
    TORCH_CHECK(truncated ? bits >= 1 && bits <= 23 : bits == 0, op, ": bits is ", bits, " for '",
                mac, "'; truncated takes 1 to 23 and every other policy 0");
    TORCH_CHECK((policy == Policy::kCustom) != library.empty(), op, ": library is '", library,
                "' for '", mac, "'; custom needs one and no other policy takes one");
    return {policy, truncated ? 0xffffffffu << (23 - bits) : 0xffffffffu, library};
  }
  TORCH_CHECK(false, op, ": no MAC policy '", mac, "' for float32");
}

inline void check_float(const char* op, const char* name, const at::Tensor& tensor,
                        std::int64_t dimensions, const at::Tensor& x) {
  TORCH_CHECK(tensor.device() == x.device(), op, ": ", name, " is on ", tensor.device(),
              " but x is on ", x.device());
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, op, ": ", name, " is ", tensor.scalar_type(),
              "; it must be float32");
  TORCH_CHECK(tensor.dim() == dimensions, op, ": ", name, " has shape ", tensor.sizes(),
              "; it needs ", dimensions, " dimensions");
}

inline void check_bias(const char* op, const c10::optional<at::Tensor>& bias, std::int64_t filters,
                       const at::Tensor& x) {
  if (bias.has_value()) {
    check_float(op, "bias", *bias, 1, x);
    TORCH_CHECK(bias->size(0) == filters, op, ": bias has shape ", bias->sizes(), " but there are ",
                filters, " filters");
  }
}

struct Window {
  std::vector<std::int64_t> stride;
  std::vector<std::int64_t> padding;
  std::vector<std::int64_t> dilation;
  std::int64_t groups;
};

inline void check_window(const Window& window) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const auto check = [kMost](const char* name, const std::vector<std::int64_t>& pair,
                             std::int64_t least) {
    TORCH_CHECK(pair.size() == 2, "manual_conv2d: ", name, " has ", pair.size(),
                " numbers; it needs two, (height, width)");
    for (const std::int64_t each : pair) {
      TORCH_CHECK(each >= least && each <= kMost, "manual_conv2d: ", name, " is ", each,
                  "; it must be from ", least, " to ", kMost);
    }
  };
  check("stride", window.stride, 1);
  check("padding", window.padding, 0);
  check("dilation", window.dilation, 1);
  TORCH_CHECK(window.groups >= 1, "manual_conv2d: groups is ", window.groups,
              "; it must be 1 or more");
}

inline Sizes conv2d_sizes(const at::Tensor& x, const at::Tensor& weight,
                          const c10::optional<at::Tensor>& bias, const Window& window) {
  const char* op = "manual_conv2d";
  check_float(op, "x", x, 4, x);
  check_float(op, "weight", weight, 4, x);
  check_bias(op, bias, weight.size(0), x);
  check_window(window);
  TORCH_CHECK(weight.size(1) * window.groups == x.size(1) && weight.size(0) % window.groups == 0,
              op, ": x has shape ", x.sizes(), ", weight ", weight.sizes(), " and groups is ",
              window.groups, "; x needs groups * weight's channels, and the filters must divide "
              "into groups");
  Sizes sizes{x.size(0), weight.size(0), 0, 0};
  for (int axis = 0; axis < 2; ++axis) {
    const std::int64_t kernel = weight.size(2 + axis);
    TORCH_CHECK(kernel >= 1 && kernel <= std::numeric_limits<std::int32_t>::max(), op,
                ": weight has shape ", weight.sizes(), "; its kernel must be 1 or more in both directions, and int32");
    const std::int64_t covered = window.dilation[axis] * (kernel - 1) + 1;
    const std::int64_t padded = x.size(2 + axis) + 2 * window.padding[axis];
    TORCH_CHECK(padded >= covered, op, ": the kernel covers ", covered, " pixels of the padded ",
                padded, " along axis ", 2 + axis);
    sizes[2 + axis] = (padded - covered) / window.stride[axis] + 1;
  }
  check_extent(op, sizes, sizeof(float));
  return sizes;
}

inline Sizes linear_sizes(const at::Tensor& x, const at::Tensor& weight,
                          const c10::optional<at::Tensor>& bias) {
  const char* op = "manual_linear";
  TORCH_CHECK(x.dim() >= 1, op, ": x has no dimension; it must be [..., K]");
  check_float(op, "x", x, x.dim(), x);
  check_float(op, "weight", weight, 2, x);
  check_bias(op, bias, weight.size(0), x);
  TORCH_CHECK(x.size(-1) == weight.size(1), op, ": x has shape ", x.sizes(),
              " and weight has shape ", weight.sizes(), "; x[..., K] and weight[N, K] must agree in K");
  Sizes sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  check_extent(op, sizes, sizeof(float));
  return sizes;
}

// Where the result has no term to sum, it is the bias alone, or zeros.
inline bool has_no_terms(const at::Tensor& weight) {
  return weight.numel() == 0;
}

inline at::Tensor of_bias_alone(const at::Tensor& out, const c10::optional<at::Tensor>& bias,
                                std::int64_t filter_axis) {
  out.zero_();
  if (bias.has_value()) {
    Sizes along(out.dim(), 1);
    along[filter_axis] = bias->size(0);
    out.add_(bias->reshape(along));
  }
  return out;
}

// What a Problem's pointers point into.
struct Tensors {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor out;
};

inline Strides strides_of(const at::Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
}

// weight becomes contiguous; x keeps its strides; out is channels_last where x is.
inline Tensors conv2d_tensors(const at::Tensor& x, const at::Tensor& weight,
                              const c10::optional<at::Tensor>& bias, const Window& window) {
  const Sizes sizes = conv2d_sizes(x, weight, bias, window);
  return {x, weight.contiguous(), bias.has_value() ? bias->contiguous() : at::Tensor(),
          at::empty(sizes, x.options(), x.suggest_memory_format())};
}

inline Problem conv2d_problem(const Tensors& tensors, const Window& window) {
  const at::Tensor& x = tensors.x;
  const at::Tensor& weight = tensors.weight;
  const at::Tensor& out = tensors.out;
  Problem problem = {};
  problem.x = x.data_ptr<float>();
  problem.weight = weight.data_ptr<float>();
  problem.bias = tensors.bias.defined() ? tensors.bias.data_ptr<float>() : nullptr;
  problem.out = out.data_ptr<float>();
  problem.x_strides = strides_of(x);
  problem.weight_strides = strides_of(weight);
  problem.out_strides = strides_of(out);
  problem.images = x.size(0);
  problem.groups = window.groups;
  problem.channels = weight.size(1);
  problem.filters = weight.size(0) / window.groups;
  problem.height = x.size(2);
  problem.width = x.size(3);
  problem.kernel_height = weight.size(2);
  problem.kernel_width = weight.size(3);
  problem.out_height = out.size(2);
  problem.out_width = out.size(3);
  for (int axis = 0; axis < 2; ++axis) {
    problem.stride[axis] = window.stride[axis];
    problem.padding[axis] = window.padding[axis];
    problem.dilation[axis] = window.dilation[axis];
  }
  return problem;
}

// Leading dimensions of x are flattened, which copies where no stride describes them.
inline Tensors linear_tensors(const at::Tensor& x, const at::Tensor& weight,
                              const c10::optional<at::Tensor>& bias) {
  const Sizes sizes = linear_sizes(x, weight, bias);
  std::int64_t rows = 1;
  for (std::int64_t axis = 0; axis + 1 < x.dim(); ++axis) {
    rows *= x.size(axis);
  }
  // Spelt out because -1 is ambiguous when a dimension is empty.
  return {x.reshape({rows, x.size(-1)}), weight.contiguous(),
          bias.has_value() ? bias->contiguous() : at::Tensor(), at::empty(sizes, x.options())};
}

inline Problem linear_problem(const Tensors& tensors) {
  Problem problem = {};
  problem.x = tensors.x.data_ptr<float>();
  problem.weight = tensors.weight.data_ptr<float>();
  problem.bias = tensors.bias.defined() ? tensors.bias.data_ptr<float>() : nullptr;
  problem.out = tensors.out.data_ptr<float>();
  problem.images = problem.groups = problem.height = problem.out_height = 1;
  problem.kernel_height = problem.kernel_width = 1;
  problem.channels = tensors.x.size(1);
  problem.width = problem.out_width = tensors.x.size(0);
  problem.filters = tensors.weight.size(0);
  problem.x_strides = {0, tensors.x.stride(1), 0, tensors.x.stride(0)};
  problem.weight_strides = {problem.channels, 1, 1, 1};
  problem.out_strides = {0, 1, 0, problem.filters};
  for (int axis = 0; axis < 2; ++axis) {
    problem.stride[axis] = problem.dilation[axis] = 1;
  }
  return problem;
}

}  // namespace manual
}  // namespace narrowgauge
