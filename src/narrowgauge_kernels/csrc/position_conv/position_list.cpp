// Lists of positions: schemas, checks, and the CPU implementation.
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "position_conv/position_conv_problem.h"

namespace narrowgauge {
namespace position_conv {
namespace {

using Listed = std::tuple<at::Tensor, at::Tensor>;

std::int64_t meant(std::int64_t size, const Count& count) {
  if (!count.has_value()) {
    return size;
  }
  return std::min(size, std::max<std::int64_t>(0, *count->data_ptr<std::int64_t>()));
}

// Whether each cell is a tap away from one of the positions, and allowed.
std::vector<char> near_cells(const at::Tensor& positions, const Sizes& taps,
                             const at::Tensor& inside, const Count& count) {
  check_positions(positions, positions.device());
  check_flags("inside", inside, positions.device());
  check_count(count, positions.device());
  const std::int64_t cells = inside.size(0);
  const std::int64_t* position = positions.data_ptr<std::int64_t>();
  const bool* allowed = inside.data_ptr<bool>();
  std::vector<char> near(static_cast<std::size_t>(cells), 0);
  for (std::int64_t i = 0; i < meant(positions.size(0), count); ++i) {
    for (const std::int64_t tap : taps) {
      const std::int64_t cell = position[i] + tap;
      TORCH_CHECK(cell >= 0 && cell < cells, "positions_near: position ", position[i],
                  " has no neighbour ", tap, " rows away among ", cells);
      near[static_cast<std::size_t>(cell)] = static_cast<char>(allowed[cell]);
    }
  }
  return near;
}

// Places of what is set, as many as there is room for, the rest zeros; and how many there are.
template <typename Flag>
Listed list(const Flag* flags, std::int64_t size, std::int64_t capacity,
            const at::TensorOptions& options) {
  TORCH_CHECK(capacity >= 0, "positions: there is no room for ", capacity);
  at::Tensor places = at::zeros({capacity}, options), found = at::zeros({1}, options);
  std::int64_t* to = places.data_ptr<std::int64_t>();
  std::int64_t& number = *found.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < size; ++i) {
    if (flags[i]) {
      if (number < capacity) {
        to[number] = i;
      }
      ++number;
    }
  }
  return Listed(places, found);
}

at::Tensor positions_near_cpu(const at::Tensor& positions, Sizes taps, const at::Tensor& inside) {
  const std::vector<char> near = near_cells(positions, taps, inside, {});
  const std::int64_t size = inside.size(0);
  const std::int64_t number = std::count(near.begin(), near.end(), 1);
  return std::get<0>(list(near.data(), size, number, positions.options()));
}

Listed positions_near_list_cpu(const at::Tensor& positions, Sizes taps, const at::Tensor& inside,
                               std::int64_t capacity, const Count& count) {
  const std::vector<char> near = near_cells(positions, taps, inside, count);
  return list(near.data(), inside.size(0), capacity, positions.options());
}

Listed positions_flagged_cpu(const at::Tensor& flags, std::int64_t capacity, const Count& count) {
  check_flags("flags", flags, flags.device());
  check_count(count, flags.device());
  return list(flags.data_ptr<bool>(), meant(flags.size(0), count), capacity,
              flags.options().dtype(at::kLong));
}

}  // namespace

// A list of a length that the host knows beforehand, and how many there were: more than it has room
// for, where that is short. `count`: how many of the positions, or flags, are meant.
TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def("positions_near(Tensor positions, int[] taps, Tensor inside) -> Tensor");
  m.def(
      "positions_near_list(Tensor positions, int[] taps, Tensor inside, int capacity, *, "
      "Tensor? count=None) -> (Tensor, Tensor)");
  m.def(
      "positions_flagged(Tensor flags, int capacity, *, Tensor? count=None) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(narrowgauge, CPU, m) {
  m.impl("positions_near", positions_near_cpu);
  m.impl("positions_near_list", positions_near_list_cpu);
  m.impl("positions_flagged", positions_flagged_cpu);
}

}  // namespace position_conv
}  // namespace narrowgauge
