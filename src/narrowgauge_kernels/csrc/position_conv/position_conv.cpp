// Convolutions at listed positions: schemas, checks, and the CPU implementation.
#include "position_conv/position_conv.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/instruction_set.h"

namespace narrowgauge {
namespace position_conv {
namespace {

using Sizes = std::vector<std::int64_t>;

// Products for which waking a thread pays.
constexpr std::int64_t kLeastParallelProducts = 1 << 18;

void check_floats(const char* name, const at::Tensor& tensor, std::int64_t dimensions) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat &&
                  tensor.is_contiguous() && tensor.dim() == dimensions,
              "position_conv: ", name, " is ", tensor.scalar_type(), " of shape ", tensor.sizes(),
              " on ", tensor.device(), "; it must be float32 of ", dimensions,
              " dimensions, contiguous, on the CPU");
}

std::int64_t padded(std::int64_t filters) {
  return filters == 1 ? 1 : (filters + kNarrowest - 1) / kNarrowest * kNarrowest;
}

struct Problem {
  const at::Tensor& rows;
  const at::Tensor& positions;
  const at::Tensor& packed;
  const at::Tensor& bias;
  Sizes taps;  // in rows; in floats once checked
  float slope;
};

// Every window has to lie within the rows: a position is data, so each is looked at.
void check(Problem& problem) {
  check_floats("rows", problem.rows, 2);
  check_floats("packed", problem.packed, 1);
  check_floats("bias", problem.bias, 1);
  const at::Tensor& positions = problem.positions;
  TORCH_CHECK(positions.device().is_cpu() && positions.scalar_type() == at::kLong &&
                  positions.is_contiguous() && positions.dim() == 1,
              "position_conv: positions is ", positions.scalar_type(), " of shape ",
              positions.sizes(), "; it must be int64 [n], contiguous, on the CPU");
  const std::int64_t cells = problem.rows.size(0), channels = problem.rows.size(1);
  const std::int64_t wanted =
      static_cast<std::int64_t>(problem.taps.size()) * channels * padded(problem.bias.size(0));
  TORCH_CHECK(!problem.taps.empty() && problem.packed.numel() == wanted,
              "position_conv: packed has ", problem.packed.numel(), " elements; ",
              problem.taps.size(), " taps, ", channels, " channels and ", problem.bias.size(0),
              " filters need ", wanted);
  const auto reach = std::minmax_element(problem.taps.begin(), problem.taps.end());
  const std::int64_t low = std::max<std::int64_t>(0, -*reach.first);
  const std::int64_t high = cells - std::max<std::int64_t>(0, *reach.second);
  const std::int64_t* position = positions.data_ptr<std::int64_t>();
  bool inside = true;
  for (std::int64_t i = 0; i < positions.size(0); ++i) {
    inside &= position[i] >= low && position[i] < high;
  }
  TORCH_CHECK(inside, "position_conv: a window reaches out of the ", cells, " rows");
  for (std::int64_t& tap : problem.taps) {
    tap *= channels;
  }
}

// Calls finish(first position, positions, first filter, filters, sums, width) for every block.
template <typename Finish>
void each_block(const Problem& problem, const Panel& panel, const float* weight,
                std::int64_t filter, std::int64_t filled, std::int64_t begin, std::int64_t end,
                const Finish& finish) {
  const std::int64_t channels = problem.rows.size(1);
  const float* rows = problem.rows.data_ptr<float>();
  const std::int64_t* positions = problem.positions.data_ptr<std::int64_t>();
  const float* at[kMostRows];
  alignas(64) float sums[kMostRows * kWidest];
  const Windows windows = {at, problem.taps.data(),
                           static_cast<std::int64_t>(problem.taps.size()), channels};
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
void each_dot(const Problem& problem, const Loops& loops, std::int64_t begin, std::int64_t end,
              const Finish& finish) {
  const std::int64_t channels = problem.rows.size(1);
  const float* rows = problem.rows.data_ptr<float>();
  const std::int64_t* positions = problem.positions.data_ptr<std::int64_t>();
  const float* at[1];
  const Windows windows = {at, problem.taps.data(),
                           static_cast<std::int64_t>(problem.taps.size()), channels};
  for (std::int64_t i = begin; i < end; ++i) {
    at[0] = rows + positions[i] * channels;
    const float sum = loops.dot(windows, problem.packed.data_ptr<float>());
    finish(i, 1, 0, 1, &sum, 1);
  }
}

template <typename Finish>
void run(const Problem& problem, const std::string& isa, const Finish& finish) {
  const Loops loops = loops_for<Loops>(instruction_set(isa));
  const std::int64_t count = problem.positions.size(0), filters = problem.bias.size(0);
  const std::int64_t depth =
      static_cast<std::int64_t>(problem.taps.size()) * problem.rows.size(1);
  const std::int64_t products = std::max<std::int64_t>(1, depth * padded(filters));
  const std::int64_t grain = std::max<std::int64_t>(kMostRows, kLeastParallelProducts / products);
  at::parallel_for(0, count, grain, [&](std::int64_t begin, std::int64_t end) {
    if (filters == 1) {
      each_dot(problem, loops, begin, end, finish);
      return;
    }
    const float* weight = problem.packed.data_ptr<float>();
    for (std::int64_t filter = 0; filter < filters;) {
      const Panel* panel = loops.panels;
      while (panel->width > padded(filters) - filter) {
        ++panel;
      }
      const std::int64_t filled = std::min<std::int64_t>(panel->width, filters - filter);
      each_block(problem, *panel, weight, filter, filled, begin, end, finish);
      weight += depth * panel->width;
      filter += panel->width;
    }
  });
}

// leaky(sums + bias) into the row of F floats that row_of(i) gives for position i.
template <typename RowOf>
void put(const Problem& problem, const std::string& isa, const RowOf& row_of) {
  const float* added = problem.bias.data_ptr<float>();
  run(problem, isa, [&](std::int64_t first, std::int64_t count, std::int64_t filter,
                        std::int64_t filled, const float* sums, std::int64_t width) {
    for (std::int64_t r = 0; r < count; ++r) {
      float* row = row_of(first + r) + filter;
      for (std::int64_t f = 0; f < filled; ++f) {
        const float value = sums[r * width + f] + added[filter + f];
        row[f] = value < 0.0f ? value * problem.slope : value;
      }
    }
  });
}

at::Tensor position_conv_cpu(const at::Tensor& rows, const at::Tensor& positions,
                             const at::Tensor& packed, const at::Tensor& bias, Sizes taps,
                             double slope, std::string isa) {
  Problem problem = {rows, positions, packed, bias, std::move(taps), static_cast<float>(slope)};
  check(problem);
  const std::int64_t filters = bias.size(0);
  at::Tensor out = at::empty({positions.size(0), filters}, rows.options());
  float* to = out.data_ptr<float>();
  put(problem, isa, [=](std::int64_t i) { return to + i * filters; });
  return out;
}

// Whether two contiguous tensors of floats have bytes in common; empty ones have none.
bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const auto begin = [](const at::Tensor& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  };
  const auto end = [&](const at::Tensor& tensor) {
    return begin(tensor) + static_cast<std::uintptr_t>(tensor.numel()) * sizeof(float);
  };
  return one.numel() != 0 && other.numel() != 0 && begin(one) < end(other) &&
         begin(other) < end(one);
}

// `rows` will be written: nothing that any thread reads may be among their bytes.
void check_rows(const char* name, const Problem& problem, const at::Tensor& rows) {
  check_floats(name, rows, 2);
  TORCH_CHECK(rows.size(0) == problem.rows.size(0) && rows.size(1) == problem.bias.size(0),
              "position_conv: ", name, " has shape ", rows.sizes(), "; ", problem.rows.size(0),
              " rows of ", problem.bias.size(0), " are needed");
  TORCH_CHECK(!overlap(rows, problem.rows), "position_conv: ", name,
              " share memory with the rows that are read; they must be others");
}

// Threads write the rows of their own positions: the same one twice would be written by two.
void check_once(const Problem& problem) {
  std::vector<bool> seen(static_cast<std::size_t>(problem.rows.size(0)), false);
  const std::int64_t* position = problem.positions.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < problem.positions.size(0); ++i) {
    const auto at = static_cast<std::size_t>(position[i]);
    TORCH_CHECK(!seen[at], "position_conv: position ", position[i],
                " is listed twice; results are written to each at most once");
    seen[at] = true;
  }
}

