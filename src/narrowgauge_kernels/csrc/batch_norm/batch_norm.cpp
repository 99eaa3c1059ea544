// The batch normalisation operators of a CPU: schema, shape functions, and the implementation.
//
// torch's own takes sums in fp64 throughout and a region of threads for each of its passes. Here a
// thread does all of a channel, whose values stay in its cache from one pass to the next.
#include "batch_norm/batch_norm.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>

#include "common/instruction_set.h"
#include "common/torch_tensor.h"

namespace narrowgauge {
namespace batch_norm {
namespace {

// Below this many elements, waking a thread costs more than it saves.
constexpr std::int64_t kLeastParallelCount = 16384;

using Tensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// x [images, channels, inner], contiguous.
struct Extent {
  std::int64_t images;
  std::int64_t channels;
  std::int64_t inner;

  // Of one channel, whose first value is at c * inner.
  Channel channel() const { return {images, channels * inner, inner}; }
  double count() const { return static_cast<double>(images * inner); }
};

Extent extent_of(const at::Tensor& x) {
  TORCH_CHECK(x.dim() >= 2, "batch_norm: x has shape ", x.sizes(), "; it must be [N, C, ...]");
  TORCH_CHECK(x.scalar_type() == at::kFloat, "batch_norm: x is ", x.scalar_type(),
              "; it must be float32");
  std::int64_t inner = 1;
  for (std::int64_t i = 2; i < x.dim(); ++i) {
    inner *= x.size(i);
  }
  TORCH_CHECK(x.size(0) * inner > 0 || x.size(1) == 0, "batch_norm: x has shape ", x.sizes(),
              ", and no value for a channel");
  return {x.size(0), x.size(1), inner};
}

void check_channels(const char* name, const at::Tensor& given, const at::Tensor& x) {
  TORCH_CHECK(given.scalar_type() == at::kFloat && given.dim() == 1 &&
                  given.size(0) == x.size(1) && given.device() == x.device(),
              "batch_norm: ", name, " is ", given.scalar_type(), " of shape ", given.sizes(), " on ",
              given.device(), "; it must be float32 of [", x.size(1), "] on ", x.device());
}

void check_like(const char* name, const at::Tensor& given, const at::Tensor& x) {
  TORCH_CHECK(given.sizes() == x.sizes() && given.scalar_type() == x.scalar_type() &&
                  given.device() == x.device(),
              "batch_norm: ", name, " is ", given.scalar_type(), " of shape ", given.sizes(),
              " on ", given.device(), "; it must be as x, ", x.scalar_type(), " of ", x.sizes(),
              " on ", x.device());
}

using Optional = c10::optional<at::Tensor>;

bool is_there(const Optional& given) { return given.has_value() && given->defined(); }

// Like x and in order of memory; undefined where it is not there.
at::Tensor like(const char* name, const Optional& given, const at::Tensor& x) {
  if (!is_there(given)) {
    return at::Tensor();
  }
  check_like(name, *given, x);
  return given->contiguous();
}

const float* pointer(const at::Tensor& given) {
  return given.defined() ? given.data_ptr<float>() : nullptr;
}

// Of a parameter that there need not be; `held` keeps what it points to.
class Values {
 public:
  Values(const char* name, const Optional& given, const at::Tensor& x, float otherwise)
      : otherwise_(otherwise) {
    if (is_there(given)) {
      check_channels(name, *given, x);
      held_ = given->contiguous();
      data_ = held_.data_ptr<float>();
    }
  }
  float operator[](std::int64_t i) const { return data_ == nullptr ? otherwise_ : data_[i]; }

