// The launcher of manual_float.cu for a host compiler: raw pointers and a stream, no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include "manual_float/manual_float.h"
#include "manual_float/cuda/manual_float_plan.h"

namespace narrowgauge {
namespace manual_float {

// The sizes and strides of a problem. out is contiguous or channels last.
inline Convolution convolution_of(const manual::Problem& problem) {
  const manual::Strides& out = problem.out_strides;
  const bool contiguous = out.column == 1 && out.row == problem.out_width &&
                          out.channel == problem.out_height * problem.out_width;
  return {problem.images,
          problem.groups,
          problem.channels,
          problem.filters,
          problem.height,
          problem.width,
          problem.kernel_height,
          problem.kernel_width,
          problem.out_height,
          problem.out_width,
          problem.stride[0],
          problem.stride[1],
          problem.padding[0],
          problem.padding[1],
          problem.dilation[0],
          problem.dilation[1],
          problem.x_strides.image,
          problem.x_strides.channel,
          problem.x_strides.row,
          problem.x_strides.column,
          problem.weight_strides.image,
          problem.weight_strides.channel,
          problem.weight_strides.row,
          problem.weight_strides.column,
          !contiguous};
}

// What plan_for asks of a policy: issue slots of the inner loop of sm_90 per product, from its
// disassembly; of chunks without NaN.
inline Cost cost_of(manual::Policy policy) {
  switch (policy) {
    case manual::Policy::kExactFp32:
    case manual::Policy::kTruncated:
      return {1.25, Family::kLight};
    case manual::Policy::kMitchell:
      return {3.9, Family::kMiddle};
    case manual::Policy::kAxbf16:
      return {9.8, Family::kHeavy};
    default:
      return {10.8, Family::kHeavy};
  }
}

// How many multiprocessors the current device has.
cudaError_t multiprocessors(int* count);

// Enqueues the task, two kernels where its plan splits the depth, on `stream` of the current device.
// The policy is none of kCustom's. An empty result, or an empty sum, is the caller's. The result says
// whether the launches were accepted; a later fault shows at the stream's next use.
cudaError_t launch_manual(manual::Policy policy, const Task& task, cudaStream_t stream);

// The same of a compiled functor's library (see manual_float_launch.h), under this name.
using LaunchCustom = cudaError_t (*)(const Task* task, cudaStream_t stream);
constexpr char kLaunchCustom[] = "narrowgauge_manual_launch_cuda";

}  // namespace manual_float
}  // namespace narrowgauge
