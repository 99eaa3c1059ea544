// The launchers of wire.cu for a host compiler: raw pointers and a stream, no torch header. Every
// pointer is one that the current device can use; memory of the host may be mapped.
#pragma once

#include <cuda_runtime_api.h>

#include "common/cuda/element.h"

namespace narrowgauge {
namespace wire {

// Elements in order of memory. With `rows`, element i is of channel i % channels, else of
// (i / spatial) % channels; its index is that of [samples, channels, spatial] either way.
struct Extent {
  long long samples;
  long long channels;
  long long spatial;
  bool rows;
};

struct PackTask {
  const void* x;
  signed char* values;
  float* scale;
  int* largest;  // `workspace_of` numbers in the device's own memory
  Extent extent;
  bool drawing;
  unsigned long long seed;
  unsigned long long first;
};

struct UnpackTask {
  const signed char* values;
  const float* scale;
  void* out;
  Extent extent;
  bool mapped;  // the values lie in the host's memory
};

// How many numbers `launch_pack` needs in `largest`; 0 where a block sees a whole channel.
long long workspace_of(const Extent& extent);

// Each enqueues its work on `stream` of the current device, and nothing where there are no elements.
// The result says whether it was accepted; a later fault shows at the stream's next use. Element is
// that of x, or out: not float64.
cudaError_t launch_pack(Element element, const PackTask& task, cudaStream_t stream);
cudaError_t launch_unpack(Element element, const UnpackTask& task, cudaStream_t stream);
cudaError_t launch_copy(const void* x, void* out, long long bytes, cudaStream_t stream);

}  // namespace wire
}  // namespace narrowgauge
