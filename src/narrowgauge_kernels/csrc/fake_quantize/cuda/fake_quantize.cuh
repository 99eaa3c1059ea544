// Device code of the fake-quantise operator. C++14, no toolkit header: NVRTC 11.8 and nvcc 13 take
// it. The arithmetic is that of ../fake_quantize.h.
//
// The operator moves bytes and computes little, so everything here is about 16-byte accesses that
// are in flight together, and about not dividing indices per element.
#pragma once

#include "common/cuda/numeric.h"

namespace narrowgauge {
namespace fake_quantize {

// Each operation rounded once, never contracted.
inline __device__ float times(float a, float b) { return __fmul_rn(a, b); }
inline __device__ double times(double a, double b) { return __dmul_rn(a, b); }
inline __device__ float reciprocal_of(float a) { return __frcp_rn(a); }
inline __device__ double reciprocal_of(double a) { return __drcp_rn(a); }
// Of a value in [-2^22, 2^22] ([-2^51, 2^51]), or NaN: 1.5 * 2^23, and 1.5 * 2^52.
inline __device__ float round_half_even(float a) {
  return __fadd_rn(__fadd_rn(a, 12582912.0f), -12582912.0f);
}
inline __device__ double round_half_even(double a) {
  return __dadd_rn(__dadd_rn(a, 6755399441055744.0), -6755399441055744.0);
}

template <typename A>
inline __device__ A clamp(A value, A low, A high) {
  const A raised = value < low ? low : value;
  return raised > high ? high : raised;
}

template <typename T>
struct Task {
  const T* x;
  const T* grad;  // of the backward pass only
  T* out;
  const float* scale;
  const int* zero_point;
  long long count;
  long long inner;
  long long channels;
  int quant_min;
  int quant_max;
};

// The parameters of one channel.
template <typename A>
struct Step {
  A scale;
  A reciprocal;
  A low;
  A high;
};

template <typename T>
using StepOf = Step<typename Numeric<T>::Accumulator>;

template <typename T>
inline __device__ StepOf<T> step_of(const Task<T>& task, long long channel) {
  using A = typename Numeric<T>::Accumulator;
  const A scale = static_cast<A>(task.scale[channel]);
  const int zero_point = task.zero_point[channel];
  return {scale, reciprocal_of(scale), static_cast<A>(task.quant_min - zero_point),
          static_cast<A>(task.quant_max - zero_point)};
}

template <typename T>
inline __device__ T forward(T x, const StepOf<T>& step) {
  const auto value = clamp(times(Numeric<T>::widen(x), step.reciprocal), step.low, step.high);
  return Numeric<T>::narrow(times(round_half_even(value), step.scale));
}

template <typename T>
inline __device__ T backward(T grad, T x, const StepOf<T>& step) {
  using A = typename Numeric<T>::Accumulator;
  // One step beyond the ends is outside, and still small enough to round.
  const A value =
      clamp(times(Numeric<T>::widen(x), step.reciprocal), step.low - A(1), step.high + A(1));
  const A rounded = round_half_even(value);
  return rounded < step.low || rounded > step.high ? T{} : grad;
}

// Lanes elements that are loaded and stored at once.
template <typename T, int Lanes>
struct __align__(sizeof(T) * Lanes) Pack {
  T lanes[Lanes];
};

template <typename T>
constexpr int kLanes = 16 / static_cast<int>(sizeof(T));
// fp64 is for checks: its kernels would cost compile time on every build, and save nobody's.
template <>
constexpr int kLanes<double> = 1;

constexpr int kThreads = 256;
constexpr int kPacks = 2;  // of one thread in flight
constexpr int kRows = 2;   // the same, in `fake_quantize_rows`

template <typename T, int Lanes>
inline __device__ Pack<T, Lanes> load(const T* from, long long pack) {
  return reinterpret_cast<const Pack<T, Lanes>*>(from)[pack];
}

// The channel of element i. 64-bit division is slow, and few tensors need it.
template <typename T>
inline __device__ void locate(const Task<T>& task, long long i, long long& channel,
                              long long& within) {
  if (task.count <= 0x7fffffffLL) {
    const unsigned int inner = static_cast<unsigned int>(task.inner);
    const unsigned int run = static_cast<unsigned int>(i) / inner;
    within = static_cast<unsigned int>(i) - run * inner;
    channel = run % static_cast<unsigned int>(task.channels);
  } else {
    const long long run = i / task.inner;
    within = i - run * task.inner;
    channel = run % task.channels;
  }
}

template <typename T>
inline __device__ StepOf<T> choose(bool first, const StepOf<T>& one, const StepOf<T>& other) {
  return {first ? one.scale : other.scale, first ? one.reciprocal : other.reciprocal,
          first ? one.low : other.low, first ? one.high : other.high};
}

// A pack of one channel, or of the end of one and the start of the next: never of three, because
// the run of a channel is at least as long as a pack.
template <typename T, int Lanes, bool Backward>
inline __device__ Pack<T, Lanes> apply(const Task<T>& task, long long first,
                                       const Pack<T, Lanes>& x, const Pack<T, Lanes>& grad) {
  long long channel = 0, within = 0;
  if (task.channels > 1) {
    locate(task, first, channel, within);
  }
  const StepOf<T> step = step_of(task, channel);
  StepOf<T> next = step;
  const bool all = Lanes == 1 || task.channels == 1 || within + Lanes <= task.inner;
  const int own = all ? Lanes : static_cast<int>(task.inner - within);
  if (!all) {
    next = step_of(task, channel + 1 == task.channels ? 0 : channel + 1);
  }
  Pack<T, Lanes> out;
#pragma unroll
  for (int lane = 0; lane < Lanes; ++lane) {
    const StepOf<T> mine = Lanes == 1 ? step : choose<T>(lane < own, step, next);
    out.lanes[lane] = Backward ? backward<T>(grad.lanes[lane], x.lanes[lane], mine)
                               : forward<T>(x.lanes[lane], mine);
  }
  return out;
}

// Any layout. Lanes is kLanes where all pointers are aligned to 16 bytes and no pack meets a third
// channel, else 1. A block takes kThreads * kPacks packs; the last block also the count % Lanes
// elements after the last pack.
template <typename T, int Lanes, bool Backward>
__global__ void __launch_bounds__(kThreads) fake_quantize_flat(Task<T> task) {
  const long long packs = task.count / Lanes;
  const long long first = static_cast<long long>(blockIdx.x) * kThreads * kPacks + threadIdx.x;
  Pack<T, Lanes> x[kPacks], grad[kPacks] = {};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const long long pack = first + p * kThreads;
    if (pack < packs) {
      x[p] = load<T, Lanes>(task.x, pack);
      if (Backward) {
        grad[p] = load<T, Lanes>(task.grad, pack);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const long long pack = first + p * kThreads;
    if (pack < packs) {
      reinterpret_cast<Pack<T, Lanes>*>(task.out)[pack] =
          apply<T, Lanes, Backward>(task, pack * Lanes, x[p], grad[p]);
    }
  }
  const long long rest = packs * Lanes + threadIdx.x;
  if (Lanes > 1 && blockIdx.x == gridDim.x - 1 && rest < task.count) {
    const Pack<T, 1> lone = load<T, 1>(task.x, rest);
    const Pack<T, 1> lone_grad = Backward ? load<T, 1>(task.grad, rest) : Pack<T, 1>{};
    reinterpret_cast<Pack<T, 1>*>(task.out)[rest] =
        apply<T, 1, Backward>(task, rest, lone, lone_grad);
  }
}

// Channels last (inner 1, channels a multiple of kLanes, all aligned): a thread keeps to its
// channels, whose parameters it makes once, and goes down the rows. count is a multiple of channels.
template <typename T, bool Backward>
__global__ void __launch_bounds__(kThreads)
    fake_quantize_rows(Task<T> task, long long rows_at_once) {
  constexpr int kWide = kLanes<T>;
  const long long wide = task.channels / kWide;
  const long long rows = task.count / task.channels;
  const long long index = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  const long long column = index % wide;
  long long row = index / wide;
  if (row >= rows_at_once) {
    return;
  }
  StepOf<T> steps[kWide];
#pragma unroll
  for (int lane = 0; lane < kWide; ++lane) {
    steps[lane] = step_of(task, column * kWide + lane);
  }
  for (; row < rows; row += rows_at_once * kRows) {
    Pack<T, kWide> x[kRows], grad[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const long long at = row + r * rows_at_once;
      if (at < rows) {
        x[r] = load<T, kWide>(task.x, at * wide + column);
        if (Backward) {
          grad[r] = load<T, kWide>(task.grad, at * wide + column);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const long long at = row + r * rows_at_once;
      if (at < rows) {
        Pack<T, kWide> out;
#pragma unroll
        for (int lane = 0; lane < kWide; ++lane) {
          out.lanes[lane] = Backward
                                ? backward<T>(grad[r].lanes[lane], x[r].lanes[lane], steps[lane])
                                : forward<T>(x[r].lanes[lane], steps[lane]);
        }
        reinterpret_cast<Pack<T, kWide>*>(task.out)[at * wide + column] = out;
      }
    }
  }
}

// What fake_quantize.cu launches. Spelt out because NVRTC sees no launch and would compile none.
template __global__ void fake_quantize_flat<float, kLanes<float>, false>(Task<float>);
template __global__ void fake_quantize_flat<float, 1, false>(Task<float>);
template __global__ void fake_quantize_rows<float, false>(Task<float>, long long);
template __global__ void fake_quantize_flat<float, kLanes<float>, true>(Task<float>);
template __global__ void fake_quantize_flat<float, 1, true>(Task<float>);
template __global__ void fake_quantize_rows<float, true>(Task<float>, long long);
template __global__ void fake_quantize_flat<double, 1, false>(Task<double>);
template __global__ void fake_quantize_flat<double, 1, true>(Task<double>);
template __global__ void fake_quantize_flat<Half, kLanes<Half>, false>(Task<Half>);
template __global__ void fake_quantize_flat<Half, 1, false>(Task<Half>);
template __global__ void fake_quantize_rows<Half, false>(Task<Half>, long long);
template __global__ void fake_quantize_flat<Half, kLanes<Half>, true>(Task<Half>);
template __global__ void fake_quantize_flat<Half, 1, true>(Task<Half>);
template __global__ void fake_quantize_rows<Half, true>(Task<Half>, long long);
template __global__ void fake_quantize_flat<BFloat16, kLanes<BFloat16>, false>(Task<BFloat16>);
template __global__ void fake_quantize_flat<BFloat16, 1, false>(Task<BFloat16>);
template __global__ void fake_quantize_rows<BFloat16, false>(Task<BFloat16>, long long);
template __global__ void fake_quantize_flat<BFloat16, kLanes<BFloat16>, true>(Task<BFloat16>);
template __global__ void fake_quantize_flat<BFloat16, 1, true>(Task<BFloat16>);
template __global__ void fake_quantize_rows<BFloat16, true>(Task<BFloat16>, long long);

}  // namespace fake_quantize
}  // namespace narrowgauge
