// The operators over 8-bit codes: schema, shape functions, and the CPU implementation.
#include "manual_codes/manual_codes.h"

#include <torch/library.h>

#include <string>
#include <vector>

#include "manual_codes/manual_codes_job.h"
#include "manual_codes/manual_codes_problem.h"
#include "manual_codes/manual_codes_variants.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace codes {
namespace {

// Codes that a thread turns at least: waking it costs more than fewer.
constexpr std::int64_t kLeastTurned = 1 << 16;

// What was asked for of what is here, best last.
template <typename Kernel>
Kernel choose(const std::vector<Variant<Kernel>>& variants, const std::string& isa) {
  if (isa == "auto") {
    return variants.back().kernel;
  }
  std::string known = "auto";
  for (const Variant<Kernel>& variant : variants) {
    if (isa == variant.name) {
      return variant.kernel;
    }
    known += std::string(", ") + variant.name;
  }
  TORCH_CHECK(false, "isa='", isa, "' is unknown or not available on this processor; this operator "
              "has here: ", known);
}

// But for where the operands are.
Job job_of(const Problem& problem) {
  const at::Tensor& out = problem.out;
  Job job{};
  job.geometry = problem.geometry;
  job.x_signed = problem.x.scalar_type() == at::kChar;
  job.weight_signed = problem.weight.scalar_type() == at::kChar;
  job.padding_code = static_cast<std::uint8_t>(problem.x_zero);
  job.out = out.data_ptr<std::int32_t>();
  const bool last = out.dim() == 4 && out.is_contiguous(at::MemoryFormat::ChannelsLast) &&
                    !out.is_contiguous();
  const std::int64_t area = job.geometry.out_height * job.geometry.out_width;
  job.image_stride = area * job.geometry.out_channels;
  job.pixel_stride = last ? job.geometry.out_channels : 1;
  job.channel_stride = last ? 1 : area;
  return job;
}

// [N, C, H, W] with any strides as contiguous [N, H, W, C].
at::Tensor channels_last(const at::Tensor& given, const ProductKernel& kernel) {
  const std::int64_t lines = given.size(1);
  const std::int64_t places = given.size(2) * given.size(3);
  if (!given.is_contiguous() || lines == 1 || places == 1 || given.numel() == 0) {
    return given.permute({0, 2, 3, 1}).contiguous();
  }
  const at::Tensor made =
      at::empty({given.size(0), given.size(2), given.size(3), lines}, given.options());
  const std::uint8_t* const from = static_cast<const std::uint8_t*>(given.data_ptr());
  std::uint8_t* const to = static_cast<std::uint8_t*>(made.data_ptr());
  constexpr std::int64_t kLines = 64;  // of a task
  const std::int64_t parts = divide_up(lines, kLines);
  const std::int64_t grain = std::max<std::int64_t>(1, kLeastTurned / (kLines * places));
  at::parallel_for(0, given.size(0) * parts, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t at = task / parts * lines * places;
      const std::int64_t first = task % parts * kLines;
      kernel.turn_codes(from + at, lines, places, first, std::min(kLines, lines - first), to + at);
    }
  });
  return made;
}

at::Tensor run(const Problem& problem, const std::string& isa) {
  // The name is checked even where there is nothing to do.
  const std::vector<Variant<TableKernel>> tables = table_variants();
  const std::vector<Variant<ProductKernel>> products = product_variants();
  const bool by_table = problem.table.defined();
  const TableKernel table = choose(tables, by_table ? isa : "auto");
  const ProductKernel product = choose(products, by_table ? "auto" : isa);
  if (problem.out.numel() == 0) {
    return problem.out;
  }
  if (problem.geometry.depth() == 0) {
    return problem.out.zero_();
  }
  const at::Tensor x = channels_last(problem.x, product);
  Job job = job_of(problem);
  job.planar = !by_table && takes_planar_terms(job);
  const at::Tensor weight =
      job.planar ? problem.weight.contiguous() : channels_last(problem.weight, product);
  job.x = static_cast<const std::uint8_t*>(x.data_ptr());
  job.weight = static_cast<const std::uint8_t*>(weight.data_ptr());
  if (by_table) {
    run_table(job, problem.table.data_ptr<std::int32_t>(), table);
  } else {
    const std::vector<Term> exact{{0xFF, 0xFF, 1, 0, 0}};
    run_terms(job, problem.terms.empty() ? exact : problem.terms, product);
  }
  return problem.out;
}

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight,
                  const c10::optional<at::Tensor>& table, at::IntArrayRef terms,
                  std::int64_t largest, at::IntArrayRef stride, at::IntArrayRef padding,
                  at::IntArrayRef dilation, std::int64_t groups, std::int64_t x_zero,
                  std::string isa) {
  return run(conv2d_problem(x, weight, table, terms, largest, stride, padding, dilation, groups,
                            x_zero),
             isa);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const c10::optional<at::Tensor>& table, at::IntArrayRef terms,
                  std::int64_t largest, std::string isa) {
  return run(linear_problem(x, weight, table, terms, largest), isa);
}

at::Tensor conv2d_meta(const at::Tensor& x, const at::Tensor& weight,
                       const c10::optional<at::Tensor>& table, at::IntArrayRef terms,
                       std::int64_t largest, at::IntArrayRef stride, at::IntArrayRef padding,
                       at::IntArrayRef dilation, std::int64_t groups, std::int64_t x_zero,
                       std::string) {
  return conv2d_problem(x, weight, table, terms, largest, stride, padding, dilation, groups,
                        x_zero)
      .out;
}

at::Tensor linear_meta(const at::Tensor& x, const at::Tensor& weight,
                       const c10::optional<at::Tensor>& table, at::IntArrayRef terms,
                       std::int64_t largest, std::string) {
  return linear_problem(x, weight, table, terms, largest).out;
}

template <typename Kernel>
std::vector<std::string> names(const std::vector<Variant<Kernel>>& variants) {
  std::vector<std::string> made;
  for (const Variant<Kernel>& variant : variants) {
    made.emplace_back(variant.name);
  }
  return made;
}

std::vector<std::string> codes_instruction_sets(bool table) {
  return table ? names(table_variants()) : names(product_variants());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def("conv2d_codes(Tensor x, Tensor weight, Tensor? table, int[] terms, int largest, "
        "int[] stride, int[] padding, int[] dilation, int groups, int x_zero, *, "
        "str isa='auto') -> Tensor");
  m.def("linear_codes(Tensor x, Tensor weight, Tensor? table, int[] terms, int largest, "
        "*, str isa='auto') -> Tensor");
  m.def("codes_instruction_sets(bool table) -> str[]", codes_instruction_sets);
}

TORCH_LIBRARY_IMPL(narrowgauge, CPU, m) {
  m.impl("conv2d_codes", conv2d);
  m.impl("linear_codes", linear);
}

TORCH_LIBRARY_IMPL(narrowgauge, Meta, m) {
  m.impl("conv2d_codes", conv2d_meta);
  m.impl("linear_codes", linear_meta);
}

}  // namespace codes
}  // namespace narrowgauge
