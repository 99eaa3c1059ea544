// Zeros skipped by channels of groups of 2 x 4 pixels, on tensor cores. A warp's product is filters
// by depth times depth by 8 pixels; its depth is all pairs of a tap and a channel, less those that
// are zero at all 8 pixels: the list of the rest is made before the product. Weights and values of
// 32 channels are in shared memory at a time; the list gathers from there.

constexpr int kChunk = 32;
constexpr int kDepth = kTaps * kChunk;
constexpr int kStep = sizeof(Element) == 2 ? 16 : 8;     // depth of one tensor-core product
constexpr int kMatrices = kBlockFilters / 16;            // along filters
constexpr int kWeightRow = kBlockFilters + 8;            // elements; the pad spreads banks
constexpr int kValueRow = kChunk + (sizeof(Element) == 2 ? 4 : 1);  // likewise
constexpr int kGroupsAcross = kTileColumns / 4;
constexpr bool kWeightsByEight = sizeof(Element) == 2 && kFilters % 8 == 0;

// Low half: the row of the weights, tap * 32 + channel. High half: where the value of the group's
// first pixel is. Row kDepth is zeros, which fill up the last step.
typedef unsigned int Pair;

// Weights of the chunk's channels, tap by tap: those of a row for all filters of the block. By eight
// they are under way until they are waited for.
__device__ __forceinline__ void begin_weights(const Element* weight, const Cell& cell,
                                              int first_channel, Element* weights) {
  constexpr int kPieces = kWeightsByEight ? kBlockFilters / 8 : kBlockFilters;
  constexpr int kPiece = kBlockFilters / kPieces;
  for (int i = static_cast<int>(threadIdx.x); i < kDepth * kPieces; i += kThreads) {
    const int row = i / kPieces;
    const int filter = i % kPieces * kPiece;
    const int channel = first_channel + row % kChunk;
    const bool inside = channel < kChannels && cell.first_filter + filter < kFilters;
    Element* to = weights + row * kWeightRow + filter;
    const Element* from =
        weight + (channel * kTaps + row / kChunk) * kFilters + cell.first_filter + filter;
    if (!kWeightsByEight) {
      *to = rounded(inside ? *from : Element(0));
    } else if (inside) {
      begin_copy(to, from);
    } else {
      *reinterpret_cast<Eight*>(to) = Eight{{0u, 0u, 0u, 0u}};
    }
  }
  end_copies();
}

struct __align__(8) HalfOfEight {
  unsigned int words[2];
};

// As load_values_singly, eight channels in one load; rows are multiples of 8 bytes.
__device__ __forceinline__ void load_values_by_eight(const Element* image, int top, int left,
                                                     int first_channel, Element* values) {
  static_assert(!kValuesByEight || kValueRow % 4 == 0, "or rows are out of step");
  constexpr int kPieces = kChunk / 8;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kWindow * kPieces; i += kThreads) {
    const int pixel = i / kPieces;
    const int c = i % kPieces * 8;
    const int offset = offset_in_map(top + pixel / kWindowColumns, left + pixel % kWindowColumns);
    Eight eight = {{0u, 0u, 0u, 0u}};
    if (offset >= 0 && first_channel + c < kChannels) {
      eight = *reinterpret_cast<const Eight*>(image + offset + first_channel + c);
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      eight.words[word] = kReluInput ? halves_above_zero(eight.words[word]) : eight.words[word];
    }
    HalfOfEight* to = reinterpret_cast<HalfOfEight*>(values + pixel * kValueRow + c);
    to[0] = {{eight.words[0], eight.words[1]}};
    to[1] = {{eight.words[2], eight.words[3]}};
  }
}

// Weights and values of the chunk, for all threads once they have waited for each other.
__device__ __forceinline__ void load_chunk(const Element* image, const Element* weight,
                                           const Cell& cell, int first_channel, Element* weights,
                                           Element* values) {
  begin_weights(weight, cell, first_channel, weights);
  const int top = cell.tile_row * kTileRows * kStride - kPadding;
  const int left = cell.tile_column * kTileColumns * kStride - kPadding;
  if (kValuesByEight) {
    load_values_by_eight(image, top, left, first_channel, values);
  } else {
    load_values_singly<kChunk, kValueRow>(image, top, left, first_channel, values);
  }
  wait_for_copies<0>();
}

