// unverified: CUDA kernels of 8-bit products by a lookup each on Volta, Turing, Ampere, Ada, Jetson | compiled for each, run on Hopper only | on such a card: nox -s gpu
// Launchers of products by a lookup each, and what launchers ask a device. No torch header.
#include "manual_codes/cuda/manual_codes_direct.cuh"

#include "manual_codes/cuda/manual_codes.h"
#include "manual_codes/cuda/manual_codes_lowering.h"

namespace narrowgauge {
namespace codes {
namespace {

// Threads that keep a multiprocessor busy, and the least that one of them is started for.
constexpr std::int64_t kBusyThreads = 2048;
constexpr std::int64_t kLeastDepth = 32;
constexpr std::int64_t kMostSplits = 1024;

DirectTask direct_task(const Geometry& geometry, const Operands& operands, const int* table) {
  DirectTask task{};
  task.x = static_cast<const unsigned char*>(operands.x);
  task.weight = static_cast<const unsigned char*>(operands.weight);
  task.table = table;
  task.out = operands.out;
  task.x_image = operands.x_strides[0];
  task.x_channel = operands.x_strides[1];
  task.x_row = operands.x_strides[2];
  task.x_column = operands.x_strides[3];
  task.weight_output = operands.weight_strides[0];
  task.weight_channel = operands.weight_strides[1];
  task.weight_row = operands.weight_strides[2];
  task.weight_column = operands.weight_strides[3];
  task.pixels = geometry.pixels();
  task.out_pixels = geometry.out_height * geometry.out_width;
  task.out_width = geometry.out_width;
  task.outputs = geometry.out_channels;
  task.group_outputs = geometry.group_outputs();
  task.out_image = out_image_of(geometry);
  task.out_channel = operands.rows ? 1 : task.out_pixels;
  task.out_pixel = operands.rows ? geometry.out_channels : 1;
  task.channels = geometry.group_channels();
  task.height = geometry.height;
  task.width = geometry.width;
  task.kernel_height = geometry.kernel_height;
  task.kernel_width = geometry.kernel_width;
  task.stride_h = geometry.stride[0];
  task.stride_w = geometry.stride[1];
  task.padding_h = geometry.padding[0];
  task.padding_w = geometry.padding[1];
  task.dilation_h = geometry.dilation[0];
  task.dilation_w = geometry.dilation[1];
  task.padding_code = operands.padding_code;
  return task;
}

}  // namespace

cudaError_t machine_of(int device, Machine& machine) {
  int major = 0;
  int minor = 0;
  const struct {
    int* value;
    cudaDeviceAttr name;
  } wanted[] = {
      {&major, cudaDevAttrComputeCapabilityMajor},
      {&minor, cudaDevAttrComputeCapabilityMinor},
      {&machine.multiprocessors, cudaDevAttrMultiProcessorCount},
      {&machine.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
  };
  for (const auto& each : wanted) {
    const cudaError_t error = cudaDeviceGetAttribute(each.value, each.name, device);
    if (error != cudaSuccess) {
      return error;
    }
  }
  machine.capability = 10 * major + minor;
  return cudaSuccess;
}

cudaError_t launch_tabulate(const std::vector<FoldedSweep>& sweeps, bool a_signed, bool b_signed,
                            unsigned int* prepared, cudaStream_t stream) {
  int* const table = reinterpret_cast<int*>(prepared) + kWideOffset;
  cudaError_t error = cudaSuccess;
  if (sweeps.empty()) {
    error = cudaMemsetAsync(table, 0, 256 * 256 * sizeof(int), stream);
  }
  for (std::size_t i = 0; i < sweeps.size() && error == cudaSuccess; ++i) {
    const Sweep sweep{sweeps[i].a_masks,     sweeps[i].b_masks, sweeps[i].passes,
                      sweeps[i].coefficient, sweeps[i].shift,   i > 0};
    error = enqueue(tabulate_sweep<kDirectThreads>, dim3(256), kDirectThreads, 0, stream, sweep,
                    a_signed, b_signed, table);
  }
  return error;
}

cudaError_t launch_direct(const Geometry& geometry, const Operands& operands,
                          const unsigned int* prepared, const Machine& machine,
                          cudaStream_t stream) {
  DirectTask task =
      direct_task(geometry, operands, reinterpret_cast<const int*>(prepared) + kWideOffset);
  const std::int64_t outputs = task.pixels * task.outputs;
  const std::int64_t busy = machine.multiprocessors * kBusyThreads;
  const std::int64_t wanted = std::min(divided_up(busy, outputs),
                                       divided_up(geometry.depth(), kLeastDepth));
  task.split_depth = divided_up(
      geometry.depth(), std::max<std::int64_t>(1, std::min<std::int64_t>(wanted, kMostSplits)));
  const std::int64_t splits = divided_up(geometry.depth(), task.split_depth);
  const std::int64_t blocks =
      std::min<std::int64_t>(divided_up(outputs, kDirectThreads), (std::int64_t(1) << 31) - 1);
  const cudaError_t error = splits > 1 ? clear(geometry, operands, stream) : cudaSuccess;
  if (error != cudaSuccess) {
    return error;
  }
  const dim3 grid(static_cast<unsigned int>(blocks), static_cast<unsigned int>(splits));
  return enqueue(direct_products<kDirectThreads>, grid, kDirectThreads, 0, stream, task);
}

}  // namespace codes
}  // namespace narrowgauge