 private:
  at::Tensor held_;
  const float* data_ = nullptr;
  float otherwise_;
};

template <typename Each>
void for_each_channel(const Extent& extent, const Each& each) {
  const std::int64_t count = std::max<std::int64_t>(extent.images * extent.inner, 1);
  const std::int64_t grain = std::max<std::int64_t>(kLeastParallelCount / count, 1);
  at::parallel_for(0, extent.channels, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t c = begin; c < end; ++c) {
      each(c);
    }
  });
}

Tensors batch_norm_cpu(const at::Tensor& given, const Optional& weight, const Optional& bias,
                       double eps, const Optional& residual, bool rectify, std::string isa) {
  const Loops loops = loops_for<Loops>(instruction_set(isa));
  const Extent extent = extent_of(given);
  const Values factors("weight", weight, given, 1.0f), shifts("bias", bias, given, 0.0f);
  const at::Tensor x = given.contiguous(), added = like("residual", residual, given);
  at::Tensor out = at::empty(x.sizes(), x.options());
  at::Tensor means = at::empty({extent.channels}, x.options());
  at::Tensor variances = at::empty({extent.channels}, x.options());
  const float* from = x.data_ptr<float>();
  const float* beside = pointer(added);
  float* to = out.data_ptr<float>();
  float* mean_of = means.data_ptr<float>();
  float* variance_of = variances.data_ptr<float>();
  const Channel channel = extent.channel();
  for_each_channel(extent, [&](std::int64_t c) {
    const float* values = from + c * extent.inner;
    // Lanes of fp32 lose what is small beside the sum, all in one direction where values are alike.
    // What is left about this mean is small, and says what was lost.
    const float about = static_cast<float>(loops.sum(channel, values) / extent.count());
    double sums[2];
    loops.apart(channel, values, about, sums);
    const double off = sums[0] / extent.count();
    const double squares = sums[1] / extent.count() - off * off;
    const double variance = squares < 0 ? 0 : squares;  // NaN stays
    const float mean = static_cast<float>(about + off);
    mean_of[c] = mean;
    variance_of[c] = static_cast<float>(variance);
    const float factor = static_cast<float>(factors[c] / std::sqrt(variance + eps));
    const float* more = beside == nullptr ? nullptr : beside + c * extent.inner;
    loops.normalise(channel, values, {mean, factor, shifts[c], more, rectify},
                    to + c * extent.inner);
  });
  return Tensors(out, means, variances);
}

Gradients batch_norm_grad_cpu(const at::Tensor& given_grad, const at::Tensor& given,
                              const Optional& weight, const at::Tensor& mean,
                              const at::Tensor& variance, double eps, const Optional& rectified,
                              bool keep, std::string isa) {
  const Loops loops = loops_for<Loops>(instruction_set(isa));
  const Extent extent = extent_of(given);
  check_like("grad", given_grad, given);
  const Values factors("weight", weight, given, 1.0f);
  const Values means("mean", mean, given, 0.0f), variances("variance", variance, given, 0.0f);
  const at::Tensor x = given.contiguous(), grad = given_grad.contiguous();
  const at::Tensor result = like("rectified", rectified, given);
  at::Tensor out = at::empty(x.sizes(), x.options());
  at::Tensor passed = keep ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options());
  at::Tensor weight_grad = at::empty({extent.channels}, x.options());
  at::Tensor bias_grad = at::empty({extent.channels}, x.options());
  const float* from = x.data_ptr<float>();
  const float* gradient = grad.data_ptr<float>();
  const float* mask = pointer(result);
  float* to = out.data_ptr<float>();
  float* passed_to = keep ? passed.data_ptr<float>() : nullptr;
  float* weight_to = weight_grad.data_ptr<float>();
  float* bias_to = bias_grad.data_ptr<float>();
  const Channel channel = extent.channel();
  for_each_channel(extent, [&](std::int64_t c) {
    const std::int64_t at = c * extent.inner;
    const Above above{gradient + at, mask == nullptr ? nullptr : mask + at};
    double sums[2];
    loops.sums(channel, above, from + at, means[c], sums);
    const double inverse = 1 / std::sqrt(static_cast<double>(variances[c]) + eps);
    bias_to[c] = static_cast<float>(sums[0]);
    weight_to[c] = static_cast<float>(sums[1] * inverse);
    const float offset = static_cast<float>(sums[0] / extent.count());
    const float slope = static_cast<float>(sums[1] * inverse * inverse / extent.count());
    const float factor = static_cast<float>(factors[c] * inverse);
    loops.differentiate(channel, above, from + at, {means[c], offset, slope, factor}, to + at,
                        passed_to == nullptr ? nullptr : passed_to + at);
  });
  return Gradients(out, weight_grad, bias_grad, passed);
}

Tensors shapes_of(const at::Tensor& x) {
  const at::Tensor channels = at::empty({x.size(1)}, x.options());
  return Tensors(at::empty(x.sizes(), x.options()), channels, at::empty_like(channels));
}

Tensors batch_norm_meta(const at::Tensor& x, const Optional& weight, const Optional& bias, double,
                        const Optional& residual, bool, std::string) {
  extent_of(x);
  for (const auto* given : {&weight, &bias}) {
    if (is_there(*given)) {
      check_channels(given == &weight ? "weight" : "bias", **given, x);
    }
  }
  if (is_there(residual)) {
    check_like("residual", *residual, x);
  }
  return shapes_of(x);
}

Gradients batch_norm_grad_meta(const at::Tensor& grad, const at::Tensor& x, const Optional&,
                               const at::Tensor& mean, const at::Tensor& variance, double,
                               const Optional&, bool keep, std::string) {
  extent_of(x);
  check_like("grad", grad, x);
  check_channels("mean", mean, x);
  check_channels("variance", variance, x);
  const Tensors found = shapes_of(x);
  return Gradients(std::get<0>(found), std::get<1>(found), std::get<2>(found),
                   keep ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options()));
}

}  // namespace

// `isa` forces one instruction set of the CPU (generic, avx2, avx512, neon); results do not differ.
TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def(
      "batch_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? residual=None, "
      "bool rectify=False, *, str isa='auto') -> (Tensor, Tensor, Tensor)");
  m.def(
      "batch_norm_grad(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor variance, "
      "float eps, Tensor? rectified=None, bool keep=False, *, str isa='auto') "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(narrowgauge, CPU, m) {
  m.impl("batch_norm", batch_norm_cpu);
  m.impl("batch_norm_grad", batch_norm_grad_cpu);
}

TORCH_LIBRARY_IMPL(narrowgauge, Meta, m) {
  m.impl("batch_norm", batch_norm_meta);
  m.impl("batch_norm_grad", batch_norm_grad_meta);
}

}  // namespace batch_norm
}  // namespace narrowgauge
