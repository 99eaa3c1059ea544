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

Job job_of(const Problem& problem, const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor& out = problem.out;
  Job job{};
  job.geometry = problem.geometry;
  job.x = static_cast<const std::uint8_t*>(x.data_ptr());
  job.weight = static_cast<const std::uint8_t*>(weight.data_ptr());
  job.x_signed = x.scalar_type() == at::kChar;
  job.weight_signed = weight.scalar_type() == at::kChar;
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
  const at::Tensor x = problem.x.permute({0, 2, 3, 1}).contiguous();
  const at::Tensor weight = problem.weight.permute({0, 2, 3, 1}).contiguous();
  const Job job = job_of(problem, x, weight);
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
