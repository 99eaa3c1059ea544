// The compiled timing loop on the CPU.
#include "harness/harness.h"

#include <torch/library.h>

namespace narrowgauge {
namespace harness {
namespace {

using Clock = std::chrono::steady_clock;

template <typename Call>
at::Tensor time_on_cpu(const Schedule& schedule, Call& call) {
  Samples samples(schedule);
  if (!schedule.flush.defined()) {
    call();  // finds other work's data in the caches, so that no sample does
  }
  for (std::int64_t sample = 0; sample < schedule.samples; ++sample) {
    if (schedule.flush.defined()) {
      schedule.flush.add_(1);  // read as well: stores alone may go past the cache
    }
    const Clock::time_point began = Clock::now();
    for (std::int64_t i = 0; i < schedule.calls; ++i) {
      call();
    }
    const double seconds = seconds_between(began, Clock::now());
    samples.set(sample, seconds);
    samples.set_host(sample, seconds);
  }
  return samples.tensor();
}

// Boxed, because a schema may say `Any[]` and a C++ signature may not.
void time_operator(const c10::OperatorHandle&, Stack* stack) {
  Arguments arguments(stack);
  const c10::optional<at::Tensor> flush = arguments.optional_tensor();
  const std::int64_t calls = arguments.integer();
  const std::int64_t samples = arguments.integer();
  Stack inputs = arguments.list();
  const std::string overload = arguments.text();
  Operator call(arguments.text(), overload, std::move(inputs));
  stack->emplace_back(time_on_cpu(make_schedule(samples, calls, flush), call));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def("harness_operator_cpu(str name, str overload, Any[] arguments, int samples, int calls, "
        "Tensor? flush) -> Tensor",
        torch::CppFunction::makeFromBoxedFunction<&time_operator>());
}

}  // namespace harness
}  // namespace narrowgauge
