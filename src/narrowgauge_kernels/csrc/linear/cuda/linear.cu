// unverified: CUDA linear operator on Volta, Turing, Ampere, Ada, Jetson | compiled for each, run on Hopper only | on such a card: nox -s gpu
// Launchers of the linear operator. No torch header: this file compiles in seconds, for any torch.
#include "linear/cuda/linear.cuh"

#include "linear/cuda/linear.h"

namespace narrowgauge {
namespace linear {
namespace {

constexpr long long kGridLimit = 2147483647;  // of the x dimension, on every capability since 3.0

template <typename T>
Operand<T> typed(const DeviceOperand& operand) {
  return {static_cast<const T*>(operand.data), operand.extent, operand.stride,
          operand.depth_stride};
}

template <typename T>
cudaError_t launch(const DeviceOperand& left, const DeviceOperand& right, const void* bias,
                   void* out, long long depth, cudaStream_t stream) {
  const Task<T> task{typed<T>(left), typed<T>(right), static_cast<const T*>(bias),
                     static_cast<T*>(out), depth};
  const long long tiles = tiles_along(left.extent, kSide) * tiles_along(right.extent, kSide);
  const unsigned int blocks = static_cast<unsigned int>(tiles < kGridLimit ? tiles : kGridLimit);
  multiply_accumulate<T, kSide, kStep, kThreads><<<blocks, kThreads * kThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_multiply_accumulate(Element element, const DeviceOperand& left,
                                       const DeviceOperand& right, const void* bias, void* out,
                                       long long depth, cudaStream_t stream) {
  if (left.extent == 0 || right.extent == 0) {
    return cudaSuccess;
  }
  switch (element) {
    case Element::kFloat32:
      return launch<float>(left, right, bias, out, depth, stream);
    case Element::kFloat64:
      return launch<double>(left, right, bias, out, depth, stream);
    case Element::kFloat16:
      return launch<Half>(left, right, bias, out, depth, stream);
    case Element::kBFloat16:
      return launch<BFloat16>(left, right, bias, out, depth, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace linear
}  // namespace narrowgauge
