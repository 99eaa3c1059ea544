// The launchers of position_conv.cu and position_list.cu for a host compiler: raw pointers and a
// stream, no torch header. Each enqueues its work on `stream` of the current device, and waits for
// nothing; the result says whether the launch was accepted, a later fault shows at the stream's next
// use.
#pragma once

#include <cuda_runtime_api.h>

#include "position_conv/cuda/position_conv_task.h"

namespace narrowgauge {
namespace position_conv {

// The convolution. The task says all but first_filter, panels and quads_out. Nothing listed launches
// nothing.
cudaError_t launch_position_conv(const Task& task, cudaStream_t stream);

// How many counts a list of so many flags needs room for.
long long list_counts(long long cells);

// The list of flags. The task says all but quads.
cudaError_t launch_list(const ListTask& task, cudaStream_t stream);

// The flags, all of them: those of others become 0.
cudaError_t launch_near(const NearTask& task, cudaStream_t stream);

}  // namespace position_conv
}  // namespace narrowgauge
