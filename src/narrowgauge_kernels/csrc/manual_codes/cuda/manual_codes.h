// The launchers of the kernels over 8-bit codes, for a host compiler: raw pointers and a stream, no
// torch header. Each enqueues its work on `stream` of the current device; the result says whether it
// was accepted, and a later fault shows at the stream's next use. No extent is 0.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "manual_codes/cuda/manual_codes_plan.h"

namespace narrowgauge {
namespace codes {

// Tensors on the device. Strides of x and weight are in bytes; out, int32, has no gaps.
//
// Operands of the tiled paths: x [images, height, width, groups, channels], contiguous, with channels
// that are a multiple of 4. weight is [groups, outputs, kernel height, kernel width, channels] for
// kTensor and kDot, and [groups, kernel height, kernel width, channels, outputs rounded up to
// kOutputPad] for kTable, contiguous. Padded channels and outputs of weight are 0; both begin at
// multiples of 16 bytes. For kDirect, any strides.
struct Operands {
  const void* x;
  const void* weight;
  int* out;
  std::int64_t x_strides[4];       // image, channel, row, column
  std::int64_t weight_strides[4];  // output, channel, row, column
  bool rows;                       // whether out has its channels last
  bool a_signed;
  bool b_signed;
  int padding_code;  // a byte
};

cudaError_t machine_of(int device, Machine& machine);

// Words of a prepared table: the layouts that kernels read, which either of these makes. `table` is as
// in ../manual_codes.h, `largest` the greatest magnitude in it; it is prepared for kTable or kDirect.
// What sweeps make is for launch_direct only.
long long prepared_words();
cudaError_t launch_prepare(const int* table, bool a_signed, bool b_signed, std::int64_t largest,
                           Path path, unsigned int* prepared, cudaStream_t stream);
cudaError_t launch_tabulate(const std::vector<FoldedSweep>& sweeps, bool a_signed, bool b_signed,
                            unsigned int* prepared, cudaStream_t stream);

// With zeros behind the last channel. `to` begins at a multiple of 4, `from` anywhere; planes are
// those that `transposes` says can be.
cudaError_t launch_transpose(const Planes& planes, const void* from, void* to,
                             cudaStream_t stream);

cudaError_t launch_structured(const Geometry& geometry, const Operands& operands,
                              const std::vector<FoldedSweep>& sweeps, const Plan& plan,
                              cudaStream_t stream);

// `largest` is the greatest magnitude in the table.
cudaError_t launch_table(const Geometry& geometry, const Operands& operands,
                         const unsigned int* prepared, std::int64_t largest, const Plan& plan,
                         cudaStream_t stream);

cudaError_t launch_direct(const Geometry& geometry, const Operands& operands,
                          const unsigned int* prepared, const Machine& machine,
                          cudaStream_t stream);

}  // namespace codes
}  // namespace narrowgauge
