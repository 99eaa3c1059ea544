// unverified: timing loop on Volta, Turing, Ampere, Ada, Jetson | compiled for each, run on Hopper only | on such a card: nox -s gpu
// Launchers of the timing loop's kernels. No torch header: this compiles in seconds, for any torch.
#include "harness/cuda/harness.cuh"

#include "harness/cuda/harness.h"

namespace narrowgauge {
namespace harness {
namespace {

using DeviceGate = Gate<unsigned int>;

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;  // of 256 threads: what a multiprocessor can hold

cudaError_t processors(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess
             ? error
             : cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

long long words_of(const CalibrationTask& task) {
  return task.bytes / 2 / static_cast<long long>(sizeof(float4));
}

}  // namespace

cudaError_t StreamGate::make(StreamGate* gate) {
  void* words = nullptr;
  cudaError_t error = cudaHostAlloc(&words, sizeof(DeviceGate), cudaHostAllocMapped);
  if (error != cudaSuccess) {
    return error;
  }
  error = cudaHostGetDevicePointer(&gate->on_device_, words, 0);
  if (error != cudaSuccess) {
    return error;
  }
  DeviceGate* const host = static_cast<DeviceGate*>(words);
  *host = DeviceGate{0, 0, 0};
  gate->released_ = &host->released;
  gate->ended_ = &host->ended;
  gate->given_up_ = &host->given_up;
  return cudaSuccess;
}

cudaError_t StreamGate::hold(cudaStream_t stream, double limit_s) {
  const auto limit_ns = static_cast<unsigned long long>(limit_s * 1e9);
  harness::hold<unsigned int><<<1, 1, 0, stream>>>(
      static_cast<volatile DeviceGate*>(on_device_), holds_ + 1, limit_ns);
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) {
    ++holds_;
  }
  return error;
}

void StreamGate::release() { *released_ = holds_; }

cudaError_t StreamGate::wait(cudaStream_t stream) const {
  while (*ended_ < holds_) {
    const cudaError_t error = cudaStreamQuery(stream);
    if (error != cudaErrorNotReady && error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

unsigned int StreamGate::given_up() const { return *given_up_; }

cudaError_t calibration_bytes(Calibration kind, long long* bytes) {
  int count = 0;
  const cudaError_t error = processors(&count);
  switch (kind) {
    case Calibration::kNothing:
      *bytes = 0;
      break;
    case Calibration::kMultiplyAdd:
      *bytes = static_cast<long long>(count) * kThreads * static_cast<long long>(sizeof(float));
      break;
    default:
      *bytes = 2 * static_cast<long long>(sizeof(float4));
  }
  return error;
}

cudaError_t prepare(CalibrationTask* task) {
  int count = 0;
  const cudaError_t error = processors(&count);
  if (task->kind == Calibration::kMultiplyAdd) {
    task->blocks = count;
  } else {
    const long long wanted = (words_of(*task) + kThreads - 1) / kThreads;
    const long long most = static_cast<long long>(count) * kBlocksPerProcessor;
    task->blocks = static_cast<int>(wanted < most ? wanted : most);
  }
  return error;
}

cudaError_t launch(const CalibrationTask& task, cudaStream_t stream) {
  float4* const words = static_cast<float4*>(task.buffer);
  const long long count = words_of(task);
  switch (task.kind) {
    case Calibration::kNothing:
      nothing<32><<<1, 32, 0, stream>>>();
      break;
    case Calibration::kCopy:
      copy<float4><<<task.blocks, kThreads, 0, stream>>>(words, words + count, count, task.repeats);
      break;
    case Calibration::kAdd:
      add<float4><<<task.blocks, kThreads, 0, stream>>>(words, words + count, count, task.repeats);
      break;
    case Calibration::kMultiplyAdd:
      multiply_add_chain<float><<<task.blocks, kThreads, 0, stream>>>(
          static_cast<float*>(task.buffer), task.repeats);
      break;
  }
  return cudaGetLastError();
}

}  // namespace harness
}  // namespace narrowgauge
