// The linear operators on CUDA: from tensors to the launcher. c10/cuda headers only, because
// ATen/cuda needs the headers of cuBLAS, cuSPARSE and cuSOLVER, which images leave out.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <string>

#include "linear/cuda/linear.h"
#include "common/element_of.h"
#include "linear/linear_problem.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace linear {
namespace {

DeviceOperand operand(const at::Tensor& matrix) {
  return {matrix.data_ptr(), matrix.size(0), matrix.stride(0), matrix.stride(1)};
}

// A problem is on one device, which its checks saw to; it need not be the current one.
at::Tensor run(const Problem& problem, const std::string& isa) {
  TORCH_CHECK(isa == "auto", "isa='", isa, "' names an instruction set of the CPU; a CUDA tensor "
              "takes 'auto' only");
  const c10::cuda::CUDAGuard guard(problem.out.device());
  const void* bias = problem.bias.defined() ? problem.bias.data_ptr() : nullptr;
  const cudaError_t error = launch_multiply_accumulate(
      element_of(problem.out.scalar_type()), operand(problem.left), operand(problem.right), bias,
      problem.out.data_ptr(), problem.left.size(1), c10::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK(error == cudaSuccess, "linear: the CUDA kernel was not launched: ",
              cudaGetErrorString(error));
  return problem.out;
}

at::Tensor linear_cuda(const at::Tensor& x, const at::Tensor& weight,
                       const c10::optional<at::Tensor>& bias, std::string isa) {
  return run(linear_problem(x, weight, bias), isa);
}

at::Tensor grad_input_cuda(const at::Tensor& grad, const at::Tensor& weight, std::string isa) {
  return run(grad_input_problem(grad, weight), isa);
}

at::Tensor grad_weight_cuda(const at::Tensor& grad, const at::Tensor& x, std::string isa) {
  return run(grad_weight_problem(grad, x), isa);
}

at::Tensor grad_bias_cuda(const at::Tensor& grad, std::string isa) {
  return run(grad_bias_problem(grad), isa);
}

}  // namespace

TORCH_LIBRARY_IMPL(narrowgauge, CUDA, m) {
  m.impl("linear", linear_cuda);
  m.impl("linear_grad_input", grad_input_cuda);
  m.impl("linear_grad_weight", grad_weight_cuda);
  m.impl("linear_grad_bias", grad_bias_cuda);
}

}  // namespace linear
}  // namespace narrowgauge
