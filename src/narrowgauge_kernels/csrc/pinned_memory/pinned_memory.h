// What kernels that work on memory of the host tell the pinned pool.
#pragma once

#include <cuda_runtime_api.h>

#include "common/torch_tensor.h"

namespace narrowgauge {
namespace pinned {

// Memory of a CPU tensor of the pool is not used again before `stream`, of the current device, has
// done what is queued now; never again where the stream is being captured. Whether it is such a
// tensor: any other is left alone.
bool keep_until_done(const at::Tensor& tensor, cudaStream_t stream);

// For calls that change nothing on a stream: while this thread, or another, captures a graph, they
// would otherwise end the capture.
class OutsideOfCapture {
 public:
  OutsideOfCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideOfCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideOfCapture(const OutsideOfCapture&) = delete;
  OutsideOfCapture& operator=(const OutsideOfCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace pinned
}  // namespace narrowgauge