void position_conv_set_cpu(const at::Tensor& rows, const at::Tensor& positions,
                           const at::Tensor& packed, const at::Tensor& bias, Sizes taps,
                           double slope, const at::Tensor& out, std::string isa) {
  Problem problem = {rows, positions, packed, bias, std::move(taps), static_cast<float>(slope)};
  check(problem);
  check_rows("out", problem, out);
  check_once(problem);
  const std::int64_t filters = bias.size(0);
  const std::int64_t* position = positions.data_ptr<std::int64_t>();
  float* to = out.data_ptr<float>();
  put(problem, isa, [=](std::int64_t i) { return to + position[i] * filters; });
}

void position_conv_add_cpu(const at::Tensor& rows, const at::Tensor& positions,
                           const at::Tensor& packed, const at::Tensor& bias, Sizes taps,
                           const at::Tensor& share, const at::Tensor& state,
                           const at::Tensor& total, std::string isa) {
  Problem problem = {rows, positions, packed, bias, std::move(taps), 1.0f};
  check(problem);
  check_rows("state", problem, state);
  check_rows("total", problem, total);
  TORCH_CHECK(!overlap(state, total),
              "position_conv: state and total share memory; they must be others");
  check_once(problem);
  check_floats("share", share, 1);
  TORCH_CHECK(share.size(0) == positions.size(0), "position_conv: share has ", share.size(0),
              " elements for ", positions.size(0), " positions");
  const std::int64_t filters = bias.size(0);
  const std::int64_t* position = positions.data_ptr<std::int64_t>();
  const float* shares = share.data_ptr<float>();
  float *x = state.data_ptr<float>(), *y = total.data_ptr<float>();
  const float* added = bias.data_ptr<float>();
  run(problem, isa, [&](std::int64_t first, std::int64_t count, std::int64_t filter,
                        std::int64_t filled, const float* sums, std::int64_t width) {
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t start = position[first + r] * filters + filter;
      for (std::int64_t f = 0; f < filled; ++f) {
        const float value = sums[r * width + f] + added[filter + f];
        x[start + f] += value;
        y[start + f] += shares[first + r] * value;
      }
    }
  });
}

