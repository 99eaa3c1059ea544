// The pinned pool on CUDA. c10/cuda headers only, because ATen/cuda needs the headers of cuBLAS,
// cuSPARSE and cuSOLVER, which images leave out.
#include "pinned_memory/pinned_memory.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <system_error>
#include <thread>
#include <vector>

#include "pinned_memory/pinned_allocator.h"

namespace narrowgauge {
namespace pinned {
namespace {

// The wording torch gives it, by which the device's own faults are told from a program's.
void check(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error), " (pinned: ", what,
              ")");
}

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(int device) : device_(device) {}

  void* allocate(std::size_t bytes) override {
    void* pointer = nullptr;
    const bool called = on_device([&] {
      if (cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable | cudaHostAllocMapped) !=
          cudaSuccess) {
        pointer = nullptr;
        cudaGetLastError();  // which would be found by whoever looks next
      }
    });
    return called ? pointer : nullptr;
  }

  bool has_passed(Mark mark) override {
    bool passed = false;
    on_device([&] {
      const cudaEvent_t event = static_cast<cudaEvent_t>(mark);
      passed = cudaEventQuery(event) == cudaSuccess && cudaEventDestroy(event) == cudaSuccess;
      if (!passed) {
        cudaGetLastError();
      }
    });
    return passed;
  }

 private:
  // Where another device is current (0 in a thread that never chose one) a call would make a context
  // there, and keep some of its memory. So it is made in a thread of its own: rarely, because who
  // computes on a device has chosen it. False where there is no thread to be had.
  template <typename Call>
  bool on_device(const Call& call) const {
    int current = -1;
    if (cudaGetDevice(&current) == cudaSuccess && current == device_) {
      const OutsideOfCapture relaxed;
      call();
      return true;
    }
    bool called = false;
    try {
      std::thread([&] {
        if (cudaSetDevice(device_) == cudaSuccess) {
          const OutsideOfCapture relaxed;
          call();
          called = true;
        }
      }).join();
    } catch (const std::system_error&) {
      return false;
    }
    return called;
  }

  const int device_;
};

std::size_t bytes_of(std::int64_t limit) {
  TORCH_CHECK(limit >= 0, "pinned: limit_bytes=", limit, "; it must not be negative");
  return static_cast<std::size_t>(limit);
}

// A second time it changes the limit. The first block shows whether the driver gives any.
void install(std::int64_t limit, std::int64_t device) {
  const std::size_t bytes = bytes_of(limit);
  if (PinnedAllocator::current() != nullptr) {
    PinnedAllocator::current()->pool().set_limit(bytes);
    return;
  }
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  check(cudaSetDevice(static_cast<int>(device)), "choosing the device");
  void* probe = nullptr;
  check(cudaHostAlloc(&probe, kLeastBlock, cudaHostAllocPortable | cudaHostAllocMapped),
        "asking for page-locked memory");
  check(cudaFreeHost(probe), "giving page-locked memory back");
  PinnedAllocator::install(*new CudaDriver(static_cast<int>(device)), bytes);
}

std::vector<std::int64_t> statistics() {
  TORCH_CHECK(PinnedAllocator::current() != nullptr, "pinned: no pool is installed");
  const Statistics now = PinnedAllocator::current()->pool().statistics();
  std::vector<std::int64_t> numbers;
  for (const std::size_t each : {now.held, now.used, now.peak, now.limit, now.pageable_bytes,
                                 now.pageable_allocations}) {
    numbers.push_back(static_cast<std::int64_t>(each));
  }
  return numbers;
}

bool keep(const at::Tensor& tensor, std::int64_t device, std::int64_t stream) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  return keep_until_done(tensor, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

bool keep_until_done(const at::Tensor& tensor, cudaStream_t stream) {
  if (PinnedAllocator::current() == nullptr || !tensor.device().is_cpu()) {
    return false;
  }
  Pool& pool = PinnedAllocator::current()->pool();
  const void* block = tensor.storage().data_ptr().get();
  if (!pool.owns(block)) {
    return false;
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "asking whether a stream is captured");
  if (status != cudaStreamCaptureStatusNone) {
    pool.abandon(block);
    return true;
  }
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  check(cudaEventRecord(event, stream), "recording an event");
  pool.keep_until(block, event);
  return true;
}

TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def("pinned_install(int limit_bytes, int device) -> ()", install);
  m.def("pinned_statistics() -> int[]", statistics);
  m.def("pinned_keep(Tensor tensor, int device, int stream) -> bool", keep);
}

}  // namespace pinned
}  // namespace narrowgauge
