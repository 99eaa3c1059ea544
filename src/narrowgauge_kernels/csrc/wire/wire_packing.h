// Packing on the CPU: how channels and threads share a tensor. Included by wire.cpp only.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "common/instruction_set.h"
#include "common/numeric_loops.h"
#include "wire/wire.h"
#include "wire/wire_problem.h"

namespace narrowgauge {
namespace wire {
namespace {

// Below this many elements, waking a thread costs more than it saves.
constexpr std::int64_t kLeastParallelCount = 32768;
// Rows of channels are worked on in tables of so many elements or more, so that calls are few.
constexpr std::int64_t kLeastTable = 512;
// Channels per thread from which on an uneven share of them costs little.
constexpr std::int64_t kManyChannels = 4;

float value_of_magnitude(std::int32_t bits, float) {
  return float_of(static_cast<std::uint32_t>(bits));
}

template <typename T>
float value_of_magnitude(std::int32_t bits, T) {
  return Numeric<T>::widen(T{static_cast<std::uint16_t>(bits)});
}

float scale_of(float largest) {
  if (!std::isfinite(largest)) {
    return std::isnan(largest) ? std::numeric_limits<float>::quiet_NaN() : largest;
  }
  return largest == 0 ? 1.0f : std::min(std::max(largest / 127.0f, kLeastScale), kMostScale);
}

// What the seed gives for the element with this index: wire.py's _keys.
Draws draws_at(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t mixed = seed + 0x9e3779b97f4a7c15u * ((index >> 32) + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  mixed ^= mixed >> 31;
  return {static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(mixed),
          static_cast<std::uint32_t>(mixed >> 32)};
}

// Magnitudes of all channels, raised by any thread.
class Largest {
 public:
  explicit Largest(std::int64_t channels) : bits_(channels) {
    for (std::atomic<std::int32_t>& one : bits_) {
      one.store(0, std::memory_order_relaxed);
    }
  }
  void raise(std::int64_t channel, std::int32_t bits) {
    std::atomic<std::int32_t>& one = bits_[channel];
    std::int32_t before = one.load(std::memory_order_relaxed);
    while (before < bits && !one.compare_exchange_weak(before, bits, std::memory_order_relaxed)) {
    }
  }
  std::int32_t at(std::int64_t channel) const {
    return bits_[channel].load(std::memory_order_relaxed);
  }

 private:
  std::vector<std::atomic<std::int32_t>> bits_;
};

// Calls visit(first, count, channel) for the runs of one channel in elements [begin, end).
template <typename Visit>
void runs(const Order& order, std::int64_t begin, std::int64_t end, const Visit& visit) {
  for (std::int64_t i = begin; i < end;) {
    const std::int64_t count = std::min(end - i, order.spatial - i % order.spatial);
    visit(i, count, i / order.spatial % order.channels);
    i += count;
  }
}

// Rows that are worked on at once, and rows that are worth a thread.
std::int64_t rows_at_once(const Order& order) {
  return (kLeastTable + order.channels - 1) / order.channels;
}
std::int64_t least_parallel_rows(const Order& order) {
  return (kLeastParallelCount + order.channels - 1) / order.channels;
}

template <typename T>
class Packing {
 public:
  Packing(const Order& order, const T* x, c10::optional<std::int64_t> seed, std::int64_t first,
          std::int8_t* values, float* scale, InstructionSet set)
      : order_(order), x_(x), drawing_(seed.has_value()),
        seed_(static_cast<std::uint64_t>(seed.value_or(0))),
        first_(static_cast<std::uint64_t>(first)), values_(values), scale_(scale),
        loops_(loops_for<Loops<T>>(set)), reciprocal_(order.channels), limit_(order.channels) {}

  void run() {
    if (order_.rows) {
      pack_rows();
    } else if (channels_fill_threads()) {
      pack_by_channel();
    } else {
      pack_by_run();
    }
  }

 private:
  using Bits = typename Magnitude<T>::Type;

  std::int64_t count() const { return order_.samples * order_.channels * order_.spatial; }

  bool channels_fill_threads() const {
    const std::int64_t threads = at::get_num_threads();
    return count() < kLeastParallelCount || order_.channels % threads == 0 ||
           order_.channels >= kManyChannels * threads;
  }

  void set_channel(std::int64_t channel, std::int32_t largest) {
    const float scale = scale_of(value_of_magnitude(largest, T{}));
    const bool finite = std::isfinite(scale);
    scale_[channel] = scale;
    reciprocal_[channel] = finite ? 1.0f / scale : 0.0f;
    limit_[channel] = finite ? 127.0f : 0.0f;
  }

  // A channel's second reading finds it in the cache.
  void pack_by_channel() {
    const std::int64_t each = order_.samples * order_.spatial;
    const std::int64_t grain = (kLeastParallelCount + each - 1) / each;
    at::parallel_for(0, order_.channels, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t channel = begin; channel < end; ++channel) {
        Bits largest = 0;
        for (std::int64_t sample = 0; sample < order_.samples; ++sample) {
          largest = loops_.largest_run(order_.spatial, x_ + start(sample, channel), largest);
        }
        set_channel(channel, largest);
        for (std::int64_t sample = 0; sample < order_.samples; ++sample) {
          pack_run(start(sample, channel), order_.spatial, channel);
        }
      }
    });
  }

  std::int64_t start(std::int64_t sample, std::int64_t channel) const {
    return (sample * order_.channels + channel) * order_.spatial;
  }

