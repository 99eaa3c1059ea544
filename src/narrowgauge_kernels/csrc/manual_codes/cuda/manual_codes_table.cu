// unverified: CUDA kernels of 8-bit products by table on Volta, Turing, Ampere, Ada, Jetson | compiled for each, run on Hopper only | on such a card: nox -s gpu
// Launchers of products by table. No torch header: this file compiles for any torch.
#include "manual_codes/cuda/manual_codes_table.cuh"

#include "manual_codes/cuda/manual_codes.h"
#include "manual_codes/cuda/manual_codes_lowering.h"

namespace narrowgauge {
namespace codes {
namespace {

// A table that spans less than 2^16 has 16-bit entries. Up to here it does, whatever its signs.
constexpr std::int64_t kSurelyNarrow = 32767;

template <typename S>
cudaError_t launch_shape(const Lowered& task, const unsigned int* prepared, const dim3& grid,
                         cudaStream_t stream) {
  const auto kernel = table_products<S>;
  cudaError_t error = allow_shared(kernel, S::kBytes);
  if (error == cudaSuccess) {
    error = prefer_shared(kernel, S::kBytes + 1024);  // 1 KB is the system's, from 8.0 on
  }
  if (error != cudaSuccess) {
    return error;
  }
  return enqueue(kernel, grid, kTableThreads, S::kBytes, stream, task, prepared);
}

template <bool kWide>
cudaError_t launch_entries(const Geometry& geometry, const Operands& operands, const Plan& plan,
                           const unsigned int* prepared, cudaStream_t stream) {
  // A tile of 32-bit entries has half the channels.
  constexpr int kChannels = TableShape<kWide, 1, 1>::kChannels;
  const std::int64_t channel_tiles = divided_up(geometry.group_outputs(), kChannels);
  Plan own = plan;
  own.tiles = plan.tiles / divided_up(geometry.group_outputs(), kOutputPad) * channel_tiles;
  const Lowered task = lower(geometry, operands, plan);
  const dim3 grid = grid_of(geometry, own);
  switch (plan.tile) {
    case 0:
      return launch_shape<Table96K<kWide>>(task, prepared, grid, stream);
    case 1:
      return launch_shape<Table92K<kWide>>(task, prepared, grid, stream);
    case 2:
      return launch_shape<Table64K<kWide>>(task, prepared, grid, stream);
    default:
      return launch_shape<Table48K<kWide>>(task, prepared, grid, stream);
  }
}

}  // namespace

static_assert(kOutputPad == kChannelPad, "weights are packed for the kernel");

long long prepared_words() { return kTableWords; }

cudaError_t launch_prepare(const int* table, bool a_signed, bool b_signed, std::int64_t largest,
                           Path path, unsigned int* prepared, cudaStream_t stream) {
  const bool surely_narrow = largest <= kSurelyNarrow;
  return enqueue(prepare_table<kPrepareThreads>, dim3(kPrepareBlocks), kPrepareThreads, 0, stream,
                 table, a_signed ? 128 : 0, b_signed ? 128 : 0,
                 surely_narrow ? static_cast<int>(largest) : -1,
                 !surely_narrow || path == Path::kDirect, prepared);
}

cudaError_t launch_table(const Geometry& geometry, const Operands& operands,
                         const unsigned int* prepared, std::int64_t largest, const Plan& plan,
                         cudaStream_t stream) {
  cudaError_t error = plan.splits > 1 ? clear(geometry, operands, stream) : cudaSuccess;
  if (error == cudaSuccess) {
    error = launch_entries<false>(geometry, operands, plan, prepared, stream);
  }
  // Where only the device knows the table's range, the kernel that it is not for returns at once.
  if (error == cudaSuccess && largest > kSurelyNarrow) {
    error = launch_entries<true>(geometry, operands, plan, prepared, stream);
  }
  return error;
}

}  // namespace codes
}  // namespace narrowgauge
