// unverified: manual layers' CUDA kernels on Volta, Turing, Ampere, Ada, Jetson | compiled for each, run on Hopper only | on such a card: nox -s gpu
// Launchers of the manual convolution and linear layer. No torch header: for any torch.
#include "manual_float/cuda/manual_float_launch.h"

namespace narrowgauge {
namespace manual_float {

cudaError_t multiprocessors(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess
             ? error
             : cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

cudaError_t launch_manual(manual::Policy policy, const Task& task, cudaStream_t stream) {
  switch (policy) {
    case manual::Policy::kExactFp32:
    case manual::Policy::kTruncated:
      return launch_light<mac::Truncated>(task, stream);
    case manual::Policy::kAxfpmFaithful:
      return launch_heavy<mac::AxfpmFaithful>(task, stream);
    case manual::Policy::kAxfpmFixed:
      return launch_heavy<mac::AxfpmFixed>(task, stream);
    case manual::Policy::kAxbf16:
      return launch_heavy<mac::Axbf16>(task, stream);
    case manual::Policy::kMitchell:
      return launch_middle<mac::Mitchell>(task, stream);
    case manual::Policy::kCustom:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace manual_float
}  // namespace narrowgauge
