// The bodies of the loops. Included once by each batch_norm_<instructions>.cpp, which then names the
// set it makes.
//
// The anonymous namespace is load-bearing: each including file has its own compiler flags, and a
// shared inline function would let the linker keep, say, the AVX-512 copy for everyone.
#pragma once

#include <algorithm>
#include <cstring>

#include "batch_norm/batch_norm.h"

namespace narrowgauge {
namespace batch_norm {
namespace {

// Eight floats, which the compiler makes two vectors of where its own are narrower. Sums that it
// would have to reorder it leaves alone without -ffast-math, hence the lanes by name.
constexpr int kLanes = 8;
typedef float Vector __attribute__((vector_size(4 * kLanes)));

// Through memory: a vector wider than a register has no settled way to be an argument.
inline void load(const float* from, Vector* to) { std::memcpy(to, from, sizeof *to); }

// Two sums of lanes that do not wait for each other.
struct Pair {
  Vector even = {}, odd = {};

  double take() {
    float lanes[2 * kLanes];
    std::memcpy(lanes, &even, sizeof even);
    std::memcpy(lanes + kLanes, &odd, sizeof odd);
    even = odd = Vector{};
    double sum = 0;
    for (float lane : lanes) {
      sum += lane;
    }
    return sum;
  }
};

constexpr std::int64_t kStep = 2 * kLanes;

// Calls each(from, vectors, rest) for pieces of every run: `vectors` values, a multiple of kStep,
// then `rest` fewer than that; and flush() after some kBlock values at most twice, and at the end.
template <typename Each, typename Flush>
inline void in_pieces(const Channel& channel, const Each& each, const Flush& flush) {
  std::int64_t taken = 0;
  for (std::int64_t n = 0; n < channel.images; ++n) {
    for (std::int64_t first = 0; first < channel.inner; first += kBlock) {
      const std::int64_t count = std::min(channel.inner - first, kBlock);
      const std::int64_t rest = count % kStep;
      each(n * channel.stride + first, count - rest, rest);
      taken += count;
      if (taken >= kBlock) {
        flush();
        taken = 0;
      }
    }
  }
  flush();
}

double sum(const Channel& channel, const float* x) {
  double total = 0;
  Pair pair;
  in_pieces(
      channel,
      [&](std::int64_t from, std::int64_t vectors, std::int64_t rest) {
        const float* run = x + from;
        Vector v;
        for (std::int64_t i = 0; i < vectors; i += kStep) {
          load(run + i, &v);
          pair.even += v;
          load(run + i + kLanes, &v);
          pair.odd += v;
        }
        for (std::int64_t i = vectors; i < vectors + rest; ++i) {
          total += run[i];
        }
      },
      [&] { total += pair.take(); });
  return total;
}

void apart(const Channel& channel, const float* x, float mean, double* into) {
  into[0] = into[1] = 0;
  Pair plain, square;
  in_pieces(
      channel,
      [&](std::int64_t from, std::int64_t vectors, std::int64_t rest) {
        const float* run = x + from;
        Vector v;
        for (std::int64_t i = 0; i < vectors; i += kStep) {
          load(run + i, &v);
          v -= mean;
          plain.even += v;
          square.even += v * v;
          load(run + i + kLanes, &v);
          v -= mean;
          plain.odd += v;
          square.odd += v * v;
        }
        for (std::int64_t i = vectors; i < vectors + rest; ++i) {
          const float each = run[i] - mean;
          into[0] += each;
          into[1] += each * each;
        }
      },
      [&] {
        into[0] += plain.take();
        into[1] += square.take();
      });
}

template <bool Residual, bool Rectify>
void normalise_runs(const Channel& channel, const float* __restrict x, const Normalised& how,
                    float* __restrict out) {
  const float mean = how.mean, factor = how.factor, shift = how.shift;
  const float* __restrict residual = how.residual;
  for (std::int64_t n = 0; n < channel.images; ++n) {
    const std::int64_t from = n * channel.stride;
    for (std::int64_t i = from; i < from + channel.inner; ++i) {
      float value = (x[i] - mean) * factor + shift;
      if (Residual) {
        value += residual[i];
      }
      out[i] = Rectify && value < 0.0f ? 0.0f : value;
    }
  }
}

void normalise(const Channel& channel, const float* x, const Normalised& how, float* out) {
  const auto run = how.residual != nullptr
                       ? (how.rectify ? normalise_runs<true, true> : normalise_runs<true, false>)
                       : (how.rectify ? normalise_runs<false, true> : normalise_runs<false, false>);
  run(channel, x, how, out);
}

typedef int Mask __attribute__((vector_size(4 * kLanes)));

// What of the gradient at `at` passes.
template <bool Masked>
inline void pass(const Above& above, std::int64_t at, Vector* grad) {
  load(above.grad + at, grad);
  if (Masked) {
    Vector result;
    const Vector zero = {};
    load(above.result + at, &result);
    *grad = reinterpret_cast<Vector>(reinterpret_cast<Mask>(*grad) & ~(result <= zero));
  }
}

template <bool Masked>
inline float pass(const Above& above, std::int64_t at) {
  return Masked && above.result[at] <= 0.0f ? 0.0f : above.grad[at];
}

template <bool Masked>
void sum_runs(const Channel& channel, const Above& above, const float* x, float mean,
              double* into) {
  into[0] = into[1] = 0;
  Pair plain, product;
  in_pieces(
      channel,
      [&](std::int64_t from, std::int64_t vectors, std::int64_t rest) {
        Vector g, v;
        for (std::int64_t i = from; i < from + vectors; i += kStep) {
          pass<Masked>(above, i, &g);
          load(x + i, &v);
          plain.even += g;
          product.even += g * (v - mean);
          pass<Masked>(above, i + kLanes, &g);
          load(x + i + kLanes, &v);
          plain.odd += g;
          product.odd += g * (v - mean);
        }
        for (std::int64_t i = from + vectors; i < from + vectors + rest; ++i) {
          const float grad = pass<Masked>(above, i);
          into[0] += grad;
          into[1] += grad * (x[i] - mean);
        }
      },
      [&] {
        into[0] += plain.take();
        into[1] += product.take();
      });
}

void sums(const Channel& channel, const Above& above, const float* x, float mean, double* into) {
  const auto run = above.result != nullptr ? sum_runs<true> : sum_runs<false>;
  run(channel, above, x, mean, into);
}

template <bool Masked, bool Keep>
void differentiate_runs(const Channel& channel, const Above& above, const float* __restrict x,
                        const Slopes& by, float* __restrict out, float* __restrict passed) {
  const float mean = by.mean, offset = by.offset, slope = by.slope, factor = by.factor;
  const float* __restrict grad = above.grad;
  const float* __restrict result = above.result;
  for (std::int64_t n = 0; n < channel.images; ++n) {
    const std::int64_t from = n * channel.stride;
    for (std::int64_t i = from; i < from + channel.inner; ++i) {
      const float each = Masked && result[i] <= 0.0f ? 0.0f : grad[i];
      if (Keep) {
        passed[i] = each;
      }
      out[i] = (each - offset - (x[i] - mean) * slope) * factor;
    }
  }
}

void differentiate(const Channel& channel, const Above& above, const float* x, const Slopes& by,
                   float* out, float* passed) {
  const bool masked = above.result != nullptr;
  const auto run = passed != nullptr
                       ? (masked ? differentiate_runs<true, true> : differentiate_runs<false, true>)
                       : (masked ? differentiate_runs<true, false>
                                 : differentiate_runs<false, false>);
  run(channel, above, x, by, out, passed);
}

Loops make_loops() { return {sum, apart, normalise, sums, differentiate}; }

}  // namespace
}  // namespace batch_norm
}  // namespace narrowgauge