at::Tensor positions_near_cpu(const at::Tensor& positions, Sizes taps, const at::Tensor& inside) {
  TORCH_CHECK(positions.scalar_type() == at::kLong && positions.is_contiguous() &&
                  positions.dim() == 1 && inside.scalar_type() == at::kBool &&
                  inside.is_contiguous() && inside.dim() == 1,
              "positions_near: positions is ", positions.scalar_type(), " of shape ",
              positions.sizes(), " and inside ", inside.scalar_type(), " of shape ",
              inside.sizes(), "; they must be int64 [n] and bool [P], contiguous");
  const std::int64_t cells = inside.size(0), count = positions.size(0);
  const std::int64_t* position = positions.data_ptr<std::int64_t>();
  const bool* allowed = inside.data_ptr<bool>();
  std::vector<char> near(static_cast<std::size_t>(cells), 0);
  for (std::int64_t i = 0; i < count; ++i) {
    for (const std::int64_t tap : taps) {
      const std::int64_t cell = position[i] + tap;
      TORCH_CHECK(cell >= 0 && cell < cells, "positions_near: position ", position[i],
                  " has no neighbour ", tap, " rows away among ", cells);
      near[static_cast<std::size_t>(cell)] = 1;
    }
  }
  std::int64_t found = 0;
  for (std::int64_t cell = 0; cell < cells; ++cell) {
    found += near[static_cast<std::size_t>(cell)] & static_cast<char>(allowed[cell]);
  }
  at::Tensor out = at::empty({found}, positions.options());
  std::int64_t* to = out.data_ptr<std::int64_t>();
  for (std::int64_t cell = 0; cell < cells; ++cell) {
    if (near[static_cast<std::size_t>(cell)] != 0 && allowed[cell]) {
      *to++ = cell;
    }
  }
  return out;
}

}  // namespace

// `isa` forces one instruction set of the CPU (generic, avx2, avx512, neon); results do not differ.
TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def(
      "position_conv(Tensor rows, Tensor positions, Tensor packed, Tensor bias, int[] taps, "
      "float slope, *, str isa='auto') -> Tensor");
  m.def(
      "position_conv_set(Tensor rows, Tensor positions, Tensor packed, Tensor bias, int[] taps, "
      "float slope, Tensor(a!) out, *, str isa='auto') -> ()");
  m.def(
      "position_conv_add(Tensor rows, Tensor positions, Tensor packed, Tensor bias, int[] taps, "
      "Tensor share, Tensor(a!) state, Tensor(b!) total, *, str isa='auto') -> ()");
  m.def("positions_near(Tensor positions, int[] taps, Tensor inside) -> Tensor");
}

TORCH_LIBRARY_IMPL(narrowgauge, CPU, m) {
  m.impl("position_conv", position_conv_cpu);
  m.impl("position_conv_set", position_conv_set_cpu);
  m.impl("position_conv_add", position_conv_add_cpu);
  m.impl("positions_near", positions_near_cpu);
}

}  // namespace position_conv
}  // namespace narrowgauge
