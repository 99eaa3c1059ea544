// Convolution and linear with a float MAC policy: the operators' schema and one problem as numbers.
// No torch header.
//
// Schema, defined with the CPU implementation in manual_float.cpp; the CUDA implementation registers
// the same two for the CUDA key in manual_float_cuda.cpp:
//
//   manual_conv2d(Tensor x, Tensor weight, Tensor? bias, str mac, int bits, str library,
//                 int[] stride, int[] padding, int[] dilation, int groups, *, str isa='auto') -> Tensor
//   manual_linear(Tensor x, Tensor weight, Tensor? bias, str mac, int bits, str library,
//                 *, str isa='auto') -> Tensor
//
// mac is one of mac.py's FLOAT_MACS or `custom`; bits is k of `truncated`, else 0; library is the path
// of the compiled functor of `custom`, else empty; int[] are pairs (height, width). isa names an
// instruction set of the CPU; a CUDA tensor takes `auto` only. Checks, shapes and the Problem are made
// by manual_float_problem.h for both.
//
//   out[n, f, y, x] = bias[f] + sum over c, r, s of
//                     x[n, c, y * stride - padding + r * dilation, ...] * weight[f, c, r, s]
//
// The sum takes c, r, s in ascending order, one `step` of the policy (manual_mac.h) each, from +0; the
// bias is added last. Pixels of the padding are zeros and take part. The CPU gives the same bits on
// every instruction set and by any number of threads.
//
// linear is the same: x[M, K] is an image [1, K, 1, M], weight[N, K] filters [N, K, 1, 1] and the
// result[M, N] an image [1, N, 1, M], by their strides.
#pragma once

#include <cstdint>

namespace narrowgauge {
namespace manual {

// Strides of a four-dimensional tensor, in elements; some may be 0.
struct Strides {
  std::int64_t image;
  std::int64_t channel;
  std::int64_t row;
  std::int64_t column;
};

// Sizes are at least 1: an empty result, or an empty sum, never gets here.
struct Problem {
  const float* x;       // [images, groups * channels, height, width]
  const float* weight;  // [groups * filters, channels, kernel_height, kernel_width]
  const float* bias;    // contiguous, or null
  float* out;           // [images, groups * filters, out_height, out_width]
  Strides x_strides;
  Strides weight_strides;
  Strides out_strides;
  std::int64_t images;
  std::int64_t groups;
  std::int64_t channels;  // of one group
  std::int64_t filters;   // of one group
  std::int64_t height;
  std::int64_t width;
  std::int64_t kernel_height;
  std::int64_t kernel_width;
  std::int64_t out_height;
  std::int64_t out_width;
  std::int64_t stride[2];
  std::int64_t padding[2];
  std::int64_t dilation[2];
};

// Order and names are those of mac.py: FLOAT_MACS, then custom.
enum class Policy { kExactFp32, kAxfpmFaithful, kAxfpmFixed, kAxbf16, kTruncated, kMitchell, kCustom };

}  // namespace manual
}  // namespace narrowgauge
