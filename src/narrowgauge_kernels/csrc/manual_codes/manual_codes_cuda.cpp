// The operators over 8-bit codes on CUDA: from tensors to the launchers. c10/cuda headers only, because
// ATen/cuda needs the headers of cuBLAS, cuSPARSE and cuSOLVER, which images leave out.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <vector>

#include "manual_codes/cuda/manual_codes.h"
#include "manual_codes/manual_codes_problem.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace codes {
namespace {

void check_launch(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "codes: the CUDA kernel was not launched: ",
              cudaGetErrorString(error));
}

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

// Of contiguous planes that the kernel takes: [images, pixels, padded channels].
at::Tensor transposed(const at::Tensor& codes, const Planes& planes, cudaStream_t stream) {
  const at::Tensor rows =
      at::empty({planes.images, planes.pixels, planes.padded()}, codes.options());
  check_launch(launch_transpose(planes, codes.data_ptr(), rows.data_ptr(), stream));
  return rows;
}

// [images, height, width, groups, padded channels]: x itself where it is that already. What is
// neither that nor planes, torch copies element by element.
at::Tensor lowered_x(const Problem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  const std::int64_t channels = geometry.group_channels();
  const std::int64_t padded = padded_channels(geometry);
  const Planes planes{geometry.batch, geometry.channels, geometry.height * geometry.width};
  const bool pads_each_group = geometry.groups > 1 && channels != padded;
  if (problem.x.is_contiguous() && !pads_each_group && transposes(planes)) {
    return transposed(problem.x, planes, stream);
  }
  if (channels == padded) {
    const at::Tensor rows = problem.x.permute({0, 2, 3, 1}).contiguous();
    return is_aligned(rows) ? rows : rows.clone();
  }
  const at::Tensor rows = at::zeros(
      {geometry.batch, geometry.height, geometry.width, geometry.groups, padded},
      problem.x.options());
  rows.narrow(4, 0, channels)
      .copy_(problem.x
                 .reshape({geometry.batch, geometry.groups, channels, geometry.height,
                           geometry.width})
                 .permute({0, 3, 4, 1, 2}));
  return rows;
}

// For kTable: channels to the end of each kernel, then outputs to the end of all. Undefined where the kernel
// that transposes does not take these, or outputs need zeros behind them.
at::Tensor turned_weight(const Problem& problem, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  const std::int64_t taps = geometry.kernel_height * geometry.kernel_width;
  const std::int64_t padded = padded_channels(geometry);
  const Planes each{geometry.out_channels, geometry.group_channels(), taps};
  const Planes all{geometry.groups, geometry.group_outputs(), taps * padded};
  const bool lies_so = taps == 1 && geometry.group_channels() == padded;
  if (!problem.weight.is_contiguous() || geometry.group_outputs() % kOutputPad != 0 ||
      !transposes(all) || !(lies_so || transposes(each))) {
    return at::Tensor();
  }
  return transposed(lies_so ? problem.weight : transposed(problem.weight, each, stream), all,
                    stream);
}

// As manual_codes/cuda/manual_codes.h says of the path.
at::Tensor lowered_weight(const Problem& problem, Path path, cudaStream_t stream) {
  const Geometry& geometry = problem.geometry;
  const std::int64_t channels = geometry.group_channels();
  const std::int64_t outputs = geometry.group_outputs();
  const std::int64_t height = geometry.kernel_height;
  const std::int64_t width = geometry.kernel_width;
  const bool by_table = path == Path::kTable;
  const Planes planes{geometry.out_channels, channels, height * width};
  if (!by_table && problem.weight.is_contiguous() && transposes(planes)) {
    return transposed(problem.weight, planes, stream);
  }
  const at::Tensor turned = by_table ? turned_weight(problem, stream) : at::Tensor();
  if (turned.defined()) {
    return turned;
  }
  const at::Tensor grouped =
      problem.weight.reshape({geometry.groups, outputs, channels, height, width});
  const at::Tensor ordered =
      by_table ? grouped.permute({0, 3, 4, 2, 1}) : grouped.permute({0, 1, 3, 4, 2});
  const std::int64_t padded = padded_channels(geometry);
  const std::int64_t padded_outputs =
      by_table ? divided_up(outputs, kOutputPad) * kOutputPad : outputs;
  if (padded == channels && padded_outputs == outputs) {
    const at::Tensor rows = ordered.contiguous();
    return is_aligned(rows) ? rows : rows.clone();
  }
  const at::Tensor rows =
      by_table
          ? at::zeros({geometry.groups, height, width, padded, padded_outputs},
                      problem.weight.options())
          : at::zeros({geometry.groups, outputs, height, width, padded}, problem.weight.options());
  (by_table ? rows.narrow(3, 0, channels).narrow(4, 0, outputs) : rows.narrow(4, 0, channels))
      .copy_(ordered);
  return rows;
}

