// The checks of the fake-quantise operators, and their tensors in order of memory. Shared by CPU and
// CUDA.
#pragma once

#include <cstdint>

#include "common/torch_tensor.h"

namespace narrowgauge {
namespace fake_quantize {

// Elements in order of memory: x, grad (backward only) and out have the same strides and no gaps.
// Element i is of channel (i / inner) % channels; scale and zero_point are contiguous, of `channels`
// elements.
struct Problem {
  at::Tensor x;
  at::Tensor grad;
  at::Tensor out;
  at::Tensor scale;
  at::Tensor zero_point;
  std::int64_t channels;
  std::int64_t inner;
  std::int64_t quant_min;
  std::int64_t quant_max;
};

// Rounding by addition is exact up to 2^22, and zero points lie between the ends.
constexpr std::int64_t kLargestInteger = 1 << 20;

inline void check_parameter(const char* name, const at::Tensor& parameter, at::ScalarType type,
                            const at::Tensor& x, c10::optional<std::int64_t> axis) {
  TORCH_CHECK(parameter.device() == x.device(), "fake_quantize: ", name, " is on ",
              parameter.device(), " but x is on ", x.device());
  TORCH_CHECK(parameter.scalar_type() == type, "fake_quantize: ", name, " is ",
              parameter.scalar_type(), "; it must be ", type);
  if (axis.has_value()) {
    TORCH_CHECK(parameter.dim() == 1 && parameter.size(0) == x.size(*axis), "fake_quantize: ",
                name, " has shape ", parameter.sizes(), " and x has shape ", x.sizes(),
                "; along axis ", *axis, " it must be [", x.size(*axis), "]");
  } else {
    TORCH_CHECK(parameter.numel() == 1, "fake_quantize: ", name, " has shape ", parameter.sizes(),
                "; without an axis it must be one number");
  }
}

inline void check(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& zero_point,
                  c10::optional<std::int64_t> axis, std::int64_t quant_min,
                  std::int64_t quant_max) {
  const at::ScalarType type = x.scalar_type();
  const bool known = type == at::kFloat || type == at::kDouble || type == at::kHalf ||
                     type == at::kBFloat16;
  TORCH_CHECK(known, "fake_quantize: x is ", type,
              "; it must be float32, float64, float16 or bfloat16");
  TORCH_CHECK(!axis.has_value() || (*axis >= 0 && *axis < x.dim()), "fake_quantize: axis ",
              axis.value_or(0), " is no dimension of x, which has shape ", x.sizes());
  check_parameter("scale", scale, at::kFloat, x, axis);
  check_parameter("zero_point", zero_point, at::kInt, x, axis);
  TORCH_CHECK(-kLargestInteger <= quant_min && quant_min <= quant_max &&
                  quant_max <= kLargestInteger,
              "fake_quantize: the integers from ", quant_min, " to ", quant_max,
              " must be in order and within ", -kLargestInteger, " to ", kLargestInteger);
}

inline void check_grad(const at::Tensor& grad, const at::Tensor& x) {
  TORCH_CHECK(grad.device() == x.device(), "fake_quantize: grad is on ", grad.device(),
              " but x is on ", x.device());
  TORCH_CHECK(grad.scalar_type() == x.scalar_type(), "fake_quantize: grad is ",
              grad.scalar_type(), " but x is ", x.scalar_type());
  TORCH_CHECK(grad.sizes() == x.sizes(), "fake_quantize: grad has shape ", grad.sizes(),
              " and x has shape ", x.sizes(), "; they must be equal");
}

// A tensor with gaps or overlaps (a slice, an expanded one) is gathered first; any order of
// dimensions, channels_last among them, is kept.
inline at::Tensor without_gaps(const at::Tensor& x) {
  return x.is_non_overlapping_and_dense() ? x : x.contiguous();
}

inline Problem problem(const at::Tensor& given, const at::Tensor& scale,
                       const at::Tensor& zero_point, c10::optional<std::int64_t> axis,
                       std::int64_t quant_min, std::int64_t quant_max) {
  check(given, scale, zero_point, axis, quant_min, quant_max);
  const at::Tensor x = without_gaps(given);
  const std::int64_t channels = axis.has_value() ? x.size(*axis) : 1;
  const std::int64_t inner = channels > 1 ? x.stride(*axis) : x.numel();
  return {x,        at::Tensor(), at::empty_like(x), scale.contiguous(), zero_point.contiguous(),
          channels, inner,        quant_min,         quant_max};
}

inline Problem grad_problem(const at::Tensor& grad, const at::Tensor& given,
                            const at::Tensor& scale, const at::Tensor& zero_point,
                            c10::optional<std::int64_t> axis, std::int64_t quant_min,
                            std::int64_t quant_max) {
  check_grad(grad, given);
  Problem made = problem(given, scale, zero_point, axis, quant_min, quant_max);
  made.grad = grad.strides() == made.x.strides() ? grad : at::empty_like(made.x).copy_(grad);
  return made;
}

}  // namespace fake_quantize
}  // namespace narrowgauge
