// Products by a lookup each, from a table in L1 and L2, for what has no tiles: depthwise convolutions,
// a few pixels, sizes beyond 32 bits. A thread has one output; neighbouring threads have neighbouring
// pixels of one channel, so that a warp reads one row of the table, of 1 KB.
#pragma once

#include "manual_codes/cuda/manual_codes_lowered.h"
#include "manual_codes/cuda/manual_codes_prepared.h"
#include "manual_codes/cuda/manual_codes_sweep.h"

namespace narrowgauge {
namespace codes {

// Tensors with any strides, in bytes. Depth is (channel of the group, kernel row, kernel column).
struct DirectTask {
  const unsigned char* x;
  const unsigned char* weight;
  const int* table;  // of weight w and code a, raw bytes, at 256 w + wide_position(a)
  int* out;
  long long x_image, x_channel, x_row, x_column;
  long long weight_output, weight_channel, weight_row, weight_column;
  long long out_image, out_channel, out_pixel;
  long long pixels, out_pixels, out_width;  // of all images; of one
  long long outputs, group_outputs;         // of all groups; of one
  long long channels;                       // of a group
  long long height, width, kernel_height, kernel_width;
  long long stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  long long split_depth;  // of one range along y, whose sums meet in the output
  int padding_code;
};

constexpr int kDirectThreads = 256;

template <int kThreads>
__global__ void __launch_bounds__(kThreads) direct_products(DirectTask task) {
  const long long taps = task.kernel_height * task.kernel_width;
  const long long begin = static_cast<long long>(blockIdx.y) * task.split_depth;
  const long long all = task.channels * taps;
  const long long end = all - begin < task.split_depth ? all : begin + task.split_depth;
  const long long step = static_cast<long long>(gridDim.x) * kThreads;
  for (long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
       i < task.pixels * task.outputs; i += step) {
    const long long output = i / task.pixels;
    const long long pixel = i - output * task.pixels;
    const long long image = pixel / task.out_pixels;
    const long long rest = pixel - image * task.out_pixels;
    const long long first_row = rest / task.out_width * task.stride_h - task.padding_h;
    const long long first_column = rest % task.out_width * task.stride_w - task.padding_w;
    const unsigned char* const x = task.x + image * task.x_image +
                                   output / task.group_outputs * task.channels * task.x_channel;
    const unsigned char* const weight = task.weight + output * task.weight_output;
    long long channel = begin / taps;
    long long kernel_row = begin % taps / task.kernel_width;
    long long kernel_column = begin % task.kernel_width;
    unsigned int sum = 0;
    for (long long depth = begin; depth < end; ++depth) {
      const long long row = first_row + kernel_row * task.dilation_h;
      const long long column = first_column + kernel_column * task.dilation_w;
      const bool inside = row >= 0 && row < task.height && column >= 0 && column < task.width;
      const int code =
          inside ? x[channel * task.x_channel + row * task.x_row + column * task.x_column]
                 : task.padding_code;
      const int other = weight[channel * task.weight_channel + kernel_row * task.weight_row +
                               kernel_column * task.weight_column];
      sum += static_cast<unsigned int>(task.table[other * 256 + wide_position(code)]);
      if (++kernel_column == task.kernel_width) {
        kernel_column = 0;
        if (++kernel_row == task.kernel_height) {
          kernel_row = 0;
          ++channel;
        }
      }
    }
    put(task.out + image * task.out_image + output * task.out_channel + rest * task.out_pixel, sum,
        gridDim.y > 1);
  }
}

// The table of a sum of masked products; with `add`, added to what is there. 256 blocks, one a weight.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    tabulate_sweep(Sweep sweep, bool a_signed, bool b_signed, int* table) {
  const unsigned int weight = blockIdx.x;
  for (unsigned int code = threadIdx.x; code < 256; code += kThreads) {
    int sum = 0;
    for (int pass = 0; pass < sweep.passes; ++pass) {
      const unsigned int a = code & mask_of(sweep.a_masks, pass) & 0xffu;
      const unsigned int b = weight & mask_of(sweep.b_masks, pass) & 0xffu;
      const int a_factor = a_signed ? static_cast<signed char>(a) : static_cast<int>(a);
      const int b_factor = b_signed ? static_cast<signed char>(b) : static_cast<int>(b);
      sum += a_factor * b_factor;
    }
    int* const entry = table + weight * 256 + wide_position(static_cast<int>(code));
    const unsigned int before = sweep.add ? static_cast<unsigned int>(*entry) : 0u;
    *entry = static_cast<int>(before + weighed(sweep, sum));
  }
}

// Explicit, so that this file compiles alone to every kernel.
template __global__ void direct_products<kDirectThreads>(DirectTask);
template __global__ void tabulate_sweep<kDirectThreads>(Sweep, bool, bool, int*);

}  // namespace codes
}  // namespace narrowgauge
