// Convolutions at listed positions, and the lists, on CUDA: from tensors to the launchers. Nothing here
// waits for the device, so positions are not looked at. c10/cuda headers only, because ATen/cuda needs
// the headers of cuBLAS, cuSPARSE and cuSOLVER, which images leave out.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <string>
#include <tuple>

#include "position_conv/cuda/position_conv.h"
#include "position_conv/position_conv_problem.h"

namespace narrowgauge {
namespace position_conv {
namespace {

using Listed = std::tuple<at::Tensor, at::Tensor>;

void check_taps(const Sizes& taps) {
  TORCH_CHECK(taps.size() <= static_cast<std::size_t>(kMostTaps), "position_conv: ", taps.size(),
              " taps; on a GPU there may be ", kMostTaps, " at most");
}

void accepted(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "position_conv: the CUDA kernel was not launched: ",
              cudaGetErrorString(error));
}

cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

const long long* integers(const at::Tensor& tensor) {
  static_assert(sizeof(long long) == sizeof(std::int64_t), "the same in other words");
  return reinterpret_cast<const long long*>(tensor.data_ptr<std::int64_t>());
}

long long* written_integers(const at::Tensor& tensor) {
  return reinterpret_cast<long long*>(tensor.data_ptr<std::int64_t>());
}

const long long* address(const Count& count) {
  return count.has_value() ? integers(*count) : nullptr;
}

Task checked(const Problem& problem, Finish finish, const std::string& isa) {
  TORCH_CHECK(isa == "auto", "isa='", isa, "' names an instruction set of the CPU; a CUDA tensor "
              "takes 'auto' only");
  check_shapes(problem);
  check_taps(problem.taps);
  Task task{};
  task.rows = problem.rows.data_ptr<float>();
  task.positions = integers(problem.positions);
  task.count = address(problem.count);
  task.packed = problem.packed.data_ptr<float>();
  task.bias = problem.bias.data_ptr<float>();
  task.listed = problem.positions.size(0);
  task.channels = problem.rows.size(1);
  task.filters = problem.bias.size(0);
  task.depth = static_cast<long long>(problem.taps.size()) * task.channels;
  task.finish = finish;
  task.slope = problem.slope;
  task.tap_count = static_cast<int>(problem.taps.size());
  for (std::size_t i = 0; i < problem.taps.size(); ++i) {
    task.taps[i] = problem.taps[i] * task.channels;
  }
  return task;
}

at::Tensor position_conv_cuda(const at::Tensor& rows, const at::Tensor& positions,
                              const at::Tensor& packed, const at::Tensor& bias, Sizes taps,
                              double slope, std::string isa, const Count& count) {
  const Problem problem = {rows, positions, packed, bias, std::move(taps),
                           static_cast<float>(slope), count};
  Task task = checked(problem, Finish::kPut, isa);
  const c10::cuda::CUDAGuard guard(rows.device());
  at::Tensor out = at::empty({positions.size(0), bias.size(0)}, rows.options());
  task.out = out.data_ptr<float>();
  accepted(launch_position_conv(task, stream()));
  return out;
}

void position_conv_set_cuda(const at::Tensor& rows, const at::Tensor& positions,
                            const at::Tensor& packed, const at::Tensor& bias, Sizes taps,
                            double slope, const at::Tensor& out, std::string isa,
                            const Count& count) {
  const Problem problem = {rows, positions, packed, bias, std::move(taps),
                           static_cast<float>(slope), count};
  Task task = checked(problem, Finish::kSet, isa);
  check_rows("out", problem, out);
  const c10::cuda::CUDAGuard guard(rows.device());
  task.out = out.data_ptr<float>();
  accepted(launch_position_conv(task, stream()));
}

void position_conv_add_cuda(const at::Tensor& rows, const at::Tensor& positions,
                            const at::Tensor& packed, const at::Tensor& bias, Sizes taps,
                            const at::Tensor& share, const at::Tensor& state,
                            const at::Tensor& total, std::string isa, const Count& count) {
  const Problem problem = {rows, positions, packed, bias, std::move(taps), 1.0f, count};
  Task task = checked(problem, Finish::kAdd, isa);
  check_added(problem, share, state, total);
  const c10::cuda::CUDAGuard guard(rows.device());
  task.share = share.data_ptr<float>();
  task.out = state.data_ptr<float>();
  task.total = total.data_ptr<float>();
  accepted(launch_position_conv(task, stream()));
}

Listed list(const at::Tensor& flags, std::int64_t capacity, const Count& count) {
  TORCH_CHECK(capacity >= 0, "positions: there is no room for ", capacity);
  const at::TensorOptions options = flags.options().dtype(at::kLong);
  const std::int64_t blocks = list_counts(flags.size(0));
  at::Tensor places = at::empty({capacity}, options), found = at::empty({1}, options);
  const at::Tensor counts = at::empty({blocks}, options);
  ListTask task{};
  task.flags = static_cast<const unsigned char*>(flags.data_ptr());
  task.limit = address(count);
  task.counts = written_integers(counts);
  task.list = written_integers(places);
  task.found = written_integers(found);
  task.cells = flags.size(0);
  task.capacity = capacity;
  task.filled = true;
  accepted(launch_list(task, stream()));
  return Listed(places, found);
}

Listed positions_near_list_cuda(const at::Tensor& positions, Sizes taps, const at::Tensor& inside,
                                std::int64_t capacity, const Count& count) {
  check_positions(positions, positions.device());
  check_flags("inside", inside, positions.device());
  check_count(count, positions.device());
  check_taps(taps);
  const c10::cuda::CUDAGuard guard(positions.device());
  const at::Tensor flags = at::empty({inside.size(0)}, inside.options());
  NearTask task{};
  task.positions = integers(positions);
  task.count = address(count);
  task.inside = inside.data_ptr<bool>();
  task.flags = static_cast<unsigned char*>(flags.data_ptr());
  task.listed = positions.size(0);
  task.cells = inside.size(0);
  task.tap_count = static_cast<int>(taps.size());
  for (std::size_t i = 0; i < taps.size(); ++i) {
    task.taps[i] = taps[i];
  }
  accepted(launch_near(task, stream()));
  return list(flags, capacity, {});
}

Listed positions_flagged_cuda(const at::Tensor& flags, std::int64_t capacity, const Count& count) {
  check_flags("flags", flags, flags.device());
  check_count(count, flags.device());
  const c10::cuda::CUDAGuard guard(flags.device());
  return list(flags, capacity, count);
}

}  // namespace

TORCH_LIBRARY_IMPL(narrowgauge, CUDA, m) {
  m.impl("position_conv", position_conv_cuda);
  m.impl("position_conv_set", position_conv_set_cuda);
  m.impl("position_conv_add", position_conv_add_cuda);
  m.impl("positions_near_list", positions_near_list_cuda);
  m.impl("positions_flagged", positions_flagged_cuda);
}

}  // namespace position_conv
}  // namespace narrowgauge
