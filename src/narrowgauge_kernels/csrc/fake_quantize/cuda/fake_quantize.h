// The launcher of fake_quantize.cu for a host compiler: raw pointers and a stream, no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include "common/cuda/element.h"

namespace narrowgauge {
namespace fake_quantize {

// Elements in order of memory; element i is of channel (i / inner) % channels. grad is null for the
// forward pass. scale and zero_point have `channels` elements.
struct DeviceTask {
  const void* x;
  const void* grad;
  void* out;
  const float* scale;
  const int* zero_point;
  long long count;
  long long inner;
  long long channels;
  int quant_min;
  int quant_max;
};

// Enqueues the forward pass, or the backward one where grad is given, on `stream` of the current
// device. count 0 launches nothing. The result says whether the launch was accepted; a later fault
// shows at the stream's next use.
cudaError_t launch_fake_quantize(Element element, const DeviceTask& task, cudaStream_t stream);

}  // namespace fake_quantize
}  // namespace narrowgauge