Path path_named(const std::string& isa, bool by_table, const Machine& machine) {
  if (isa == "direct") {
    return Path::kDirect;
  }
  if (isa == "table" && by_table) {
    return Path::kTable;
  }
  if (isa == "dot" && !by_table) {
    return Path::kDot;
  }
  TORCH_CHECK(isa == "tensor" && !by_table, "isa='", isa, "' is no kernel of CUDA for ",
              by_table ? "a table: auto, table, direct" : "terms: auto, tensor, dot, direct");
  TORCH_CHECK(machine.capability >= 80, "isa='tensor' needs compute capability 8.0, this device has ",
              machine.capability / 10, ".", machine.capability % 10);
  return Path::kTensor;
}

Operands operands_of(const Problem& problem, const at::Tensor& x, const at::Tensor& weight) {
  Operands operands{};
  operands.x = x.data_ptr();
  operands.weight = weight.data_ptr();
  operands.out = problem.out.data_ptr<std::int32_t>();
  operands.rows = !problem.out.is_contiguous();
  operands.a_signed = problem.x.scalar_type() == at::kChar;
  operands.b_signed = problem.weight.scalar_type() == at::kChar;
  operands.padding_code = static_cast<int>(problem.x_zero & 0xff);
  return operands;
}

void run_direct(const Problem& problem, const std::vector<FoldedSweep>& sweeps,
                unsigned int* prepared, const Machine& machine, cudaStream_t stream) {
  Operands operands = operands_of(problem, problem.x, problem.weight);
  for (int i = 0; i < 4; ++i) {
    operands.x_strides[i] = problem.x.stride(i);
    operands.weight_strides[i] = problem.weight.stride(i);
  }
  if (!problem.table.defined()) {
    check_launch(launch_tabulate(sweeps, operands.a_signed, operands.b_signed, prepared, stream));
  }
  check_launch(launch_direct(problem.geometry, operands, prepared, machine, stream));
}

// A problem is on one device, which its checks saw to; it need not be the current one.
at::Tensor run(const Problem& problem, const std::string& isa) {
  const Geometry& geometry = problem.geometry;
  const c10::cuda::CUDAGuard guard(problem.out.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  Machine machine{};
  check_launch(machine_of(problem.out.device().index(), machine));
  const bool by_table = problem.table.defined();
  // The name is checked even where there is nothing to do.
  const bool automatic = isa == "auto";
  const Path named = automatic ? Path::kDirect : path_named(isa, by_table, machine);
  if (problem.out.numel() == 0) {
    return problem.out;
  }
  const std::vector<FoldedSweep> sweeps =
      by_table ? std::vector<FoldedSweep>() : fold(problem.terms);
  if (geometry.depth() == 0 || (!by_table && sweeps.empty())) {
    return problem.out.zero_();
  }
  const Extents extents = extents_of(geometry, sweeps);
  const Plan plan = automatic ? plan_automatically(by_table, extents, machine)
                              : plan_of(named, extents, machine);
  at::Tensor prepared;
  unsigned int* words = nullptr;
  if (by_table || plan.path == Path::kDirect) {
    prepared = at::empty({prepared_words()}, problem.out.options());
    words = reinterpret_cast<unsigned int*>(prepared.data_ptr<std::int32_t>());
  }
  if (by_table) {
    check_launch(launch_prepare(problem.table.data_ptr<std::int32_t>(),
                                problem.x.scalar_type() == at::kChar,
                                problem.weight.scalar_type() == at::kChar, problem.largest,
                                plan.path, words, stream));
  }
  if (plan.path == Path::kDirect) {
    run_direct(problem, sweeps, words, machine, stream);
    return problem.out;
  }
  const at::Tensor x = lowered_x(problem, stream);
  const at::Tensor weight = lowered_weight(problem, plan.path, stream);
  const Operands operands = operands_of(problem, x, weight);
  check_launch(by_table
                   ? launch_table(geometry, operands, words, problem.largest, plan, stream)
                   : launch_structured(geometry, operands, sweeps, plan, stream));
  return problem.out;
}

at::Tensor conv2d_codes_cuda(const at::Tensor& x, const at::Tensor& weight,
                             const c10::optional<at::Tensor>& table, at::IntArrayRef terms,
                             std::int64_t largest, at::IntArrayRef stride,
                             at::IntArrayRef padding, at::IntArrayRef dilation,
                             std::int64_t groups, std::int64_t x_zero, std::string isa) {
  return run(conv2d_problem(x, weight, table, terms, largest, stride, padding, dilation, groups,
                            x_zero),
             isa);
}

at::Tensor linear_codes_cuda(const at::Tensor& x, const at::Tensor& weight,
                             const c10::optional<at::Tensor>& table, at::IntArrayRef terms,
                             std::int64_t largest, std::string isa) {
  return run(linear_problem(x, weight, table, terms, largest), isa);
}

}  // namespace

TORCH_LIBRARY_IMPL(narrowgauge, CUDA, m) {
  m.impl("conv2d_codes", conv2d_codes_cuda);
  m.impl("linear_codes", linear_codes_cuda);
}

}  // namespace codes
}  // namespace narrowgauge
