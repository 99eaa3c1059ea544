// Convolutions at listed positions: schemas, checks, and the CPU implementation.
#include "position_conv/position_conv.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/instruction_set.h"
#include "position_conv/position_conv_problem.h"

namespace narrowgauge {
namespace position_conv {
namespace {

// Products for which waking a thread pays.
constexpr std::int64_t kLeastParallelProducts = 1 << 18;

// What is computed: `taps` in floats, and of the positions those that are meant.
struct Work {
  const at::Tensor& rows;
  at::Tensor positions;
  const at::Tensor& packed;
  const at::Tensor& bias;
  Sizes taps;
  float slope;
};

at::Tensor meant(const at::Tensor& positions, const Count& count) {
  if (!count.has_value()) {
    return positions;
  }
  const std::int64_t wanted = std::max<std::int64_t>(0, *count->data_ptr<std::int64_t>());
  return positions.narrow(0, 0, std::min(wanted, positions.size(0)));
}

// Every window has to lie within the rows: a position is data, so each is looked at.
Work checked(const Problem& problem) {
  check_shapes(problem);
  Work work = {problem.rows, meant(problem.positions, problem.count), problem.packed,
               problem.bias, problem.taps, problem.slope};
  const std::int64_t cells = problem.rows.size(0), channels = problem.rows.size(1);
  const auto reach = std::minmax_element(work.taps.begin(), work.taps.end());
  const std::int64_t low = std::max<std::int64_t>(0, -*reach.first);
  const std::int64_t high = cells - std::max<std::int64_t>(0, *reach.second);
  const std::int64_t* position = work.positions.data_ptr<std::int64_t>();
  bool inside = true;
  for (std::int64_t i = 0; i < work.positions.size(0); ++i) {
    inside &= position[i] >= low && position[i] < high;
  }
  TORCH_CHECK(inside, "position_conv: a window reaches out of the ", cells, " rows");
  for (std::int64_t& tap : work.taps) {
    tap *= channels;
  }
  return work;
}

// Calls finish(first position, positions, first filter, filters, sums, width) for every block.
template <typename Finish>
void each_block(const Work& work, const Panel& panel, const float* weight, std::int64_t filter,
                std::int64_t filled, std::int64_t begin, std::int64_t end, const Finish& finish) {
  const std::int64_t channels = work.rows.size(1);
  const float* rows = work.rows.data_ptr<float>();
  const std::int64_t* positions = work.positions.data_ptr<std::int64_t>();
  const float* at[kMostRows];
  alignas(64) float sums[kMostRows * kWidest];
  const Windows windows = {at, work.taps.data(), static_cast<std::int64_t>(work.taps.size()),
                           channels};
  for (std::int64_t first = begin; first < end; first += panel.rows) {
    const std::int64_t count = std::min<std::int64_t>(panel.rows, end - first);
    for (std::int64_t r = 0; r < panel.rows; ++r) {  // beyond the end: the last one again
      at[r] = rows + positions[first + std::min(r, count - 1)] * channels;
    }
    panel.multiply(windows, weight, sums);
    finish(first, count, filter, filled, sums, panel.width);
  }
}

template <typename Finish>
void each_dot(const Work& work, const Loops& loops, std::int64_t begin, std::int64_t end,
              const Finish& finish) {
  const std::int64_t channels = work.rows.size(1);
  const float* rows = work.rows.data_ptr<float>();
  const std::int64_t* positions = work.positions.data_ptr<std::int64_t>();
  const float* at[1];
  const Windows windows = {at, work.taps.data(), static_cast<std::int64_t>(work.taps.size()),
                           channels};
  for (std::int64_t i = begin; i < end; ++i) {
    at[0] = rows + positions[i] * channels;
    const float sum = loops.dot(windows, work.packed.data_ptr<float>());
    finish(i, 1, 0, 1, &sum, 1);
  }
}

template <typename Finish>
void run(const Work& work, const std::string& isa, const Finish& finish) {
  const Loops loops = loops_for<Loops>(instruction_set(isa));
  const std::int64_t count = work.positions.size(0), filters = work.bias.size(0);
  const std::int64_t depth = static_cast<std::int64_t>(work.taps.size()) * work.rows.size(1);
  const std::int64_t products = std::max<std::int64_t>(1, depth * padded(filters));
  const std::int64_t grain = std::max<std::int64_t>(kMostRows, kLeastParallelProducts / products);
  at::parallel_for(0, count, grain, [&](std::int64_t begin, std::int64_t end) {
    if (filters == 1) {
      each_dot(work, loops, begin, end, finish);
      return;
    }
    const float* weight = work.packed.data_ptr<float>();
    for (std::int64_t filter = 0; filter < filters;) {
      const Panel* panel = loops.panels;
      while (panel->width > padded(filters) - filter) {
        ++panel;
      }
      const std::int64_t filled = std::min<std::int64_t>(panel->width, filters - filter);
      each_block(work, *panel, weight, filter, filled, begin, end, finish);
      weight += depth * panel->width;
      filter += panel->width;
    }
  });
}

// leaky(sums + bias) into the row of F floats that row_of(i) gives for position i.
template <typename RowOf>
void put(const Work& work, const std::string& isa, const RowOf& row_of) {
  const float* added = work.bias.data_ptr<float>();
  run(work, isa, [&](std::int64_t first, std::int64_t count, std::int64_t filter,
                     std::int64_t filled, const float* sums, std::int64_t width) {
    for (std::int64_t r = 0; r < count; ++r) {
      float* row = row_of(first + r) + filter;
      for (std::int64_t f = 0; f < filled; ++f) {
        const float value = sums[r * width + f] + added[filter + f];
        row[f] = value < 0.0f ? value * work.slope : value;
      }
    }
  });
}

at::Tensor position_conv_cpu(const at::Tensor& rows, const at::Tensor& positions,
                             const at::Tensor& packed, const at::Tensor& bias, Sizes taps,
                             double slope, std::string isa, const Count& count) {
  const Problem problem = {rows, positions, packed, bias, std::move(taps),
                           static_cast<float>(slope), count};
  const Work work = checked(problem);
  const std::int64_t filters = bias.size(0);
  at::Tensor out = at::empty({positions.size(0), filters}, rows.options());
  float* to = out.data_ptr<float>();
  put(work, isa, [=](std::int64_t i) { return to + i * filters; });
  return out;
}

// Threads write the rows of their own positions: the same one twice would be written by two.
void check_once(const Work& work) {
  std::vector<bool> seen(static_cast<std::size_t>(work.rows.size(0)), false);
  const std::int64_t* position = work.positions.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < work.positions.size(0); ++i) {
    const auto at = static_cast<std::size_t>(position[i]);
    TORCH_CHECK(!seen[at], "position_conv: position ", position[i],
                " is listed twice; results are written to each at most once");
    seen[at] = true;
  }
}

void position_conv_set_cpu(const at::Tensor& rows, const at::Tensor& positions,
                           const at::Tensor& packed, const at::Tensor& bias, Sizes taps,
                           double slope, const at::Tensor& out, std::string isa,
                           const Count& count) {
  const Problem problem = {rows, positions, packed, bias, std::move(taps),
                           static_cast<float>(slope), count};
  const Work work = checked(problem);
  check_rows("out", problem, out);
  check_once(work);
  const std::int64_t filters = bias.size(0);
  const std::int64_t* position = positions.data_ptr<std::int64_t>();
  float* to = out.data_ptr<float>();
  put(work, isa, [=](std::int64_t i) { return to + position[i] * filters; });
}

void position_conv_add_cpu(const at::Tensor& rows, const at::Tensor& positions,
                           const at::Tensor& packed, const at::Tensor& bias, Sizes taps,
                           const at::Tensor& share, const at::Tensor& state,
                           const at::Tensor& total, std::string isa, const Count& count) {
  const Problem problem = {rows, positions, packed, bias, std::move(taps), 1.0f, count};
  const Work work = checked(problem);
  check_added(problem, share, state, total);
  check_once(work);
  const std::int64_t filters = bias.size(0);
  const std::int64_t* position = positions.data_ptr<std::int64_t>();
  const float* shares = share.data_ptr<float>();
  float *x = state.data_ptr<float>(), *y = total.data_ptr<float>();
  const float* added = bias.data_ptr<float>();
  run(work, isa, [&](std::int64_t first, std::int64_t many, std::int64_t filter,
                     std::int64_t filled, const float* sums, std::int64_t width) {
    for (std::int64_t r = 0; r < many; ++r) {
      const std::int64_t start = position[first + r] * filters + filter;
      for (std::int64_t f = 0; f < filled; ++f) {
        const float value = sums[r * width + f] + added[filter + f];
        x[start + f] += value;
        y[start + f] += shares[first + r] * value;
      }
    }
  });
}

}  // namespace

// `isa` forces one instruction set of the CPU (generic, avx2, avx512, neon); results do not differ.
// `count` says, where the tensors are, how many of the positions are meant; what else there is room for
// in the result is not written.
TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def(
      "position_conv(Tensor rows, Tensor positions, Tensor packed, Tensor bias, int[] taps, "
      "float slope, *, str isa='auto', Tensor? count=None) -> Tensor");
  m.def(
      "position_conv_set(Tensor rows, Tensor positions, Tensor packed, Tensor bias, int[] taps, "
      "float slope, Tensor(a!) out, *, str isa='auto', Tensor? count=None) -> ()");
  m.def(
      "position_conv_add(Tensor rows, Tensor positions, Tensor packed, Tensor bias, int[] taps, "
      "Tensor share, Tensor(a!) state, Tensor(b!) total, *, str isa='auto', Tensor? count=None) "
      "-> ()");
}

TORCH_LIBRARY_IMPL(narrowgauge, CPU, m) {
  m.impl("position_conv", position_conv_cpu);
  m.impl("position_conv_set", position_conv_set_cpu);
  m.impl("position_conv_add", position_conv_add_cpu);
}

}  // namespace position_conv
}  // namespace narrowgauge
