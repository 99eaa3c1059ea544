// The checks of the operators over 8-bit codes, and each of them as one problem. Shared by CPU and
// CUDA.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "manual_codes/manual_codes.h"
#include "manual/manual_extent.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace codes {

// out[image, channel, row, column] with the geometry's sizes; `out` has those strides and no gaps,
// in the shape the caller of the operator gets. x and weight are four-dimensional views with any
// strides. table is undefined, or contiguous; where it is undefined and there is no term, products
// are exact.
struct Problem {
  Geometry geometry;
  at::Tensor x;
  at::Tensor weight;
  at::Tensor table;
  std::vector<Term> terms;
  std::int64_t largest;
  std::int64_t x_zero;
  at::Tensor out;
};

constexpr std::int64_t kNumbersPerTerm = 5;
constexpr std::int64_t kCodes = 256;

inline void check_codes(const char* op, const char* name, const at::Tensor& codes) {
  TORCH_CHECK(codes.scalar_type() == at::kChar || codes.scalar_type() == at::kByte, op, ": ", name,
              " is ", codes.scalar_type(), "; it must be int8 or uint8");
}

inline void check_product(const char* op, const at::Tensor& x, const at::Tensor& weight,
                          const c10::optional<at::Tensor>& table, at::IntArrayRef terms) {
  check_codes(op, "x", x);
  check_codes(op, "weight", weight);
  TORCH_CHECK(weight.device() == x.device(), op, ": weight is on ", weight.device(),
              " but x is on ", x.device());
  if (table.has_value()) {
    TORCH_CHECK(table->device() == x.device(), op, ": table is on ", table->device(),
                " but x is on ", x.device());
    TORCH_CHECK(table->scalar_type() == at::kInt && table->dim() == 2 &&
                    table->size(0) == kCodes && table->size(1) == kCodes,
                op, ": table is ", table->scalar_type(), " of shape ", table->sizes(),
                "; it must be int32 of shape [256, 256]");
    TORCH_CHECK(terms.empty(), op, ": a table and terms are two ways to say one product; give one");
  }
  TORCH_CHECK(terms.size() % kNumbersPerTerm == 0, op, ": terms are ", terms.size(),
              " integers; each term is five: a_mask, b_mask, coefficient, a_shift, b_shift");
}

inline std::vector<Term> read_terms(const char* op, at::IntArrayRef numbers) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  std::vector<Term> terms;
  for (std::size_t at = 0; at < numbers.size(); at += kNumbersPerTerm) {
    const std::int64_t* each = numbers.data() + at;
    TORCH_CHECK(0 <= each[0] && each[0] < kCodes && 0 <= each[1] && each[1] < kCodes &&
                    -kMost <= each[2] && each[2] <= kMost && 0 <= each[3] && each[3] < 8 &&
                    0 <= each[4] && each[4] < 8,
                op, ": term ", at / kNumbersPerTerm,
                " is out of range; masks are 0 to 255, shifts 0 to 7, the coefficient an int32");
    terms.push_back({static_cast<std::int32_t>(each[0]), static_cast<std::int32_t>(each[1]),
                     static_cast<std::int32_t>(each[2]), static_cast<std::int32_t>(each[3]),
                     static_cast<std::int32_t>(each[4])});
  }
  return terms;
}

inline void check_sum(const char* op, std::int64_t depth, std::int64_t largest) {
  TORCH_CHECK(largest >= 0, op, ": largest is ", largest, "; a magnitude is not negative");
  constexpr std::int64_t kLimit = std::int64_t(1) << 31;
  TORCH_CHECK(largest == 0 || depth <= (kLimit - 1) / largest, op, ": a sum of ", depth,
              " products of magnitude up to ", largest, " may reach ",
              static_cast<double>(depth) * static_cast<double>(largest),
              ", which int32 does not hold; split the products over K, or scale the table down");
}

inline std::int64_t output_size(const char* op, const char* name, std::int64_t in,
                                std::int64_t kernel, std::int64_t stride, std::int64_t padding,
                                std::int64_t dilation) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  TORCH_CHECK(stride > 0 && dilation > 0 && padding >= 0 && stride <= kMost && dilation <= kMost &&
                  padding <= kMost,
              op, ": along the ", name, " stride is ", stride, ", padding ", padding,
              " and dilation ", dilation, "; stride and dilation must be positive, padding not "
              "negative, and all int32");
  TORCH_CHECK(kernel > 0 && kernel <= kMost, op, ": weight has a kernel of ", name, " ", kernel,
              "; it must be positive, and int32");
  const std::int64_t reach = dilation * (kernel - 1) + 1;
  TORCH_CHECK(in + 2 * padding >= reach, op, ": the ", name, " of x is ", in, " with padding ",
              padding, " on both sides, less than the ", reach, " that the kernel spans");
  return (in + 2 * padding - reach) / stride + 1;
}

inline void check_pair(const char* op, const char* name, at::IntArrayRef pair) {
  TORCH_CHECK(pair.size() == 2, op, ": ", name, " is ", pair.size(),
              " integers; it must be two, for height and width");
}

