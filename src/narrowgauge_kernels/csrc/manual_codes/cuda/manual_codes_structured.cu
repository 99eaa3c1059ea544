// unverified: CUDA kernels of structured 8-bit products on Volta, Turing, Ampere, Ada, Jetson | compiled for each, run on Hopper only | on such a card: nox -s gpu
// Launchers of sums of masked products. No torch header: this file compiles for any torch.
#include "manual_codes/cuda/manual_codes_structured.cuh"

#include "manual_codes/cuda/manual_codes.h"
#include "manual_codes/cuda/manual_codes_lowering.h"

namespace narrowgauge {
namespace codes {
namespace {

Sweep sweep_of(const FoldedSweep& folded, bool add) {
  return {folded.a_masks, folded.b_masks, folded.passes, folded.coefficient, folded.shift, add};
}

template <typename T, bool kASigned, bool kBSigned>
cudaError_t launch_tensor(const Lowered& task, const Sweep& sweep, const dim3& grid,
                          cudaStream_t stream) {
  const auto kernel = structured_products<T, kASigned, kBSigned>;
  const cudaError_t error = allow_shared(kernel, T::kBytes);
  if (error != cudaSuccess) {
    return error;
  }
  return enqueue(kernel, grid, T::kThreads, T::kBytes, stream, task, sweep);
}

template <bool kASigned, bool kBSigned>
cudaError_t launch_signed(const Lowered& task, const Sweep& sweep, const Plan& plan,
                          const dim3& grid, cudaStream_t stream) {
  if (plan.path == Path::kTensor) {
    return plan.tile == 0 ? launch_tensor<Large, kASigned, kBSigned>(task, sweep, grid, stream)
                          : launch_tensor<Small, kASigned, kBSigned>(task, sweep, grid, stream);
  }
  return enqueue(dotted_products<kASigned, kBSigned>, grid, kDotThreads, 0, stream, task, sweep);
}

}  // namespace

cudaError_t launch_structured(const Geometry& geometry, const Operands& operands,
                              const std::vector<FoldedSweep>& sweeps, const Plan& plan,
                              cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (plan.splits > 1 || sweeps.empty()) {
    error = clear(geometry, operands, stream);
  }
  const Lowered task = lower(geometry, operands, plan);
  const dim3 grid = grid_of(geometry, plan);
  for (std::size_t i = 0; i < sweeps.size() && error == cudaSuccess; ++i) {
    const Sweep sweep = sweep_of(sweeps[i], plan.splits > 1 || i > 0);
    if (operands.a_signed) {
      error = operands.b_signed ? launch_signed<true, true>(task, sweep, plan, grid, stream)
                                : launch_signed<true, false>(task, sweep, plan, grid, stream);
    } else {
      error = operands.b_signed ? launch_signed<false, true>(task, sweep, plan, grid, stream)
                                : launch_signed<false, false>(task, sweep, plan, grid, stream);
    }
  }
  return error;
}

}  // namespace codes
}  // namespace narrowgauge
