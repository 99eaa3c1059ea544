// A convolution over 8-bit codes as a matrix product whose left operand is never written out: rows
// are output pixels, columns output channels of a group, depth is (kernel row, kernel column,
// channel), the channel fastest. Device code without a toolkit header, as manual_codes_primitives.h.
#pragma once

#include "manual_codes/cuda/manual_codes_primitives.h"

namespace narrowgauge {
namespace codes {

// x is channels last, `channels` per group and pixel, of which the first `true_channels` count: where
// those are no multiple of 4, zeros fill up. Pointers are aligned to 16 bytes.
struct Lowered {
  const unsigned char* x;
  const unsigned char* weight;  // as the kernel says
  int* out;
  long long pixels;        // output pixels of all images
  long long image_bytes;   // of x
  long long pixel_bytes;   // of x: channels of all groups
  long long out_image;     // strides of out, in elements
  long long out_channel;
  long long out_pixel;
  int height, width;
  int out_width, out_pixels;  // of one image
  int kernel_width;
  int stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  int channels, true_channels;  // of a group; channels is a multiple of 4
  int outputs;                  // of a group
  int depth;                    // kernel height * kernel width * channels
  int split_depth;              // of one block; a multiple of split_unit
  int true_depth;               // products of one output
  unsigned int fill;            // four padding codes
};

struct __align__(16) Vector {
  unsigned int words[4];
};

struct __align__(8) Pair {
  unsigned int words[2];
};

// Where the window of an output pixel begins in x. One that is not there lies outside of x.
struct Window {
  const unsigned char* image;
  int row;
  int column;
};

// 64-bit division is slow, and few tensors need it. Neither is negative.
inline __device__ long long divided(long long a, int b) {
  if ((a >> 31) == 0) {
    return static_cast<unsigned int>(a) / static_cast<unsigned int>(b);
  }
  return a / b;
}

inline __device__ Window window_of(const Lowered& task, long long pixel, int group) {
  if (pixel >= task.pixels) {
    return {task.x, -(1 << 30), 0};
  }
  const long long image = divided(pixel, task.out_pixels);
  const int rest = static_cast<int>(pixel - image * task.out_pixels);
  const int row = rest / task.out_width;
  return {task.x + image * task.image_bytes + static_cast<long long>(group) * task.channels,
          row * task.stride_h - task.padding_h,
          (rest - row * task.out_width) * task.stride_w - task.padding_w};
}

// A place in depth, and what it adds to a window.
struct Place {
  int depth;
  int channel;
  int row;     // times dilation
  int column;  // times dilation

  inline __device__ void advance(const Lowered& task, int by) {
    depth += by;
    channel += by;
    while (channel >= task.channels) {
      channel -= task.channels;
      column += task.dilation_w;
      if (column == task.kernel_width * task.dilation_w) {
        column = 0;
        row += task.dilation_h;
      }
    }
  }
};

inline __device__ Place place_of(const Lowered& task, int depth) {
  const int tap = depth / task.channels;
  const int row = tap / task.kernel_width;
  return {depth, depth - tap * task.channels, row * task.dilation_h,
          (tap - row * task.kernel_width) * task.dilation_w};
}

// The codes from `place` on, or nullptr where they are padding or past the depth.
inline __device__ const unsigned char* codes_at(const Lowered& task, const Window& window,
                                                const Place& place) {
  const int row = window.row + place.row;
  const int column = window.column + place.column;
  const bool inside = static_cast<unsigned int>(row) < static_cast<unsigned int>(task.height) &&
                      static_cast<unsigned int>(column) < static_cast<unsigned int>(task.width) &&
                      place.depth < task.depth;
  return inside ? window.image +
                      (static_cast<long long>(row) * task.width + column) * task.pixel_bytes +
                      place.channel
                : nullptr;
}

// 16 codes of a window to shared memory. Channels that are a multiple of 16 lie in one piece; of
// others each word may be of another tap.
inline __device__ void copy_codes(const Lowered& task, const Window& window, Place place,
                                  unsigned char* to) {
  if (task.channels % 16 == 0) {
    const unsigned char* from = codes_at(task, window, place);
    if (from != nullptr) {
      copy_async<16>(to, from);
    } else {
      *reinterpret_cast<Vector*>(to) = {{task.fill, task.fill, task.fill, task.fill}};
    }
    return;
  }
#pragma unroll 1
  for (int word = 0; word < 4; ++word) {
    const unsigned char* from = codes_at(task, window, place);
    if (from != nullptr) {
      copy_async<4>(to + 4 * word, from);
    } else {
      *reinterpret_cast<unsigned int*>(to + 4 * word) = task.fill;
    }
    place.advance(task, 4);
  }
}

// Adds where others add too or have added, else stores.
inline __device__ void put(int* to, unsigned int value, bool add) {
  if (add) {
    atomicAdd(to, static_cast<int>(value));
  } else {
    *to = static_cast<int>(value);
  }
}

// The address of channel 0 of the group at an output pixel.
inline __device__ int* out_at(const Lowered& task, long long pixel, int group) {
  const long long image = divided(pixel, task.out_pixels);
  return task.out + image * task.out_image + (pixel - image * task.out_pixels) * task.out_pixel +
         static_cast<long long>(group) * task.outputs * task.out_channel;
}

}  // namespace codes
}  // namespace narrowgauge