// A bit for each channel of a pixel that is not zero.
__device__ __forceinline__ void make_masks(const Element* values, unsigned int* masks) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int pixel = static_cast<int>(threadIdx.x) / 32; pixel < kWindow; pixel += kWarps) {
    const bool kept = !(widen(values[pixel * kValueRow + lane]) == 0.0f);
    const unsigned int mask = __ballot_sync(0xffffffffu, kept);
    if (lane == 0) {
      masks[pixel] = mask;
    }
  }
}

__device__ __forceinline__ int pixel_in_window(int group, int pixel) {
  const int row = group / kGroupsAcross * 2 + pixel / 4;
  const int column = group % kGroupsAcross * 4 + pixel % 4;
  return row * kStride * kWindowColumns + column * kStride;
}

__device__ __forceinline__ int tap_in_window(int tap) {
  return tap / kKernel * kWindowColumns + tap % kKernel;
}

// The pairs of a group in order, filled up to whole steps; how many steps.
__device__ __forceinline__ int make_pairs(int group, const unsigned int* masks, Pair* pairs) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = pixel_in_window(group, 0);
  const int own = pixel_in_window(group, lane % 8);
  int length = 0;
  for (int some = 0; some < kTaps; some += 4) {
    // Eight lanes a tap, one for each pixel.
    const int tap = some + lane / 8;
    unsigned int any = tap < kTaps ? masks[own + tap_in_window(tap)] : 0u;
    any |= __shfl_xor_sync(0xffffffffu, any, 1);
    any |= __shfl_xor_sync(0xffffffffu, any, 2);
    any |= __shfl_xor_sync(0xffffffffu, any, 4);
    for (int i = 0; i < 4; ++i) {
      const unsigned int mask = __shfl_sync(0xffffffffu, any, i * 8);
      if (mask >> lane & 1u) {
        const int at = length + __popc(mask & ((1u << lane) - 1u));
        const int value = (first + tap_in_window(some + i)) * kValueRow + lane;
        pairs[at] = static_cast<Pair>((some + i) * kChunk + lane) |
                    static_cast<Pair>(value) << 16;
      }
      length += __popc(mask);
    }
  }
  const int steps = (length + kStep - 1) / kStep;
  if (length + lane < steps * kStep) {
    // Weights are zeros there; the value is any, and left out.
    pairs[length + lane] = static_cast<Pair>(kDepth);
  }
  __syncwarp();
  return steps;
}

__device__ __forceinline__ unsigned int value_bits(const unsigned short* values, Pair low,
                                                   Pair high, int pixel) {
  const unsigned int first = (low & 0xffffu) == kDepth ? 0u : values[(low >> 16) + pixel];
  const unsigned int second = (high & 0xffffu) == kDepth ? 0u : values[(high >> 16) + pixel];
  return first | second << 16;
}

// sums: filters by pixels, as the product's result lies in registers.
__device__ __forceinline__ void multiply_pairs(float (&sums)[kMatrices][4], const Pair* pairs,
                                               int steps, const unsigned short* weights,
                                               const unsigned short* values) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int pixel = (pixel_in_window(0, lane / 4) - pixel_in_window(0, 0)) * kValueRow;
  for (int step = 0; step < steps; ++step, pairs += kStep) {
    const int low = lane % 4 * 2;
    const unsigned int b0 = value_bits(values, pairs[low], pairs[low + 1], pixel);
    const unsigned int b1 = value_bits(values, pairs[low + 8], pairs[low + 9], pixel);
    // Lanes 0-7, 8-15, 16-23, 24-31 name the rows of: filters 0-7 and 8-15 of depth 0-7, then 8-15.
    const int depth = static_cast<int>(pairs[lane % 8 + lane / 16 * 8] & 0xffffu);
    const unsigned short* row = weights + depth * kWeightRow + lane / 8 % 2 * 8;
#pragma unroll
    for (int matrix = 0; matrix < kMatrices; ++matrix) {
      unsigned int a[4];
      load_turned(a, row + matrix * 16);
      multiply_half(sums[matrix], a, b0, b1);
    }
  }
}

