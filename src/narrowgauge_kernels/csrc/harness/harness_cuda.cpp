// The compiled timing loop on CUDA, and the hold that a loop in Python uses. c10/cuda headers only,
// because ATen/cuda needs the headers of cuBLAS, cuSPARSE and cuSOLVER, which images leave out.
#include "harness/harness.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>

#include "harness/cuda/harness.h"

namespace narrowgauge {
namespace harness {
namespace {

using Clock = std::chrono::steady_clock;

// Calls that are queued while the stream is held. A stream takes some 1000 launches and a held one
// does not drain, so more would wait for a release that comes after them.
constexpr std::int64_t kHeldCalls = 128;
// Calls after which the loop waits for the device, so that a full queue never pushes back on the
// host's share of the time.
constexpr std::int64_t kQueuedCalls = 512;
constexpr int kDevices = 64;

// The wording torch gives it, by which the device's own faults are told from a program's.
void check(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error), " (harness: ", what,
              ")");
}

struct Pair {
  cudaEvent_t began;
  cudaEvent_t ended;
};

// What one device needs: kept until the process ends, because a driver that is shutting down may
// no longer be asked to free anything.
class Device {
 public:
  static Device& current() {
    static std::array<std::unique_ptr<Device>, kDevices> devices;
    int index = 0;
    check(cudaGetDevice(&index), "asking for the device");
    TORCH_CHECK(index < kDevices, "harness: device ", index, " of at most ", kDevices);
    if (!devices[index]) {
      devices[index].reset(new Device());
    }
    return *devices[index];
  }
  StreamGate& gate() { return gate_; }
  const Pair& events(std::int64_t index) {
    while (static_cast<std::int64_t>(events_.size()) <= index) {
      Pair pair;
      check(cudaEventCreate(&pair.began), "creating an event");
      check(cudaEventCreate(&pair.ended), "creating an event");
      events_.push_back(pair);
    }
    return events_[index];
  }

 private:
  Device() { check(StreamGate::make(&gate_), "allocating the words of a hold"); }
  StreamGate gate_;
  std::vector<Pair> events_;
};

// On a device for the life of this: torch's idea of it and that of our own CUDA runtime.
class OnDevice {
 public:
  explicit OnDevice(std::int64_t index)
      : guard_(static_cast<c10::DeviceIndex>(index)),
        stream_(c10::cuda::getCurrentCUDAStream().stream()) {
    check(cudaSetDevice(static_cast<int>(index)), "choosing the device");
  }
  cudaStream_t stream() const { return stream_; }

 private:
  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_;
};

// A held stream, let go of at the latest when this ends, by an exception too.
class Hold {
 public:
  Hold(StreamGate& gate, cudaStream_t stream, double limit_s) : gate_(gate), held_(limit_s > 0) {
    if (held_) {
      check(gate_.hold(stream, limit_s), "holding the stream");
    }
  }
  ~Hold() { release(); }
  void release() {
    if (held_) {
      gate_.release();
      held_ = false;
    }
  }

