// The linear operators: schema, shape functions, and the CPU implementation.
#include <torch/library.h>

#include <string>
#include <vector>

#include "common/instruction_set.h"
#include "linear/linear.h"
#include "linear/linear_blocked.h"
#include "linear/linear_problem.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace linear {
namespace {

template <typename In>
Operand<In> operand(const at::Tensor& matrix) {
  return {matrix.data_ptr<In>(), matrix.size(0), matrix.stride(0), matrix.stride(1)};
}

template <typename In, typename T>
void run_typed(const Problem& problem, InstructionSet set) {
  const In* bias = problem.bias.defined() ? problem.bias.data_ptr<In>() : nullptr;
  run_blocked<In, T>(loops_for<MicroKernels<T>>(set), operand<In>(problem.left),
                     operand<In>(problem.right), bias, problem.out.data_ptr<In>(),
                     problem.left.size(1));
}

at::Tensor run(const Problem& problem, const std::string& isa) {
  const InstructionSet set = instruction_set(isa);
  if (problem.out.numel() == 0) {
    return problem.out;
  }
  switch (problem.out.scalar_type()) {
    case at::kDouble:
      run_typed<double, double>(problem, set);
      break;
    case at::kHalf:
      run_typed<at::Half, float>(problem, set);
      break;
    case at::kBFloat16:
      run_typed<at::BFloat16, float>(problem, set);
      break;
    default:
      run_typed<float, float>(problem, set);
  }
  return problem.out;
}

at::Tensor linear_cpu(const at::Tensor& x, const at::Tensor& weight,
                      const c10::optional<at::Tensor>& bias, std::string isa) {
  return run(linear_problem(x, weight, bias), isa);
}

at::Tensor grad_input_cpu(const at::Tensor& grad, const at::Tensor& weight, std::string isa) {
  return run(grad_input_problem(grad, weight), isa);
}

at::Tensor grad_weight_cpu(const at::Tensor& grad, const at::Tensor& x, std::string isa) {
  return run(grad_weight_problem(grad, x), isa);
}

at::Tensor grad_bias_cpu(const at::Tensor& grad, std::string isa) {
  return run(grad_bias_problem(grad), isa);
}

at::Tensor linear_meta(const at::Tensor& x, const at::Tensor& weight,
                       const c10::optional<at::Tensor>& bias, std::string) {
  return at::empty(linear_sizes(x, weight, bias), x.options());
}

at::Tensor grad_input_meta(const at::Tensor& grad, const at::Tensor& weight, std::string) {
  return at::empty(grad_input_sizes(grad, weight), grad.options());
}

at::Tensor grad_weight_meta(const at::Tensor& grad, const at::Tensor& x, std::string) {
  return at::empty(grad_weight_sizes(grad, x), grad.options());
}

at::Tensor grad_bias_meta(const at::Tensor& grad, std::string) {
  return at::empty(grad_bias_sizes(grad), grad.options());
}

std::vector<std::string> cpu_instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet set : available_instruction_sets()) {
    names.emplace_back(name_of(set));
  }
  return names;
}

}  // namespace

// `isa` forces one instruction set of the CPU (generic, avx2, avx512, neon); results do not differ.
TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias=None, *, str isa='auto') -> Tensor");
  m.def("linear_grad_input(Tensor grad, Tensor weight, *, str isa='auto') -> Tensor");
  m.def("linear_grad_weight(Tensor grad, Tensor x, *, str isa='auto') -> Tensor");
  m.def("linear_grad_bias(Tensor grad, *, str isa='auto') -> Tensor");
  m.def("cpu_instruction_sets() -> str[]", cpu_instruction_sets);
}

TORCH_LIBRARY_IMPL(narrowgauge, CPU, m) {
  m.impl("linear", linear_cpu);
  m.impl("linear_grad_input", grad_input_cpu);
  m.impl("linear_grad_weight", grad_weight_cpu);
  m.impl("linear_grad_bias", grad_bias_cpu);
}

TORCH_LIBRARY_IMPL(narrowgauge, Meta, m) {
  m.impl("linear", linear_meta);
  m.impl("linear_grad_input", grad_input_meta);
  m.impl("linear_grad_weight", grad_weight_meta);
  m.impl("linear_grad_bias", grad_bias_meta);
}

}  // namespace linear
}  // namespace narrowgauge
