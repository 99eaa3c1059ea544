// From planes, a channel of all pixels each, to pixels of all channels, which the tiled kernels read. A
// copy by strides touches 32 sectors for 32 codes on one side; here both sides are whole sectors, by way
// of a tile in shared memory.
#pragma once

#include "manual_codes/cuda/manual_codes_primitives.h"

namespace narrowgauge {
namespace codes {

// [images, channels, pixels] to [images, pixels, padded], zeros behind the last channel. `to` begins
// at a multiple of 4.
struct Transposition {
  const unsigned char* from;
  unsigned char* to;
  int channels;
  int padded;  // a multiple of 4
  int pixels;
  int tiles;   // along the pixels of an image
  bool words;  // whether pixels are a multiple of 4, and `from` begins at one
};

constexpr int kTransposeThreads = 256;

// Four codes of one channel, of which `left` are there; zeros for the rest.
inline __device__ unsigned int four_codes(const unsigned char* from, int left, bool words) {
  if (words) {
    return left > 0 ? *reinterpret_cast<const unsigned int*>(from) : 0u;
  }
  unsigned int codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes |= i < left ? static_cast<unsigned int>(from[i]) << (8 * i) : 0u;
  }
  return codes;
}

// A thread transposes 4 x 4 codes in registers; a block has 4096 codes. Blocks along x are tiles of
// kPixels pixels, image after image, along y tiles of channels.
template <int kPixels>
__global__ void __launch_bounds__(kTransposeThreads) transpose_codes(Transposition task) {
  constexpr unsigned int kPixelWords = kPixels / 4;
  constexpr unsigned int kChannelWords = kTransposeThreads / kPixelWords;
  constexpr int kPixelsAtOnce = kTransposeThreads / kChannelWords;
  __shared__ unsigned int tile[kPixels][kChannelWords | 1];  // odd: off one bank
  const unsigned int tiles = static_cast<unsigned int>(task.tiles);
  const long long image = blockIdx.x / tiles;
  const int first_pixel = static_cast<int>(blockIdx.x % tiles) * kPixels;
  const int first_channel = static_cast<int>(blockIdx.y * (4 * kChannelWords));

  const int pixel = static_cast<int>(threadIdx.x % kPixelWords * 4);
  const int word = static_cast<int>(threadIdx.x / kPixelWords);
  const int channel = first_channel + 4 * word;
  const unsigned char* from =
      task.from + (image * task.channels + channel) * task.pixels + first_pixel + pixel;
  unsigned int codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int left = channel + i < task.channels ? task.pixels - first_pixel - pixel : 0;
    codes[i] = four_codes(from, left, task.words);
    from += task.pixels;
  }
  const unsigned int low[2] = {interleave_low(codes[0], codes[1]),
                               interleave_low(codes[2], codes[3])};
  const unsigned int high[2] = {interleave_high(codes[0], codes[1]),
                                interleave_high(codes[2], codes[3])};
  tile[pixel][word] = low_halves(low[0], low[1]);
  tile[pixel + 1][word] = high_halves(low[0], low[1]);
  tile[pixel + 2][word] = low_halves(high[0], high[1]);
  tile[pixel + 3][word] = high_halves(high[0], high[1]);
  __syncthreads();

  const int row = static_cast<int>(threadIdx.x / kChannelWords);
  const int row_word = static_cast<int>(threadIdx.x % kChannelWords);
  const int row_channel = first_channel + 4 * row_word;
  const int rows_left = row_channel < task.padded ? task.pixels - first_pixel : 0;
  unsigned char* to =
      task.to + (image * task.pixels + first_pixel + row) * task.padded + row_channel;
#pragma unroll
  for (int first = 0; first < kPixels; first += kPixelsAtOnce) {
    if (first + row < rows_left) {
      *reinterpret_cast<unsigned int*>(to) = tile[first + row][row_word];
    }
    to += static_cast<long long>(kPixelsAtOnce) * task.padded;
  }
}

// Explicit, so that this file compiles alone to every kernel: few pixels, few channels, and neither.
template __global__ void transpose_codes<16>(Transposition);
template __global__ void transpose_codes<64>(Transposition);
template __global__ void transpose_codes<1024>(Transposition);

}  // namespace codes
}  // namespace narrowgauge
