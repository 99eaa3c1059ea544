// The launcher of linear.cu for a host compiler: raw pointers and a stream, no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include "common/cuda/element.h"

namespace narrowgauge {
namespace linear {

// A matrix of rows (or columns) by depth in device memory; strides in elements, 0 allowed.
struct DeviceOperand {
  const void* data;
  long long extent;
  long long stride;
  long long depth_stride;
};

// Enqueues out[left.extent, right.extent] = left × rightᵀ (+ bias) on `stream` of the current
// device. bias is null or right.extent long; out is contiguous. An empty output launches nothing.
// The result says whether the launch was accepted; a later fault shows at the stream's next use.
cudaError_t launch_multiply_accumulate(Element element, const DeviceOperand& left,
                                       const DeviceOperand& right, const void* bias, void* out,
                                       long long depth, cudaStream_t stream);

}  // namespace linear
}  // namespace narrowgauge