__device__ __forceinline__ unsigned int value_bits(const float* values, Pair pair, int pixel) {
  return (pair & 0xffffu) == kDepth ? 0u : __float_as_uint(values[(pair >> 16) + pixel]);
}

__device__ __forceinline__ void multiply_pairs(float (&sums)[kMatrices][4], const Pair* pairs,
                                               int steps, const float* weights,
                                               const float* values) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int pixel = (pixel_in_window(0, lane / 4) - pixel_in_window(0, 0)) * kValueRow;
  for (int step = 0; step < steps; ++step, pairs += kStep) {
    const Pair low = pairs[lane % 4];
    const Pair high = pairs[lane % 4 + 4];
    const unsigned int b0 = value_bits(values, low, pixel);
    const unsigned int b1 = value_bits(values, high, pixel);
    const float* low_row = weights + (low & 0xffffu) * kWeightRow + lane / 4;
    const float* high_row = weights + (high & 0xffffu) * kWeightRow + lane / 4;
#pragma unroll
    for (int matrix = 0; matrix < kMatrices; ++matrix) {
      const unsigned int a[4] = {
          __float_as_uint(low_row[matrix * 16]), __float_as_uint(low_row[matrix * 16 + 8]),
          __float_as_uint(high_row[matrix * 16]), __float_as_uint(high_row[matrix * 16 + 8])};
      multiply_tf32(sums[matrix], a, b0, b1);
    }
  }
}

__device__ __forceinline__ void convolve(const Element* __restrict__ x,
                                         const Element* __restrict__ weight,
                                         const Element* __restrict__ bias, Element* y,
                                         float* partial, unsigned int* tickets) {
  const Cell cell = cell_of(static_cast<int>(blockIdx.x));
  const int slice = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Element* weights = reinterpret_cast<Element*>(shared_memory());
  Element* values = weights + (kDepth + 1) * kWeightRow;
  unsigned int* masks = reinterpret_cast<unsigned int*>(
      shared_memory() + (kDepth + 1) * kWeightRow * sizeof(Element) + kValueBytes);
  Pair* pairs = masks + kWindow + warp * (kDepth + 16);
  for (int i = static_cast<int>(threadIdx.x); i < kWeightRow; i += kThreads) {
    weights[kDepth * kWeightRow + i] = Element(0);
  }
  float sums[kGroups][kMatrices][4];
#pragma unroll
  for (int i = 0; i < kGroups * kMatrices * 4; ++i) {
    sums[i / 4 / kMatrices][i / 4 % kMatrices][i % 4] = 0.0f;
  }
  for (int c = 0; c < kSliceChannels; c += kChunk) {
    const int first_channel = slice * kSliceChannels + c;
    if (first_channel >= kChannels) {
      break;
    }
    __syncthreads();
    load_chunk(image_of(x, cell.image), weight, cell, first_channel, weights, values);
    __syncthreads();
    make_masks(values, masks);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int steps = make_pairs(warp * kGroups + i, masks, pairs);
      multiply_pairs(sums[i], pairs, steps, weights, values);
      __syncwarp();
    }
  }
  if (kFinishByCluster) {
    __syncthreads();  // the sums lie where weights were
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int matrix = 0; matrix < kMatrices; ++matrix) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int pixel = lane % 4 * 2 + k % 2;
        const int group = warp * kGroups + i;
        const int place = (group / kGroupsAcross * 2 + pixel / 4) * kTileColumns +
                          group % kGroupsAcross * 4 + pixel % 4;
        put(bias, y, partial, cell, slice, place, matrix * 16 + k / 2 * 8 + lane / 4,
            sums[i][matrix][k]);
      }
    }
  }
  finish(bias, y, partial, tickets, cell);
}
