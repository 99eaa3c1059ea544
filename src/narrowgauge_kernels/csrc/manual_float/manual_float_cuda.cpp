// The manual operators of float policies on CUDA: from tensors to the launcher. c10/cuda headers only,
// because ATen/cuda needs the headers of cuBLAS, cuSPARSE and cuSOLVER, which images leave out.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <vector>

#include "manual_float/cuda/manual_float.h"
#include "manual_float/manual_float_problem.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace manual_float {
namespace {

// Of a compiled functor. The library stays loaded: dlopen of one that is there costs a look-up.
LaunchCustom launcher_of_library(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, "the compiled functor does not load: ", dlerror());
  const LaunchCustom launch = reinterpret_cast<LaunchCustom>(dlsym(library, kLaunchCustom));
  TORCH_CHECK(launch != nullptr, path, " is no compiled functor for CUDA; make one by "
              "narrowgauge_kernels.custom.compile_functor with cuda=True");
  return launch;
}

void check(const char* op, cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, op, ": the CUDA kernel was not launched: ",
              cudaGetErrorString(error));
}

void check_isa(const char* op, const std::string& isa) {
  TORCH_CHECK(isa == "auto", op, ": isa='", isa, "' names an instruction set of the CPU; a CUDA "
              "tensor takes 'auto' only");
}

bool is_aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

Plan plan_of(const char* op, const Convolution& conv, const manual::Problem& problem,
             manual::Policy policy) {
  int count = 0;
  check(op, multiprocessors(&count));
  return plan_for(conv, cost_of(policy), count, is_aligned(problem.x));
}

// The tensors are on one device, which their checks saw to and which is the current one by now.
void run(const char* op, const Convolution& conv, const manual::Problem& problem, const Plan& plan,
         const manual::Choice& choice, const at::Tensor& out) {
  // Of the stream's own allocator, which reuses it only after what is queued here.
  const at::Tensor partial =
      plan.splits > 1 ? at::empty({plan.splits * out_count(conv)}, out.options()) : at::Tensor();
  const Task task = {conv,
                     plan,
                     problem.x,
                     problem.weight,
                     problem.bias,
                     problem.out,
                     partial.defined() ? partial.data_ptr<float>() : nullptr,
                     choice.kept,
                     choice.policy != manual::Policy::kExactFp32};
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  check(op, choice.policy == manual::Policy::kCustom
                ? launcher_of_library(choice.library)(&task, stream)
                : launch_manual(choice.policy, task, stream));
}

at::Tensor conv2d_cuda(const at::Tensor& x, const at::Tensor& weight,
                       const c10::optional<at::Tensor>& bias, std::string mac, std::int64_t bits,
                       std::string library, std::vector<std::int64_t> stride,
                       std::vector<std::int64_t> padding, std::vector<std::int64_t> dilation,
                       std::int64_t groups, std::string isa) {
  const char* const op = "manual_conv2d";
  check_isa(op, isa);
  const manual::Choice choice = manual::choice_of(op, mac, bits, library);
  const manual::Window window = {stride, padding, dilation, groups};
  manual::Tensors tensors = manual::conv2d_tensors(x, weight, bias, window);
  const c10::cuda::CUDAGuard guard(x.device());
  if (tensors.out.numel() == 0) {
    return tensors.out;
  }
  if (manual::has_no_terms(weight)) {
    return manual::of_bias_alone(tensors.out, bias, 1);
  }
  manual::Problem problem = manual::conv2d_problem(tensors, window);
  Convolution conv = convolution_of(problem);
  const Plan plan = plan_of(op, conv, problem, choice.policy);
  if (plan.tile != TileKind::kDirect && plan.channels_inside &&
      conv.taps_high * conv.taps_wide > 1) {
    // Neighbouring threads read neighbouring channels of weight, too.
    tensors.weight = weight.contiguous(at::MemoryFormat::ChannelsLast);
    problem = manual::conv2d_problem(tensors, window);
    conv = convolution_of(problem);
  }
  run(op, conv, problem, plan, choice, tensors.out);
  return tensors.out;
}

at::Tensor linear_cuda(const at::Tensor& x, const at::Tensor& weight,
                       const c10::optional<at::Tensor>& bias, std::string mac, std::int64_t bits,
                       std::string library, std::string isa) {
  const char* const op = "manual_linear";
  check_isa(op, isa);
  const manual::Choice choice = manual::choice_of(op, mac, bits, library);
  const manual::Tensors tensors = manual::linear_tensors(x, weight, bias);
  const c10::cuda::CUDAGuard guard(x.device());
  if (tensors.out.numel() == 0) {
    return tensors.out;
  }
  if (manual::has_no_terms(weight)) {
    return manual::of_bias_alone(tensors.out, bias, tensors.out.dim() - 1);
  }
  const manual::Problem problem = manual::linear_problem(tensors);
  const Convolution conv = convolution_of(problem);
  run(op, conv, problem, plan_of(op, conv, problem, choice.policy), choice, tensors.out);
  return tensors.out;
}

}  // namespace

TORCH_LIBRARY_IMPL(narrowgauge, CUDA, m) {
  m.impl("manual_conv2d", conv2d_cuda);
  m.impl("manual_linear", linear_cuda);
}

}  // namespace manual_float
}  // namespace narrowgauge
