// The bodies of a Kernel over the vectors that this file's flags allow. Included once by each
// manual_float_<instructions>.cpp, and by a compiled functor.
//
// The anonymous namespace is load-bearing: see linear_micro.h. Nothing here is of the standard
// library's templates, for the same reason.
#pragma once

#include "manual_float/manual_float_kernel.h"
#include "manual_float/manual_float_lanes.h"

namespace narrowgauge {
namespace manual {
namespace {

template <typename Mac, int Rows, int Vectors>
void run_tile(std::int64_t depth, const float* activations, const void* weights, float* tile,
              std::int64_t tile_stride) {
  using F = mac::Lanes;
  constexpr int kLanes = sizeof(F) / sizeof(float);
  const typename Mac::template B<float>* filter =
      static_cast<const typename Mac::template B<float>*>(weights);
  F sums[Rows][Vectors];
  for (int row = 0; row < Rows; ++row) {
    for (int v = 0; v < Vectors; ++v) {
      sums[row][v] = mac::load<F>(tile + row * tile_stride + v * kLanes);
    }
  }
  for (std::int64_t d = 0; d < depth; ++d) {
    typename Mac::template A<F> a[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      a[v] = Mac::template activation<F>(
          mac::load<F>(activations + (d * Vectors + v) * kLanes));
    }
    for (int row = 0; row < Rows; ++row) {
      const typename Mac::template B<F> b = Mac::template spread<F>(filter[d * Rows + row]);
      for (int v = 0; v < Vectors; ++v) {
        sums[row][v] = Mac::step(a[v], b, sums[row][v]);
      }
    }
  }
  for (int row = 0; row < Rows; ++row) {
    for (int v = 0; v < Vectors; ++v) {
      mac::store<F>(tile + row * tile_stride + v * kLanes, sums[row][v]);
    }
  }
}

template <typename Mac>
void pack_weights(const float* from, std::int64_t stride, std::int64_t depth, int rows,
                  unsigned int kept, void* to) {
  typename Mac::template B<float>* packed = static_cast<typename Mac::template B<float>*>(to);
  for (std::int64_t d = 0; d < depth; ++d) {
    for (int row = 0; row < rows; ++row) {
      packed[d * rows + row] =
          Mac::template weight<float>(Mac::prepare_weight(from[row * stride + d], kept));
    }
  }
}

template <typename Mac, int Columns>
void pack_activations(const float* from, std::int64_t panels, unsigned int kept, float* to,
                      std::int64_t panel_stride) {
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    for (int column = 0; column < Columns; ++column) {
      to[panel * panel_stride + column] =
          Mac::prepare_activation(from[panel * Columns + column], kept);
    }
  }
}

// A step of which all lanes have the same activation, where `step` has the same weight.
template <typename Mac>
struct Turned {
  template <typename F>
  static MAC_INLINE F step(const typename Mac::template A<F>& a,
                           const typename Mac::template B<F>& b, F sum) {
    return Mac::step(a, b, sum);
  }
};
template <bool Fixed>
struct Turned<mac::Axfpm<Fixed>> {
  template <typename F>
  static MAC_INLINE F step(const typename mac::Axfpm<Fixed>::template A<F>& a,
                           const typename mac::Axfpm<Fixed>::template B<F>& b, F sum) {
    return mac::Axfpm<Fixed>::turned_step(a, b, sum);
  }
};

template <typename Mac, int Rows, int Vectors>
void run_turned(std::int64_t depth, const float* activations, const void* weights, float* tile,
                std::int64_t tile_stride) {
  using F = mac::Lanes;
  constexpr int kLanes = sizeof(F) / sizeof(float);
  const float* filters = static_cast<const float*>(weights);
  F sums[Rows][Vectors];
  for (int row = 0; row < Rows; ++row) {
    for (int v = 0; v < Vectors; ++v) {
      sums[row][v] = mac::load<F>(tile + row * tile_stride + v * kLanes);
    }
  }
  for (std::int64_t d = 0; d < depth; ++d) {
    typename Mac::template B<F> b[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      b[v] = Mac::template weight<F>(mac::load<F>(filters + (d * Vectors + v) * kLanes));
    }
    for (int row = 0; row < Rows; ++row) {
      const typename Mac::template A<F> a =
          Mac::template activation<F>(mac::Ops<F>::splat(activations[d * Rows + row]));
      for (int v = 0; v < Vectors; ++v) {
        sums[row][v] = Turned<Mac>::template step<F>(a, b[v], sums[row][v]);
      }
    }
  }
  for (int row = 0; row < Rows; ++row) {
    for (int v = 0; v < Vectors; ++v) {
      mac::store<F>(tile + row * tile_stride + v * kLanes, sums[row][v]);
    }
  }
}

// Four filters at a time, so that the lines of all of them stay in the cache.
template <typename Mac, int Columns>
void pack_turned(const float* from, std::int64_t stride, std::int64_t depth, int filters,
                 unsigned int kept, float* to) {
  int filter = 0;
  for (; filter + 4 <= filters; filter += 4) {
    const float* const rows = from + filter * stride;
    std::int64_t d = 0;
    for (; d + 4 <= depth; d += 4) {
      mac::turn_four(rows + d, stride, to + d * Columns + filter, Columns);
    }
    for (; d < depth; ++d) {
      for (int i = 0; i < 4; ++i) {
        to[d * Columns + filter + i] = rows[i * stride + d];
      }
    }
  }
  for (; filter < Columns; ++filter) {
    for (std::int64_t d = 0; d < depth; ++d) {
      to[d * Columns + filter] = filter < filters ? from[filter * stride + d] : 0.0f;
    }
  }
  for (std::int64_t i = 0; i < depth * Columns; ++i) {
    to[i] = Mac::prepare_weight(to[i], kept);
  }
}

template <typename Mac>
void prepare_activations(float* values, std::int64_t count, unsigned int kept) {
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = Mac::prepare_activation(values[i], kept);
  }
}

// The functions for 1 to Rows rows, into a table whose others stay null.
template <typename Mac, int Rows, int Vectors>
struct FillTable {
  static void into(Kernel* kernel) {
    kernel->run[Rows] = &run_tile<Mac, Rows, Vectors>;
    FillTable<Mac, Rows - 1, Vectors>::into(kernel);
  }
};
template <typename Mac, int Vectors>
struct FillTable<Mac, 0, Vectors> {
  static void into(Kernel*) {}
};

template <typename Mac, int Rows, int Vectors>
struct FillTurned {
  static void into(Kernel* kernel) {
    kernel->run_turned[Rows] = &run_turned<Mac, Rows, Vectors>;
    FillTurned<Mac, Rows - 1, Vectors>::into(kernel);
  }
};
template <typename Mac, int Vectors>
struct FillTurned<Mac, 0, Vectors> {
  static void into(Kernel*) {}
};

// Rows x Vectors sums, with what Mac keeps of Vectors activations and one weight, must fit the
// register file.
template <typename Mac, int Rows, int Vectors>
const Kernel* kernel_of() {
  static_assert(Rows <= kMostRows, "Kernel::run has no place for so many rows");
  constexpr int kColumns = Vectors * sizeof(mac::Lanes) / sizeof(float);
  // Two chains of sums at least; where there are no vectors, enough filters for four at a time.
  constexpr int kTurnedVectors = sizeof(mac::Lanes) == sizeof(float) ? 4 : 2;
  constexpr int kTurned = kTurnedVectors * sizeof(mac::Lanes) / sizeof(float);
  static const Kernel kernel = [] {
    Kernel made = {Rows, kColumns, sizeof(typename Mac::template B<float>), &pack_weights<Mac>,
                   &pack_activations<Mac, kColumns>, {}, kTurned, &pack_turned<Mac, kTurned>,
                   &prepare_activations<Mac>, {}};
    FillTable<Mac, Rows, Vectors>::into(&made);
    FillTurned<Mac, kMostTurned, kTurnedVectors>::into(&made);
    return made;
  }();
  return &kernel;
}

// Sizes of the tiles: rows and vectors for a product that is one fma, for Ax-FPM, and for the rest.
template <int PlainRows, int PlainVectors, int AxfpmRows, int AxfpmVectors, int Rows, int Vectors>
const Kernel* kernel_for(Policy policy) {
  switch (policy) {
    case Policy::kExactFp32:
      return kernel_of<mac::ExactFp32, PlainRows, PlainVectors>();
    case Policy::kTruncated:
      return kernel_of<mac::Truncated, PlainRows, PlainVectors>();
    case Policy::kAxfpmFaithful:
      return kernel_of<mac::AxfpmFaithful, AxfpmRows, AxfpmVectors>();
    case Policy::kAxfpmFixed:
      return kernel_of<mac::AxfpmFixed, AxfpmRows, AxfpmVectors>();
    case Policy::kAxbf16:
      return kernel_of<mac::Axbf16, Rows, Vectors>();
    case Policy::kMitchell:
      return kernel_of<mac::Mitchell, Rows, Vectors>();
    case Policy::kCustom:
      break;
  }
  return nullptr;
}

}  // namespace
}  // namespace manual
}  // namespace narrowgauge