  // Few channels: threads share one, or begin anywhere in it.
  void pack_by_run() {
    Largest largest(order_.channels);
    at::parallel_for(0, count(), kLeastParallelCount, [&](std::int64_t begin, std::int64_t end) {
      runs(order_, begin, end, [&](std::int64_t i, std::int64_t count, std::int64_t channel) {
        largest.raise(channel, loops_.largest_run(count, x_ + i, 0));
      });
    });
    for (std::int64_t channel = 0; channel < order_.channels; ++channel) {
      set_channel(channel, largest.at(channel));
    }
    at::parallel_for(0, count(), kLeastParallelCount, [&](std::int64_t begin, std::int64_t end) {
      runs(order_, begin, end, [&](std::int64_t i, std::int64_t count, std::int64_t channel) {
        pack_run(i, count, channel);
      });
    });
  }

  void pack_run(std::int64_t i, std::int64_t count, std::int64_t channel) const {
    const Steps steps{&reciprocal_[channel], &limit_[channel]};
    if (!drawing_) {
      loops_.pack_run(count, x_ + i, steps, values_ + i);
      return;
    }
    while (count > 0) {
      const std::uint64_t index = first_ + static_cast<std::uint64_t>(i);
      const std::int64_t to_next_keys = (std::int64_t(1) << 32) - (index & 0xffffffffu);
      const std::int64_t now = std::min(count, to_next_keys);
      loops_.draw_run(now, x_ + i, steps, draws_at(seed_, index), nullptr, values_ + i);
      i += now;
      count -= now;
    }
  }

  void pack_rows() {
    const std::int64_t rows = order_.samples * order_.spatial;
    Largest largest(order_.channels);
    at::parallel_for(0, rows, least_parallel_rows(order_),
                     [&](std::int64_t begin, std::int64_t end) {
                       raise_by_rows(begin, end, largest);
                     });
    for (std::int64_t channel = 0; channel < order_.channels; ++channel) {
      set_channel(channel, largest.at(channel));
    }
    make_table();
    at::parallel_for(0, rows, least_parallel_rows(order_),
                     [&](std::int64_t begin, std::int64_t end) { pack_rows(begin, end); });
  }

  void raise_by_rows(std::int64_t begin, std::int64_t end, Largest& largest) const {
    const std::int64_t step = rows_at_once(order_);
    std::vector<Bits> table(step * order_.channels, 0);
    for (std::int64_t row = begin; row < end; row += step) {
      const std::int64_t count = std::min(step, end - row) * order_.channels;
      loops_.largest_columns(count, x_ + row * order_.channels, table.data());
    }
    for (std::size_t i = 0; i < table.size(); ++i) {
      largest.raise(static_cast<std::int64_t>(i) % order_.channels, table[i]);
    }
  }

  // Steps and indices, these from the first of the table, for rows of one sample.
  void make_table() {
    const std::int64_t step = rows_at_once(order_);
    reciprocal_.resize(step * order_.channels);
    limit_.resize(step * order_.channels);
    offset_.resize(step * order_.channels);
    for (std::int64_t row = 0; row < step; ++row) {
      for (std::int64_t channel = 0; channel < order_.channels; ++channel) {
        const std::int64_t i = row * order_.channels + channel;
        reciprocal_[i] = reciprocal_[channel];
        limit_[i] = limit_[channel];
        offset_[i] = static_cast<std::uint32_t>(offset(row, channel));
      }
    }
  }

  std::int64_t offset(std::int64_t row, std::int64_t channel) const {
    return order_.spatial == 1 ? row * order_.channels + channel : row + channel * order_.spatial;
  }

  void pack_rows(std::int64_t begin, std::int64_t end) const {
    const std::int64_t step = rows_at_once(order_);
    const Steps steps{reciprocal_.data(), limit_.data()};
    for (std::int64_t row = begin; row < end;) {
      std::int64_t now = std::min(step, end - row);
      if (drawing_ && order_.spatial > 1) {
        now = std::min(now, order_.spatial - row % order_.spatial);  // of one sample
      }
      const std::int64_t i = row * order_.channels;
      const std::int64_t count = now * order_.channels;
      if (drawing_) {
        draw_rows(row, now, steps);
      } else {
        loops_.pack_columns(count, x_ + i, steps, values_ + i);
      }
      row += now;
    }
  }

  void draw_rows(std::int64_t row, std::int64_t rows, const Steps& steps) const {
    const std::int64_t i = row * order_.channels;
    const std::int64_t count = rows * order_.channels;
    const std::int64_t sample = row / order_.spatial;
    const std::uint64_t index =
        first_ + static_cast<std::uint64_t>(sample * order_.channels * order_.spatial +
                                            row % order_.spatial);
    const std::uint64_t last = index + offset(rows - 1, order_.channels - 1);
    if (index >> 32 == last >> 32) {
      loops_.draw_columns(count, x_ + i, steps, draws_at(seed_, index), offset_.data(),
                          values_ + i);
      return;
    }
    for (std::int64_t k = 0; k < count; ++k) {  // other keys begin between them
      const std::uint64_t own = index + offset(k / order_.channels, k % order_.channels);
      const Steps one{steps.reciprocal + k, steps.limit + k};
      loops_.draw_run(1, x_ + i + k, one, draws_at(seed_, own), nullptr, values_ + i + k);
    }
  }

  const Order order_;
  const T* x_;
  const bool drawing_;
  const std::uint64_t seed_;
  const std::uint64_t first_;
  std::int8_t* values_;
  float* scale_;
  const Loops<T> loops_;
  // Of the channels first, then of the elements of a table of rows.
  std::vector<float> reciprocal_, limit_;
  std::vector<std::uint32_t> offset_;
};

}  // namespace
}  // namespace wire
}  // namespace narrowgauge
