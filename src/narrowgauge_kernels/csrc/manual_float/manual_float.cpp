// The manual operators of float policies: schema, shape functions, and the CPU implementation.
#include <dlfcn.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "common/instruction_set.h"
#include "manual_float/manual_float_problem.h"
#include "manual_float/manual_float_turned.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace manual {
namespace {

const Kernel* kernel_of(Policy policy, InstructionSet set) {
  switch (set) {
#if defined(__x86_64__)
    case InstructionSet::kAvx2:
      return avx2_kernel(policy);
    case InstructionSet::kAvx512:
      return avx512_kernel(policy);
#elif defined(__aarch64__)
    case InstructionSet::kNeon:
      return neon_kernel(policy);
#endif
    default:
      return generic_kernel(policy);
  }
}

// Of a compiled functor. The library stays loaded: dlopen of one that is there costs a look-up.
const Kernel* kernel_of_library(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, "the compiled functor does not load: ", dlerror());
  using Give = const Kernel* (*)();
  const Give give = reinterpret_cast<Give>(dlsym(library, "narrowgauge_manual_kernel"));
  TORCH_CHECK(give != nullptr, path, " is no compiled functor for the CPU; make one by "
              "narrowgauge_kernels.custom.compile_functor");
  return give();
}

void run(const Problem& problem, const Choice& choice, const std::string& isa) {
  const InstructionSet set = instruction_set(isa);
  if (choice.policy == Policy::kCustom) {
    TORCH_CHECK(isa == "auto", "isa='", isa, "': a compiled functor is for one instruction set, "
                "that of the processor it was compiled on");
    run_any(problem, *kernel_of_library(choice.library), choice.kept);
  } else {
    run_any(problem, *kernel_of(choice.policy, set), choice.kept);
  }
}

at::Tensor conv2d_cpu(const at::Tensor& x, const at::Tensor& weight,
                      const c10::optional<at::Tensor>& bias, std::string mac, std::int64_t bits,
                      std::string library, std::vector<std::int64_t> stride,
                      std::vector<std::int64_t> padding, std::vector<std::int64_t> dilation,
                      std::int64_t groups, std::string isa) {
  const Choice choice = choice_of("manual_conv2d", mac, bits, library);
  const Window window = {stride, padding, dilation, groups};
  const Tensors tensors = conv2d_tensors(x, weight, bias, window);
  if (tensors.out.numel() == 0) {
    return tensors.out;
  }
  if (has_no_terms(weight)) {
    return of_bias_alone(tensors.out, bias, 1);
  }
  run(conv2d_problem(tensors, window), choice, isa);
  return tensors.out;
}

at::Tensor linear_cpu(const at::Tensor& x, const at::Tensor& weight,
                      const c10::optional<at::Tensor>& bias, std::string mac, std::int64_t bits,
                      std::string library, std::string isa) {
  const Choice choice = choice_of("manual_linear", mac, bits, library);
  const Tensors tensors = linear_tensors(x, weight, bias);
  if (tensors.out.numel() == 0) {
    return tensors.out;
  }
  if (has_no_terms(weight)) {
    return of_bias_alone(tensors.out, bias, tensors.out.dim() - 1);
  }
  run(linear_problem(tensors), choice, isa);
  return tensors.out;
}

at::Tensor conv2d_meta(const at::Tensor& x, const at::Tensor& weight,
                       const c10::optional<at::Tensor>& bias, std::string mac, std::int64_t bits,
                       std::string library, std::vector<std::int64_t> stride,
                       std::vector<std::int64_t> padding, std::vector<std::int64_t> dilation,
                       std::int64_t groups, std::string) {
  choice_of("manual_conv2d", mac, bits, library);
  const Window window = {stride, padding, dilation, groups};
  return at::empty(conv2d_sizes(x, weight, bias, window), x.options(), x.suggest_memory_format());
}

at::Tensor linear_meta(const at::Tensor& x, const at::Tensor& weight,
                       const c10::optional<at::Tensor>& bias, std::string mac, std::int64_t bits,
                       std::string library, std::string) {
  choice_of("manual_linear", mac, bits, library);
  return at::empty(linear_sizes(x, weight, bias), x.options());
}

}  // namespace

// `isa` forces one instruction set of the CPU (generic, avx2, avx512, neon); results do not differ.
TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def("manual_conv2d(Tensor x, Tensor weight, Tensor? bias, str mac, int bits, str library, "
        "int[] stride, int[] padding, int[] dilation, int groups, *, str isa='auto') -> Tensor");
  m.def("manual_linear(Tensor x, Tensor weight, Tensor? bias, str mac, int bits, str library, *, "
        "str isa='auto') -> Tensor");
}

TORCH_LIBRARY_IMPL(narrowgauge, CPU, m) {
  m.impl("manual_conv2d", conv2d_cpu);
  m.impl("manual_linear", linear_cpu);
}

TORCH_LIBRARY_IMPL(narrowgauge, Meta, m) {
  m.impl("manual_conv2d", conv2d_meta);
  m.impl("manual_linear", linear_meta);
}

}  // namespace manual
}  // namespace narrowgauge
