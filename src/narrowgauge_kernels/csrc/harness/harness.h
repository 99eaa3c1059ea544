// The compiled timing loop: what it calls, and how it keeps samples. Shared by CPU and CUDA.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "common/torch_tensor.h"

namespace narrowgauge {
namespace harness {

using Stack = std::vector<c10::IValue>;

// `samples` samples of `calls` calls each. Where `flush` is defined, it is written before every
// sample, outside the clock, and is larger than the last cache of its device.
struct Schedule {
  std::int64_t samples;
  std::int64_t calls;
  at::Tensor flush;
};

inline Schedule make_schedule(std::int64_t samples, std::int64_t calls,
                              const c10::optional<at::Tensor>& flush) {
  TORCH_CHECK(samples > 0 && calls > 0, "harness: samples=", samples, " and calls=", calls,
              "; both must be positive");
  TORCH_CHECK(!flush.has_value() || calls == 1, "harness: calls=", calls,
              " with a cold cache; only the first would find it cold");
  return {samples, calls, flush.has_value() ? *flush : at::Tensor()};
}

// Seconds per call, float64 [2, samples]: by the clock that is asked, and what the host spent to
// queue them (on a CPU the same).
class Samples {
 public:
  explicit Samples(const Schedule& schedule)
      : calls_(static_cast<double>(schedule.calls)),
        result_(at::empty({2, schedule.samples}, at::kDouble)),
        seconds_(result_.data_ptr<double>()),
        host_seconds_(seconds_ + schedule.samples) {}
  void set(std::int64_t sample, double seconds) { seconds_[sample] = seconds / calls_; }
  void set_host(std::int64_t sample, double seconds) { host_seconds_[sample] = seconds / calls_; }
  at::Tensor tensor() const { return result_; }

 private:
  double calls_;
  at::Tensor result_;
  double* seconds_;
  double* host_seconds_;
};

inline double seconds_between(std::chrono::steady_clock::time_point began,
                              std::chrono::steady_clock::time_point ended) {
  return std::chrono::duration<double>(ended - began).count();
}

// An operator of the dispatcher with its arguments. Its results are dropped at once.
class Operator {
 public:
  // Positional arguments; what is missing takes the schema's default. Throws c10::Error where the
  // operator is unknown or the arguments do not fit.
  Operator(const std::string& name, const std::string& overload, Stack arguments)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())),
        arguments_(std::move(arguments)) {
    handle_.schema().checkAndNormalizeInputs(arguments_, {});
    stack_.reserve(arguments_.size() + 1);
  }
  void operator()() {
    stack_.assign(arguments_.begin(), arguments_.end());
    handle_.callBoxed(&stack_);
    stack_.clear();
  }

 private:
  c10::OperatorHandle handle_;
  Stack arguments_;
  Stack stack_;
};

// Takes the arguments of an operator of ours off the stack, last first.
class Arguments {
 public:
  explicit Arguments(Stack* stack) : stack_(*stack) {}
  std::int64_t integer() { return take().toInt(); }
  double real() { return take().toDouble(); }
  bool boolean() { return take().toBool(); }
  std::string text() { return take().toStringRef(); }
  c10::optional<at::Tensor> optional_tensor() {
    const c10::IValue value = take();
    return value.isNone() ? c10::optional<at::Tensor>() : value.toTensor();
  }
  Stack list() {
    const c10::List<c10::IValue> values = take().toList();
    return Stack(values.begin(), values.end());
  }

 private:
  c10::IValue take() {
    c10::IValue value = std::move(stack_.back());
    stack_.pop_back();
    return value;
  }
  Stack& stack_;
};

}  // namespace harness
}  // namespace narrowgauge
