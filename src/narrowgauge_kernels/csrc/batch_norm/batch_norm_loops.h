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

double squares(const Channel& channel, const float* x, float mean) {
  double total = 0;
  Pair pair;
  in_pieces(
      channel,
      [&](std::int64_t from, std::int64_t vectors, std::int64_t rest) {
        const float* run = x + from;
        Vector v;
        for (std::int64_t i = 0; i < vectors; i += kStep) {
          load(run + i, &v);
          v -= mean;
          pair.even += v * v;
          load(run + i + kLanes, &v);
          v -= mean;
          pair.odd += v * v;
        }
        for (std::int64_t i = vectors; i < vectors + rest; ++i) {
          const float apart = run[i] - mean;
          total += apart * apart;
        }
      },
      [&] { total += pair.take(); });
  return total;
}

void normalise(const Channel& channel, const float* __restrict x, float mean, float factor,
               float shift, float* __restrict out) {
  for (std::int64_t n = 0; n < channel.images; ++n) {
    const std::int64_t from = n * channel.stride;
    for (std::int64_t i = from; i < from + channel.inner; ++i) {
      out[i] = (x[i] - mean) * factor + shift;
    }
  }
}

void sums(const Channel& channel, const float* grad, const float* x, float mean, double* into) {
  into[0] = into[1] = 0;
  Pair plain, product;
  in_pieces(
      channel,
      [&](std::int64_t from, std::int64_t vectors, std::int64_t rest) {
        const float* above = grad + from;
        const float* run = x + from;
        Vector g, v;
        for (std::int64_t i = 0; i < vectors; i += kStep) {
          load(above + i, &g);
          load(run + i, &v);
          plain.even += g;
          product.even += g * (v - mean);
          load(above + i + kLanes, &g);
          load(run + i + kLanes, &v);
          plain.odd += g;
          product.odd += g * (v - mean);
        }
        for (std::int64_t i = vectors; i < vectors + rest; ++i) {
          into[0] += above[i];
          into[1] += above[i] * (run[i] - mean);
        }
      },
      [&] {
        into[0] += plain.take();
        into[1] += product.take();
      });
}

void differentiate(const Channel& channel, const float* __restrict grad, const float* __restrict x,
                   float mean, float offset, float slope, float factor, float* __restrict out) {
  for (std::int64_t n = 0; n < channel.images; ++n) {
    const std::int64_t from = n * channel.stride;
    for (std::int64_t i = from; i < from + channel.inner; ++i) {
      out[i] = (grad[i] - offset - (x[i] - mean) * slope) * factor;
    }
  }
}

Loops make_loops() { return {sum, squares, normalise, sums, differentiate}; }

}  // namespace
}  // namespace batch_norm
}  // namespace narrowgauge