 private:
  StreamGate& gate_;
  bool held_;
};

// Samples by events. With `limit_s` above 0 the stream is held, at most so long, while the first
// kHeldCalls of a sample are queued. `call` queues work on `stream`.
template <typename Call>
at::Tensor time_on_cuda(const Schedule& schedule, double limit_s, cudaStream_t stream, Call& call) {
  Device& device = Device::current();
  Samples samples(schedule);
  device.events(schedule.samples - 1);
  const bool cold = schedule.flush.defined();
  // Untimed: no sample finds an idle device or cold code. And before any hold, because what is loaded
  // at its first use may wait for the device.
  call();
  const unsigned int before = device.gate().holds();
  std::int64_t queued = 0;
  for (std::int64_t sample = 0; sample < schedule.samples; ++sample) {
    const Pair& events = device.events(sample);
    if (cold) {
      check(cudaMemsetAsync(schedule.flush.data_ptr(), 0, schedule.flush.nbytes(), stream),
            "flushing the cache");
    } else if (queued == 0 && sample > 0) {
      call();  // the device has run dry
    }
    Hold hold(device.gate(), stream, limit_s);
    check(cudaEventRecord(events.began, stream), "recording an event");
    const Clock::time_point began = Clock::now();
    for (std::int64_t i = 0; i < schedule.calls; ++i) {
      call();
      if (i + 1 == kHeldCalls) {
        hold.release();
      }
    }
    samples.set_host(sample, seconds_between(began, Clock::now()));
    check(cudaEventRecord(events.ended, stream), "recording an event");
    hold.release();
    queued += schedule.calls + 4;
    if (queued + schedule.calls > kQueuedCalls) {
      check(cudaEventSynchronize(events.ended), "waiting for a sample");
      queued = 0;
    }
  }
  check(cudaStreamSynchronize(stream), "waiting for the samples");
  TORCH_CHECK(device.gate().given_up() <= before, "harness: the stream was held for ", limit_s,
              " s, and its work was still not queued");
  for (std::int64_t sample = 0; sample < schedule.samples; ++sample) {
    float milliseconds = 0;
    const Pair& events = device.events(sample);
    check(cudaEventElapsedTime(&milliseconds, events.began, events.ended), "reading events");
    samples.set(sample, milliseconds * 1e-3);
  }
  return samples.tensor();
}

// Boxed, because a schema may say `Any[]` and a C++ signature may not.
void time_operator(const c10::OperatorHandle&, Stack* stack) {
  Arguments arguments(stack);
  const double limit_s = arguments.real();
  const c10::optional<at::Tensor> flush = arguments.optional_tensor();
  const std::int64_t calls = arguments.integer();
  const std::int64_t samples = arguments.integer();
  const std::int64_t device = arguments.integer();
  Stack inputs = arguments.list();
  const std::string overload = arguments.text();
  Operator call(arguments.text(), overload, std::move(inputs));
  const OnDevice on(device);
  stack->emplace_back(
      time_on_cuda(make_schedule(samples, calls, flush), limit_s, on.stream(), call));
}

// torch's own executable of a graph is out of reach, so this makes another from the same graph.
std::int64_t instantiate_graph(std::int64_t graph, std::int64_t device) {
  const OnDevice on(device);
  cudaGraphExec_t executable = nullptr;
  const cudaGraph_t captured = reinterpret_cast<cudaGraph_t>(graph);
#if CUDART_VERSION >= 12000
  check(cudaGraphInstantiate(&executable, captured, 0), "instantiating the graph");
#else
  check(cudaGraphInstantiate(&executable, captured, nullptr, nullptr, 0),
        "instantiating the graph");
#endif
  return reinterpret_cast<std::int64_t>(executable);
}

void destroy_graph(std::int64_t executable, std::int64_t device) {
  const OnDevice on(device);
  check(cudaGraphExecDestroy(reinterpret_cast<cudaGraphExec_t>(executable)),
        "destroying the graph");
}

at::Tensor time_graph(std::int64_t executable, std::int64_t device, std::int64_t samples,
                      std::int64_t calls, const c10::optional<at::Tensor>& flush, double limit_s) {
  const OnDevice on(device);
  const cudaGraphExec_t graph = reinterpret_cast<cudaGraphExec_t>(executable);
  const auto call = [&] { check(cudaGraphLaunch(graph, on.stream()), "launching the graph"); };
  return time_on_cuda(make_schedule(samples, calls, flush), limit_s, on.stream(), call);
}

Calibration calibration_named(const std::string& kind) {
  if (kind == "nothing") {
    return Calibration::kNothing;
  }
  if (kind == "copy") {
    return Calibration::kCopy;
  }
  if (kind == "add") {
    return Calibration::kAdd;
  }
  TORCH_CHECK(kind == "multiply-add", "harness: no calibration kernel '", kind,
              "'; there are nothing, copy, add and multiply-add");
  return Calibration::kMultiplyAdd;
}

CalibrationTask calibration_task(const std::string& kind, const at::Tensor& buffer,
                                 std::int64_t repeats) {
  const Calibration named = calibration_named(kind);
  TORCH_CHECK(buffer.is_cuda() && buffer.is_contiguous(),
              "harness: the buffer must be a contiguous CUDA tensor");
  long long least = 0;
  check(calibration_bytes(named, &least), "asking for the device");
  TORCH_CHECK(static_cast<long long>(buffer.nbytes()) >= least, "harness: the buffer has ",
              buffer.nbytes(), " bytes; '", kind, "' needs ", least, " here");
  TORCH_CHECK(repeats >= 0, "harness: repeats=", repeats);
  CalibrationTask task{named, buffer.data_ptr(), static_cast<long long>(buffer.nbytes()), repeats,
                       0};
  check(prepare(&task), "asking for the device");
  return task;
}

at::Tensor time_kernel(std::string kind, const at::Tensor& buffer, std::int64_t repeats,
                       std::int64_t samples, std::int64_t calls,
                       const c10::optional<at::Tensor>& flush, double limit_s) {
  const OnDevice on(buffer.get_device());
  const CalibrationTask task = calibration_task(kind, buffer, repeats);
  const auto call = [&] { check(launch(task, on.stream()), "launching a calibration kernel"); };
  return time_on_cuda(make_schedule(samples, calls, flush), limit_s, on.stream(), call);
}

void launch_kernel(std::string kind, const at::Tensor& buffer, std::int64_t repeats) {
  const OnDevice on(buffer.get_device());
  check(launch(calibration_task(kind, buffer, repeats), on.stream()),
        "launching a calibration kernel");
}

// What the loop above is measured against: two events around launches of an empty kernel.
at::Tensor time_bare(std::int64_t device, std::int64_t samples, std::int64_t calls) {
  const OnDevice on(device);
  const Pair& events = Device::current().events(0);
  const CalibrationTask nothing{Calibration::kNothing, nullptr, 0, 0, 1};
  const Schedule schedule = make_schedule(samples, calls, c10::nullopt);
  Samples result(schedule);
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    check(cudaEventRecord(events.began, on.stream()), "recording an event");
    const Clock::time_point began = Clock::now();
    for (std::int64_t i = 0; i < calls; ++i) {
      check(launch(nothing, on.stream()), "launching an empty kernel");
    }
    result.set_host(sample, seconds_between(began, Clock::now()));
    check(cudaEventRecord(events.ended, on.stream()), "recording an event");
    check(cudaEventSynchronize(events.ended), "waiting for a sample");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events.began, events.ended), "the bare loop");
    result.set(sample, milliseconds * 1e-3);
  }
  return result.tensor();
}

