// The fake-quantise operators on CUDA: from tensors to the launcher. c10/cuda headers only, because
// ATen/cuda needs the headers of cuBLAS, cuSPARSE and cuSOLVER, which images leave out.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <string>

#include "fake_quantize/cuda/fake_quantize.h"
#include "common/element_of.h"
#include "fake_quantize/fake_quantize_problem.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace fake_quantize {
namespace {

// A problem is on one device, which its checks saw to; it need not be the current one.
at::Tensor run(const Problem& problem, const std::string& isa) {
  TORCH_CHECK(isa == "auto", "isa='", isa, "' names an instruction set of the CPU; a CUDA tensor "
              "takes 'auto' only");
  const c10::cuda::CUDAGuard guard(problem.out.device());
  const DeviceTask task{problem.x.data_ptr(),
                        problem.grad.defined() ? problem.grad.data_ptr() : nullptr,
                        problem.out.data_ptr(),
                        problem.scale.data_ptr<float>(),
                        problem.zero_point.data_ptr<int>(),
                        problem.x.numel(),
                        problem.inner,
                        problem.channels,
                        static_cast<int>(problem.quant_min),
                        static_cast<int>(problem.quant_max)};
  const cudaError_t error =
      launch_fake_quantize(element_of(problem.out.scalar_type()), task,
                           c10::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK(error == cudaSuccess, "fake_quantize: the CUDA kernel was not launched: ",
              cudaGetErrorString(error));
  return problem.out;
}

at::Tensor fake_quantize_cuda(const at::Tensor& x, const at::Tensor& scale,
                              const at::Tensor& zero_point, c10::optional<std::int64_t> axis,
                              std::int64_t quant_min, std::int64_t quant_max, std::string isa) {
  return run(problem(x, scale, zero_point, axis, quant_min, quant_max), isa);
}

at::Tensor fake_quantize_grad_cuda(const at::Tensor& grad, const at::Tensor& x,
                                   const at::Tensor& scale, const at::Tensor& zero_point,
                                   c10::optional<std::int64_t> axis, std::int64_t quant_min,
                                   std::int64_t quant_max, std::string isa) {
  return run(grad_problem(grad, x, scale, zero_point, axis, quant_min, quant_max), isa);
}

}  // namespace

TORCH_LIBRARY_IMPL(narrowgauge, CUDA, m) {
  m.impl("fake_quantize", fake_quantize_cuda);
  m.impl("fake_quantize_grad", fake_quantize_grad_cuda);
}

}  // namespace fake_quantize
}  // namespace narrowgauge
