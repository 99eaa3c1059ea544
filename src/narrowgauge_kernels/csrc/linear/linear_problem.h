// The checks of the linear operators, each operator as a matrix product. Shared by CPU and CUDA.
//
//   linear              out[m, n]         = sum over k of x[m, k] * weight[n, k]  (+ bias[n])
//   linear_grad_input   grad_input[m, k]  = sum over n of grad[m, n] * weight[n, k]
//   linear_grad_weight  grad_weight[n, k] = sum over m of grad[m, n] * x[m, k]
//   linear_grad_bias    grad_bias[n]      = sum over m of 1 * grad[m, n]
//
// Leading dimensions of x and grad are flattened to m.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/torch_tensor.h"

namespace narrowgauge {
namespace linear {

// out[row, column] = sum over depth of left[row, depth] * right[column, depth] (+ bias[column]).
// left and right are two-dimensional with any strides; bias is undefined or contiguous; out is
// contiguous, of rows × columns elements, in the shape the caller of the operator gets.
struct Problem {
  at::Tensor left;
  at::Tensor right;
  at::Tensor bias;
  at::Tensor out;
};

using Sizes = std::vector<std::int64_t>;

inline void check_alike(const char* op, const char* name, const at::Tensor& tensor,
                        const char* reference_name, const at::Tensor& reference) {
  TORCH_CHECK(tensor.device() == reference.device(), op, ": ", name, " is on ", tensor.device(),
              " but ", reference_name, " is on ", reference.device());
  TORCH_CHECK(tensor.scalar_type() == reference.scalar_type(), op, ": ", name, " is ",
              tensor.scalar_type(), " but ", reference_name, " is ", reference.scalar_type(),
              "; convert one of them");
}

inline void check_operand(const char* op, const char* name, const at::Tensor& tensor,
                          std::int64_t least_dimensions) {
  const at::ScalarType type = tensor.scalar_type();
  const bool known = type == at::kFloat || type == at::kDouble || type == at::kHalf ||
                     type == at::kBFloat16;
  TORCH_CHECK(known, op, ": ", name, " is ", type,
              "; it must be float32, float64, float16 or bfloat16");
  TORCH_CHECK(tensor.dim() >= least_dimensions, op, ": ", name, " has shape ", tensor.sizes(),
              "; it needs ", least_dimensions, " or more dimensions");
}

inline void check_weight(const char* op, const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, op, ": weight has shape ", weight.sizes(), "; it must be [N, K]");
}

inline Sizes replace_last(at::IntArrayRef sizes, std::int64_t last) {
  Sizes result = sizes.vec();
  result.back() = last;
  return result;
}

inline Sizes linear_sizes(const at::Tensor& x, const at::Tensor& weight,
                          const c10::optional<at::Tensor>& bias) {
  check_operand("linear", "x", x, 1);
  check_weight("linear", weight);
  check_alike("linear", "weight", weight, "x", x);
  TORCH_CHECK(x.size(-1) == weight.size(1), "linear: x has shape ", x.sizes(),
              " and weight has shape ", weight.sizes(),
              "; x[..., K] and weight[N, K] must agree in K");
  if (bias.has_value()) {
    check_alike("linear", "bias", *bias, "x", x);
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), "linear: bias has shape ",
                bias->sizes(), " and weight has shape ", weight.sizes(), "; bias must be [N]");
  }
  return replace_last(x.sizes(), weight.size(0));
}

inline Sizes grad_input_sizes(const at::Tensor& grad, const at::Tensor& weight) {
  check_operand("linear_grad_input", "grad", grad, 1);
  check_weight("linear_grad_input", weight);
  check_alike("linear_grad_input", "weight", weight, "grad", grad);
  TORCH_CHECK(grad.size(-1) == weight.size(0), "linear_grad_input: grad has shape ", grad.sizes(),
              " and weight has shape ", weight.sizes(),
              "; grad[..., N] and weight[N, K] must agree in N");
  return replace_last(grad.sizes(), weight.size(1));
}

inline Sizes grad_weight_sizes(const at::Tensor& grad, const at::Tensor& x) {
  check_operand("linear_grad_weight", "grad", grad, 1);
  check_operand("linear_grad_weight", "x", x, 1);
  check_alike("linear_grad_weight", "x", x, "grad", grad);
  TORCH_CHECK(grad.sizes().slice(0, grad.dim() - 1) == x.sizes().slice(0, x.dim() - 1),
              "linear_grad_weight: grad has shape ", grad.sizes(), " and x has shape ", x.sizes(),
              "; they may differ in the last dimension only");
  return {grad.size(-1), x.size(-1)};
}

inline Sizes grad_bias_sizes(const at::Tensor& grad) {
  check_operand("linear_grad_bias", "grad", grad, 1);
  return {grad.size(-1)};
}

// Sizes are spelt out because -1 is ambiguous when a dimension is empty.
inline at::Tensor as_matrix(const at::Tensor& tensor) {
  std::int64_t rows = 1;
  for (std::int64_t dimension = 0; dimension + 1 < tensor.dim(); ++dimension) {
    rows *= tensor.size(dimension);
  }
  return tensor.reshape({rows, tensor.size(-1)});
}

inline Problem linear_problem(const at::Tensor& x, const at::Tensor& weight,
                              const c10::optional<at::Tensor>& bias) {
  const Sizes sizes = linear_sizes(x, weight, bias);
  return {as_matrix(x), weight, bias.has_value() ? bias->contiguous() : at::Tensor(),
          at::empty(sizes, x.options())};
}

inline Problem grad_input_problem(const at::Tensor& grad, const at::Tensor& weight) {
  const Sizes sizes = grad_input_sizes(grad, weight);
  return {as_matrix(grad), weight.t(), at::Tensor(), at::empty(sizes, grad.options())};
}

inline Problem grad_weight_problem(const at::Tensor& grad, const at::Tensor& x) {
  const Sizes sizes = grad_weight_sizes(grad, x);
  return {as_matrix(grad).t(), as_matrix(x).t(), at::Tensor(), at::empty(sizes, grad.options())};
}

// A sum is a product with a row of ones; one element with stride 0 is that row.
inline Problem grad_bias_problem(const at::Tensor& grad) {
  const Sizes sizes = grad_bias_sizes(grad);
  const at::Tensor columns = as_matrix(grad).t();
  return {at::ones({1, 1}, grad.options()).expand({1, columns.size(1)}), columns, at::Tensor(),
          at::empty(sizes, grad.options())};
}

}  // namespace linear
}  // namespace narrowgauge
