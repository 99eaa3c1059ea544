// The sparse convolution: schema, shape function, and the CPU implementation.
#include "sparse_conv/sparse_conv.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "common/instruction_set.h"
#include "sparse_conv/sparse_conv_problem.h"
#include "sparse_conv/sparse_conv_tiles.h"
#include "sparse_conv/sparse_conv_worker.h"

namespace narrowgauge {
namespace sparse_conv {
namespace {

// Below this many elements, waking a thread costs more than counting.
constexpr std::int64_t kLeastParallelCount = 65536;

Shape shape_of(const Problem& problem, const at::Tensor& weight) {
  const at::Tensor &x = problem.x, &out = problem.out;
  const Window& window = problem.window;
  Shape shape;
  shape.batch = x.size(0);
  shape.channels = x.size(1);
  shape.height = x.size(2);
  shape.width = x.size(3);
  shape.filters = weight.size(0);
  shape.kernel_height = weight.size(2);
  shape.kernel_width = weight.size(3);
  shape.stride_height = window.stride[0];
  shape.stride_width = window.stride[1];
  shape.padding_height = window.padding[0];
  shape.padding_width = window.padding[1];
  shape.out_height = out.size(2);
  shape.out_width = out.size(3);
  return shape;
}

at::Tensor sparse_pack_cpu(const at::Tensor& weight) {
  check_tensor("weight", weight, 4, weight);
  const Packing packing = packing_of(weight);
  const std::int64_t filters = weight.size(0), channels = weight.size(1);
  const std::int64_t taps = weight.size(2) * weight.size(3);
  const at::Tensor turned = weight.permute({2, 3, 1, 0}).contiguous();
  const at::Tensor packed = at::zeros({packing.floats()}, weight.options());
  for (const Block& block : packing.blocks()) {
    for (std::int64_t slice = 0; slice < packing.slices(); ++slice) {
      for (std::int64_t tap = 0; tap < taps; ++tap) {
        float* to = packed.data_ptr<float>() + packing.panel(block, slice, tap);
        const Range range = packing.slice(slice);
        for (std::int64_t c = range.begin; c < range.end; ++c, to += block.width) {
          const float* from =
              turned.data_ptr<float>() + (tap * channels + c) * filters + block.first;
          std::copy(from, from + block.filled, to);
        }
      }
    }
  }
  return packed;
}

at::Tensor sparse_conv2d_cpu(const at::Tensor& x, const at::Tensor& weight,
                             const c10::optional<at::Tensor>& bias, Sizes stride, Sizes padding,
                             bool relu_input, bool relu_output,
                             const c10::optional<at::Tensor>& packed, std::string isa) {
  const Loops loops = loops_for<Loops>(instruction_set(isa));
  const Window window = {std::move(stride), std::move(padding)};
  result_sizes(x, weight, bias, window);
  const Problem made = problem(x, weight, packed.has_value() ? *packed : sparse_pack_cpu(weight),
                               bias, window, relu_input, relu_output);
  if (made.out.numel() == 0) {
    return made.out;
  }
  const std::int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const Tiling tiling(shape_of(made, weight), threads);
  at::parallel_for(0, tiling.count(), 1, [&](std::int64_t begin, std::int64_t end) {
    Worker worker(made, tiling, loops);
    for (std::int64_t index = begin; index < end; ++index) {
      worker.run(tiling.tile(index));
    }
  });
  return made.out;
}

at::Tensor sparse_conv2d_meta(const at::Tensor& x, const at::Tensor& weight,
                              const c10::optional<at::Tensor>& bias, Sizes stride, Sizes padding,
                              bool, bool, const c10::optional<at::Tensor>&, std::string) {
  const Sizes sizes = result_sizes(x, weight, bias, {std::move(stride), std::move(padding)});
  return empty_result(x, sizes);
}

std::int64_t sparse_zeros_cpu(const at::Tensor& given, bool relu, std::string isa) {
  TORCH_CHECK(given.scalar_type() == at::kFloat, "sparse_zeros: x is ", given.scalar_type(),
              "; it must be float32");
  const Loops loops = loops_for<Loops>(instruction_set(isa));
  const at::Tensor x = given.is_non_overlapping_and_dense() ? given : given.contiguous();
  const float* from = x.data_ptr<float>();
  std::atomic<std::int64_t> found(0);
  at::parallel_for(0, x.numel(), kLeastParallelCount, [&](std::int64_t begin, std::int64_t end) {
    found += loops.zeros(from + begin, end - begin, relu);
  });
  return found;
}

}  // namespace

// `isa` forces one instruction set of the CPU (generic, avx2, avx512, neon); results do not differ.
TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def(
      "sparse_conv2d(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
      "bool relu_input, bool relu_output, *, Tensor? packed=None, str isa='auto') -> Tensor");
  m.def("sparse_pack(Tensor weight) -> Tensor");
  m.def("sparse_zeros(Tensor x, bool relu, *, str isa='auto') -> int");
}

TORCH_LIBRARY_IMPL(narrowgauge, CPU, m) {
  m.impl("sparse_conv2d", sparse_conv2d_cpu);
  m.impl("sparse_pack", sparse_pack_cpu);
  m.impl("sparse_zeros", sparse_zeros_cpu);
}

TORCH_LIBRARY_IMPL(narrowgauge, Meta, m) { m.impl("sparse_conv2d", sparse_conv2d_meta); }

}  // namespace sparse_conv
}  // namespace narrowgauge