void hold_stream(std::int64_t device, double limit_s) {
  TORCH_CHECK(limit_s > 0, "harness: limit_s=", limit_s, "; a hold must end");
  const OnDevice on(device);
  check(Device::current().gate().hold(on.stream(), limit_s), "holding the stream");
}

// Whether the hold had lasted until now.
bool release_stream(std::int64_t device) {
  const OnDevice on(device);
  StreamGate& gate = Device::current().gate();
  gate.release();
  check(gate.wait(on.stream()), "waiting for the end of a hold");
  return gate.given_up() < gate.holds() || gate.holds() == 0;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def("harness_operator_cuda(str name, str overload, Any[] arguments, int device, int samples, "
        "int calls, Tensor? flush, float limit_s) -> Tensor",
        torch::CppFunction::makeFromBoxedFunction<&time_operator>());
  m.def("harness_graph_instantiate(int graph, int device) -> int", instantiate_graph);
  m.def("harness_graph_destroy(int executable, int device) -> ()", destroy_graph);
  m.def("harness_graph(int executable, int device, int samples, int calls, Tensor? flush, "
        "float limit_s) -> Tensor", time_graph);
  m.def("harness_kernel(str kind, Tensor buffer, int repeats, int samples, int calls, "
        "Tensor? flush, float limit_s) -> Tensor", time_kernel);
  m.def("harness_launch(str kind, Tensor buffer, int repeats) -> ()", launch_kernel);
  m.def("harness_bare(int device, int samples, int calls) -> Tensor", time_bare);
  m.def("harness_hold(int device, float limit_s) -> ()", hold_stream);
  m.def("harness_release(int device) -> bool", release_stream);
}

}  // namespace harness
}  // namespace narrowgauge

// For harnesses that bring a loop of their own: a launch without torch's dispatcher in it. `kind`
// is 0 nothing, 1 copy, 2 add, 3 multiply-add; the result is a cudaError_t.
extern "C" __attribute__((visibility("default"))) int narrowgauge_launch_calibration(
    int kind, void* buffer, long long bytes, long long repeats, void* stream) {
  using namespace narrowgauge::harness;
  CalibrationTask task{static_cast<Calibration>(kind), buffer, bytes, repeats, 0};
  const cudaError_t error = prepare(&task);
  return error != cudaSuccess ? error : launch(task, static_cast<cudaStream_t>(stream));
}