inline Geometry conv2d_geometry(const at::Tensor& x, const at::Tensor& weight,
                                at::IntArrayRef stride, at::IntArrayRef padding,
                                at::IntArrayRef dilation, std::int64_t groups) {
  constexpr const char* op = "conv2d_codes";
  TORCH_CHECK(x.dim() == 4, op, ": x has shape ", x.sizes(), "; it must be [N, C, H, W]");
  TORCH_CHECK(weight.dim() == 4, op, ": weight has shape ", weight.sizes(),
              "; it must be [O, C / groups, R, S]");
  check_pair(op, "stride", stride);
  check_pair(op, "padding", padding);
  check_pair(op, "dilation", dilation);
  TORCH_CHECK(groups > 0 && x.size(1) % groups == 0 && weight.size(0) % groups == 0 &&
                  x.size(1) / groups == weight.size(1),
              op, ": x has shape ", x.sizes(), ", weight ", weight.sizes(), " and groups is ",
              groups, "; x[N, C, H, W] and weight[O, C / groups, R, S] must agree in C, and groups "
              "must divide C and O");
  Geometry made{};
  made.batch = x.size(0);
  made.channels = x.size(1);
  made.height = x.size(2);
  made.width = x.size(3);
  made.out_channels = weight.size(0);
  made.kernel_height = weight.size(2);
  made.kernel_width = weight.size(3);
  made.out_height = output_size(op, "height", made.height, made.kernel_height, stride[0],
                                padding[0], dilation[0]);
  made.out_width = output_size(op, "width", made.width, made.kernel_width, stride[1], padding[1],
                               dilation[1]);
  for (int i = 0; i < 2; ++i) {
    made.stride[i] = stride[i];
    made.padding[i] = padding[i];
    made.dilation[i] = dilation[i];
  }
  made.groups = groups;
  return made;
}

inline void check_zero(const at::Tensor& x, std::int64_t x_zero) {
  const std::int64_t least = x.scalar_type() == at::kChar ? -128 : 0;
  TORCH_CHECK(least <= x_zero && x_zero < least + kCodes, "conv2d_codes: x_zero is ", x_zero,
              "; it must be a code of x, from ", least, " to ", least + kCodes - 1);
}

inline Problem conv2d_problem(const at::Tensor& x, const at::Tensor& weight,
                              const c10::optional<at::Tensor>& table, at::IntArrayRef terms,
                              std::int64_t largest, at::IntArrayRef stride,
                              at::IntArrayRef padding, at::IntArrayRef dilation,
                              std::int64_t groups, std::int64_t x_zero) {
  constexpr const char* op = "conv2d_codes";
  check_product(op, x, weight, table, terms);
  check_zero(x, x_zero);
  const Geometry geometry = conv2d_geometry(x, weight, stride, padding, dilation, groups);
  check_sum(op, geometry.depth(), largest);
  const std::int64_t sizes[] = {geometry.batch, geometry.out_channels, geometry.out_height,
                                geometry.out_width};
  check_extent(op, sizes, sizeof(std::int32_t));
  const at::Tensor out = at::empty(
      sizes, x.options().dtype(at::kInt).memory_format(x.suggest_memory_format()));
  return {geometry, x,       weight, table.has_value() ? table->contiguous() : at::Tensor(),
          read_terms(op, terms), largest, x_zero, out};
}

inline Problem linear_problem(const at::Tensor& x, const at::Tensor& weight,
                              const c10::optional<at::Tensor>& table, at::IntArrayRef terms,
                              std::int64_t largest) {
  constexpr const char* op = "linear_codes";
  check_product(op, x, weight, table, terms);
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1), op,
              ": x has shape ", x.sizes(), " and weight has shape ", weight.sizes(),
              "; x[..., K] and weight[O, K] must agree in K");
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  std::int64_t rows = 1;
  for (std::size_t dimension = 0; dimension + 1 < sizes.size(); ++dimension) {
    rows *= sizes[dimension];
  }
  Geometry geometry{};
  geometry.batch = rows;
  geometry.channels = x.size(-1);
  geometry.out_channels = weight.size(0);
  geometry.height = geometry.width = geometry.out_height = geometry.out_width = 1;
  geometry.kernel_height = geometry.kernel_width = geometry.groups = 1;
  for (int i = 0; i < 2; ++i) {
    geometry.stride[i] = geometry.dilation[i] = 1;
  }
  check_sum(op, geometry.depth(), largest);
  check_extent(op, sizes, sizeof(std::int32_t));
  // Sizes are spelt out because -1 is ambiguous when a dimension is empty.
  return {geometry,
          x.reshape({rows, x.size(-1), 1, 1}),
          weight.reshape({weight.size(0), weight.size(1), 1, 1}),
          table.has_value() ? table->contiguous() : at::Tensor(),
          read_terms(op, terms),
          largest,
          0,
          at::empty(sizes, x.options().dtype(at::kInt))};
}

}  // namespace codes
}  // namespace narrowgauge
