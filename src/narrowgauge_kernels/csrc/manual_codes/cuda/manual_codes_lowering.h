// From a geometry to what kernels take; host code of the launchers.
#pragma once

#include <cstddef>

#include "manual_codes/cuda/manual_codes.h"
#include "manual_codes/cuda/manual_codes_lowered.h"

namespace narrowgauge {
namespace codes {

inline long long out_image_of(const Geometry& geometry) {
  return geometry.out_channels * geometry.out_height * geometry.out_width;
}

inline Lowered lower(const Geometry& geometry, const Operands& operands, const Plan& plan) {
  const std::int64_t channels = padded_channels(geometry);
  const std::int64_t out_pixels = geometry.out_height * geometry.out_width;
  Lowered task{};
  task.x = static_cast<const unsigned char*>(operands.x);
  task.weight = static_cast<const unsigned char*>(operands.weight);
  task.out = operands.out;
  task.pixels = geometry.pixels();
  task.pixel_bytes = channels * geometry.groups;
  task.image_bytes = geometry.height * geometry.width * task.pixel_bytes;
  task.out_image = out_image_of(geometry);
  task.out_channel = operands.rows ? 1 : out_pixels;
  task.out_pixel = operands.rows ? geometry.out_channels : 1;
  task.height = static_cast<int>(geometry.height);
  task.width = static_cast<int>(geometry.width);
  task.out_width = static_cast<int>(geometry.out_width);
  task.out_pixels = static_cast<int>(out_pixels);
  task.kernel_width = static_cast<int>(geometry.kernel_width);
  task.stride_h = static_cast<int>(geometry.stride[0]);
  task.stride_w = static_cast<int>(geometry.stride[1]);
  task.padding_h = static_cast<int>(geometry.padding[0]);
  task.padding_w = static_cast<int>(geometry.padding[1]);
  task.dilation_h = static_cast<int>(geometry.dilation[0]);
  task.dilation_w = static_cast<int>(geometry.dilation[1]);
  task.channels = static_cast<int>(channels);
  task.true_channels = static_cast<int>(geometry.group_channels());
  task.outputs = static_cast<int>(geometry.group_outputs());
  task.depth = static_cast<int>(channels * geometry.kernel_height * geometry.kernel_width);
  task.split_depth = plan.split_depth;
  task.true_depth = static_cast<int>(geometry.depth());
  task.fill = static_cast<unsigned int>(operands.padding_code) * 0x01010101u;
  return task;
}

inline dim3 grid_of(const Geometry& geometry, const Plan& plan) {
  return dim3(static_cast<unsigned int>(plan.tiles), static_cast<unsigned int>(plan.splits),
              static_cast<unsigned int>(geometry.groups));
}

inline cudaError_t clear(const Geometry& geometry, const Operands& operands,
                         cudaStream_t stream) {
  const std::int64_t count = geometry.batch * out_image_of(geometry);
  return cudaMemsetAsync(operands.out, 0, static_cast<std::size_t>(count) * sizeof(int), stream);
}

template <typename Kernel>
inline cudaError_t allow_shared(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// That a multiprocessor keep no more than `bytes` of its memory as shared memory: a hint.
template <typename Kernel>
inline cudaError_t prefer_shared(Kernel kernel, int bytes) {
  int device = 0;
  int all = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  if (error != cudaSuccess) {
    return error;
  }
  const int percent = static_cast<int>(divided_up(std::int64_t(bytes) * 100, all));
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              percent < 100 ? percent : 100);
}

#ifndef NARROWGAUGE_EMULATED_THREADS

template <typename Kernel, typename... Arguments>
inline cudaError_t enqueue(Kernel kernel, const dim3& grid, int threads, int shared_bytes,
                           cudaStream_t stream, const Arguments&... arguments) {
  kernel<<<grid, static_cast<unsigned int>(threads), static_cast<std::size_t>(shared_bytes),
           stream>>>(arguments...);
  return cudaGetLastError();
}

#endif  // NARROWGAUGE_EMULATED_THREADS

}  // namespace codes
}  // namespace narrowgauge
