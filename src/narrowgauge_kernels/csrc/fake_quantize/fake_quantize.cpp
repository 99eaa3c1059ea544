// The fake-quantise operators: schema, shape functions, and the CPU implementation.
#include "fake_quantize/fake_quantize.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fake_quantize/fake_quantize_problem.h"
#include "common/instruction_set.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace fake_quantize {
namespace {

// Below this many elements, waking a thread costs more than it saves.
constexpr std::int64_t kLeastParallelCount = 32768;
// Runs of one channel that are shorter than this are cheaper with parameters spelt out per element,
// in a table of this many elements or more, so that calls are few, and at most of the latter length.
constexpr std::int64_t kLongRun = 64;
constexpr std::int64_t kLeastTable = 512;
constexpr std::int64_t kLargestTable = 65536;

// Parameters of the channels, or, where runs are short, of each element of a whole number of periods.
template <typename A>
class Table {
 public:
  explicit Table(const Problem& problem) {
    const std::int64_t period = problem.channels * problem.inner;
    by_element_ = problem.channels > 1 &&
                  (problem.inner == 1 || (problem.inner < kLongRun && period <= kLargestTable));
    const std::int64_t repeats = (kLeastTable + period - 1) / period;
    length_ = by_element_ ? period * std::max<std::int64_t>(repeats, 1) : problem.channels;
    const float* scale = problem.scale.data_ptr<float>();
    const int* zero_point = problem.zero_point.data_ptr<int>();
    for (auto* values : {&scale_, &reciprocal_, &low_, &high_}) {
      values->resize(length_);
    }
    for (std::int64_t i = 0; i < length_; ++i) {
      const std::int64_t channel = by_element_ ? i / problem.inner % problem.channels : i;
      scale_[i] = static_cast<A>(scale[channel]);
      reciprocal_[i] = A(1) / scale_[i];
      low_[i] = static_cast<A>(problem.quant_min) - static_cast<A>(zero_point[channel]);
      high_[i] = static_cast<A>(problem.quant_max) - static_cast<A>(zero_point[channel]);
    }
  }
  bool by_element() const { return by_element_; }
  std::int64_t length() const { return length_; }
  Steps<A> at(std::int64_t i) const {
    return {&scale_[i], &reciprocal_[i], &low_[i], &high_[i]};
  }

 private:
  bool by_element_;
  std::int64_t length_;
  std::vector<A> scale_, reciprocal_, low_, high_;
};

// Calls visit(first, count, index): elements [first, first + count) with the parameters at `index`.
template <typename A, typename Visit>
void split(const Table<A>& table, std::int64_t inner, std::int64_t begin, std::int64_t end,
           const Visit& visit) {
  const std::int64_t piece = table.by_element() ? table.length() : inner;
  for (std::int64_t i = begin; i < end;) {
    const std::int64_t count = std::min(end - i, piece - i % piece);
    visit(i, count, table.by_element() ? i % piece : i / inner % table.length());
    i += count;
  }
}

template <typename In, typename T>
void run_typed(const Problem& problem, InstructionSet set) {
  using A = typename Wide<T>::Type;
  const Loops<T> loops = loops_for<Loops<T>>(set);
  const Table<A> table(problem);
  const T* x = reinterpret_cast<const T*>(problem.x.data_ptr<In>());
  T* out = reinterpret_cast<T*>(problem.out.data_ptr<In>());
  const T* grad =
      problem.grad.defined() ? reinterpret_cast<const T*>(problem.grad.data_ptr<In>()) : nullptr;
  const auto forward = table.by_element() ? loops.columns : loops.run;
  const auto backward = table.by_element() ? loops.columns_backward : loops.run_backward;
  at::parallel_for(
      0, problem.x.numel(), kLeastParallelCount, [&](std::int64_t begin, std::int64_t end) {
        split(table, problem.inner, begin, end,
              [&](std::int64_t first, std::int64_t count, std::int64_t index) {
                if (grad == nullptr) {
                  forward(count, x + first, table.at(index), out + first);
                } else {
                  backward(count, grad + first, x + first, table.at(index), out + first);
                }
              });
      });
}

at::Tensor run(const Problem& problem, const std::string& isa) {
  const InstructionSet set = instruction_set(isa);
  if (problem.x.numel() == 0) {
    return problem.out;
  }
  switch (problem.x.scalar_type()) {
    case at::kDouble:
      run_typed<double, double>(problem, set);
      break;
    case at::kHalf:
      run_typed<at::Half, Half>(problem, set);
      break;
    case at::kBFloat16:
      run_typed<at::BFloat16, BFloat16>(problem, set);
      break;
    default:
      run_typed<float, float>(problem, set);
  }
  return problem.out;
}

at::Tensor fake_quantize_cpu(const at::Tensor& x, const at::Tensor& scale,
                             const at::Tensor& zero_point, c10::optional<std::int64_t> axis,
                             std::int64_t quant_min, std::int64_t quant_max, std::string isa) {
  return run(problem(x, scale, zero_point, axis, quant_min, quant_max), isa);
}

at::Tensor fake_quantize_grad_cpu(const at::Tensor& grad, const at::Tensor& x,
                                  const at::Tensor& scale, const at::Tensor& zero_point,
                                  c10::optional<std::int64_t> axis, std::int64_t quant_min,
                                  std::int64_t quant_max, std::string isa) {
  return run(grad_problem(grad, x, scale, zero_point, axis, quant_min, quant_max), isa);
}

at::Tensor fake_quantize_meta(const at::Tensor& x, const at::Tensor& scale,
                              const at::Tensor& zero_point, c10::optional<std::int64_t> axis,
                              std::int64_t quant_min, std::int64_t quant_max, std::string) {
  check(x, scale, zero_point, axis, quant_min, quant_max);
  return at::empty_like(without_gaps(x));
}

at::Tensor fake_quantize_grad_meta(const at::Tensor& grad, const at::Tensor& x,
                                   const at::Tensor& scale, const at::Tensor& zero_point,
                                   c10::optional<std::int64_t> axis, std::int64_t quant_min,
                                   std::int64_t quant_max, std::string isa) {
  check_grad(grad, x);
  return fake_quantize_meta(x, scale, zero_point, axis, quant_min, quant_max, isa);
}

}  // namespace

// `isa` forces one instruction set of the CPU (generic, avx2, avx512, neon); results do not differ.
TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def(
      "fake_quantize(Tensor x, Tensor scale, Tensor zero_point, int? axis, int quant_min, "
      "int quant_max, *, str isa='auto') -> Tensor");
  m.def(
      "fake_quantize_grad(Tensor grad, Tensor x, Tensor scale, Tensor zero_point, int? axis, "
      "int quant_min, int quant_max, *, str isa='auto') -> Tensor");
}

TORCH_LIBRARY_IMPL(narrowgauge, CPU, m) {
  m.impl("fake_quantize", fake_quantize_cpu);
  m.impl("fake_quantize_grad", fake_quantize_grad_cpu);
}

TORCH_LIBRARY_IMPL(narrowgauge, Meta, m) {
  m.impl("fake_quantize", fake_quantize_meta);
  m.impl("fake_quantize_grad", fake_quantize_grad_meta);
}

}  // namespace fake_quantize
}  // namespace narrowgauge
