// unverified: CUDA fake-quantise operator on Volta, Turing, Ampere, Ada, Jetson | compiled for each, run on Hopper only | on such a card: nox -s gpu
// Launchers of the fake-quantise operator. No torch header: this file compiles for any torch.
#include "fake_quantize/cuda/fake_quantize.cuh"

#include <cstdint>
#include <type_traits>

#include "fake_quantize/cuda/fake_quantize.h"

namespace narrowgauge {
namespace fake_quantize {
namespace {

// So many threads keep the memory of a large GPU busy; more would share out the same bytes and make
// each channel's parameters more often.
constexpr long long kBusy = 1LL << 18;
constexpr long long kRowsEach = 16;

long long divide_up(long long value, long long by) { return (value + by - 1) / by; }

bool aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

template <typename T, int Lanes, bool Backward>
cudaError_t launch_flat(const Task<T>& task, cudaStream_t stream) {
  const long long packs = divide_up(task.count, Lanes);
  const long long blocks = divide_up(packs, kThreads * kPacks);
  fake_quantize_flat<T, Lanes, Backward>
      <<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

template <typename T, bool Backward>
cudaError_t launch_rows(const Task<T>& task, cudaStream_t stream) {
  const long long wide = task.channels / kLanes<T>;
  const long long rows = task.count / task.channels;
  const long long enough = divide_up(kBusy, wide);
  const long long few = divide_up(rows, kRowsEach);
  const long long wanted = few > enough ? few : enough;
  const long long rows_at_once = wanted < rows ? wanted : rows;
  const long long blocks = divide_up(rows_at_once * wide, kThreads);
  fake_quantize_rows<T, Backward>
      <<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(task, rows_at_once);
  return cudaGetLastError();
}

template <typename T, bool Backward>
cudaError_t launch_wide(const Task<T>& task, cudaStream_t stream, std::false_type) {
  return launch_flat<T, 1, Backward>(task, stream);
}

// By 16 bytes at once, where the run of a channel allows it.
template <typename T, bool Backward>
cudaError_t launch_wide(const Task<T>& task, cudaStream_t stream, std::true_type) {
  if (task.channels > 1 && task.inner == 1 && task.channels % kLanes<T> == 0) {
    return launch_rows<T, Backward>(task, stream);
  }
  if (task.channels > 1 && task.inner < kLanes<T>) {
    return launch_flat<T, 1, Backward>(task, stream);
  }
  return launch_flat<T, kLanes<T>, Backward>(task, stream);
}

template <typename T, bool Backward>
cudaError_t launch(const DeviceTask& raw, cudaStream_t stream) {
  const Task<T> task{static_cast<const T*>(raw.x), static_cast<const T*>(raw.grad),
                     static_cast<T*>(raw.out),     raw.scale,
                     raw.zero_point,               raw.count,
                     raw.inner,                    raw.channels,
                     raw.quant_min,                raw.quant_max};
  if (!aligned(raw.x) || !aligned(raw.grad) || !aligned(raw.out)) {
    return launch_flat<T, 1, Backward>(task, stream);
  }
  return launch_wide<T, Backward>(task, stream, std::integral_constant<bool, (kLanes<T> > 1)>());
}

template <typename T>
cudaError_t launch(const DeviceTask& task, cudaStream_t stream) {
  return task.grad == nullptr ? launch<T, false>(task, stream) : launch<T, true>(task, stream);
}

}  // namespace

cudaError_t launch_fake_quantize(Element element, const DeviceTask& task, cudaStream_t stream) {
  if (task.count == 0) {
    return cudaSuccess;
  }
  switch (element) {
    case Element::kFloat32:
      return launch<float>(task, stream);
    case Element::kFloat64:
      return launch<double>(task, stream);
    case Element::kFloat16:
      return launch<Half>(task, stream);
    case Element::kBFloat16:
      return launch<BFloat16>(task, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fake_quantize
}  // namespace narrowgauge
