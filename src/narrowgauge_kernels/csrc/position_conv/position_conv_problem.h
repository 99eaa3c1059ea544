// What the operators at listed positions are given, and the checks that need no look at data, for
// every device.
#pragma once

#include <c10/util/Optional.h>

#include <cstdint>
#include <vector>

#include "common/torch_tensor.h"
#include "position_conv/position_conv.h"

namespace narrowgauge {
namespace position_conv {

using Sizes = std::vector<std::int64_t>;
using Count = c10::optional<at::Tensor>;

struct Problem {
  const at::Tensor& rows;
  const at::Tensor& positions;
  const at::Tensor& packed;
  const at::Tensor& bias;
  Sizes taps;  // in rows
  float slope;
  const Count& count;  // how many of the positions are meant
};

inline std::int64_t padded(std::int64_t filters) {
  return filters == 1 ? 1 : (filters + kNarrowest - 1) / kNarrowest * kNarrowest;
}

inline void check_floats(const char* name, const at::Tensor& tensor, std::int64_t dimensions,
                         at::Device device) {
  TORCH_CHECK(tensor.device() == device && tensor.scalar_type() == at::kFloat &&
                  tensor.is_contiguous() && tensor.dim() == dimensions,
              "position_conv: ", name, " is ", tensor.scalar_type(), " of shape ", tensor.sizes(),
              " on ", tensor.device(), "; it must be float32 of ", dimensions,
              " dimensions, contiguous, on ", device);
}

inline void check_positions(const at::Tensor& positions, at::Device device) {
  TORCH_CHECK(positions.device() == device && positions.scalar_type() == at::kLong &&
                  positions.is_contiguous() && positions.dim() == 1,
              "position_conv: positions is ", positions.scalar_type(), " of shape ",
              positions.sizes(), " on ", positions.device(),
              "; it must be int64 [n], contiguous, on ", device);
}

inline void check_flags(const char* name, const at::Tensor& flags, at::Device device) {
  TORCH_CHECK(flags.device() == device && flags.scalar_type() == at::kBool &&
                  flags.is_contiguous() && flags.dim() == 1,
              "positions: ", name, " is ", flags.scalar_type(), " of shape ", flags.sizes(), " on ",
              flags.device(), "; it must be bool of one dimension, contiguous, on ", device);
}

inline void check_count(const Count& count, at::Device device) {
  if (count.has_value()) {
    TORCH_CHECK(count->device() == device && count->scalar_type() == at::kLong &&
                    count->numel() == 1,
                "positions: count is ", count->scalar_type(), " of shape ", count->sizes(), " on ",
                count->device(), "; it must be one int64 on ", device);
  }
}

inline void check_shapes(const Problem& problem) {
  const at::Device device = problem.rows.device();
  check_floats("rows", problem.rows, 2, device);
  check_floats("packed", problem.packed, 1, device);
  check_floats("bias", problem.bias, 1, device);
  check_positions(problem.positions, device);
  check_count(problem.count, device);
  const std::int64_t channels = problem.rows.size(1);
  const std::int64_t wanted =
      static_cast<std::int64_t>(problem.taps.size()) * channels * padded(problem.bias.size(0));
  TORCH_CHECK(!problem.taps.empty() && problem.packed.numel() == wanted,
              "position_conv: packed has ", problem.packed.numel(), " elements; ",
              problem.taps.size(), " taps, ", channels, " channels and ", problem.bias.size(0),
              " filters need ", wanted);
}

// Whether two contiguous tensors of floats have bytes in common; empty ones have none.
inline bool overlap(const at::Tensor& one, const at::Tensor& other) {
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
inline void check_rows(const char* name, const Problem& problem, const at::Tensor& rows) {
  check_floats(name, rows, 2, problem.rows.device());
  TORCH_CHECK(rows.size(0) == problem.rows.size(0) && rows.size(1) == problem.bias.size(0),
              "position_conv: ", name, " has shape ", rows.sizes(), "; ", problem.rows.size(0),
              " rows of ", problem.bias.size(0), " are needed");
  TORCH_CHECK(!overlap(rows, problem.rows), "position_conv: ", name,
              " share memory with the rows that are read; they must be others");
}

inline void check_added(const Problem& problem, const at::Tensor& share, const at::Tensor& state,
                        const at::Tensor& total) {
  check_rows("state", problem, state);
  check_rows("total", problem, total);
  TORCH_CHECK(!overlap(state, total),
              "position_conv: state and total share memory; they must be others");
  check_floats("share", share, 1, problem.rows.device());
  TORCH_CHECK(share.size(0) == problem.positions.size(0), "position_conv: share has ",
              share.size(0), " elements for ", problem.positions.size(0), " positions");
}

}  // namespace position_conv
}  // namespace narrowgauge
