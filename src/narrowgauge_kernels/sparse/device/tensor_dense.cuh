// All products, on tensor cores, float16: what a sparse kernel is to be held against, and the faster
// one where a map has few zeros. A block's weights and window are in shared memory at once: all of
// it is asked for at the start, and the weights of one row of the kernel come while those of the
// last are multiplied. Where a window comes as it lies in memory, its ReLU is applied to the
// operands of products. Groups of warps share out the depth, the warps of a group its outputs,
// eight places each at a time.

constexpr int kMatrices = kBlockFilters / 16;             // along filters
constexpr int kAcross = kWarps / kGroups;                 // warps of a group
constexpr int kEights = (kPlaces + 7) / 8;                // of places
constexpr int kOwnEights = (kEights + kAcross - 1) / kAcross;
constexpr int kPairs = (kOwnEights + 1) / 2;              // two are loaded at once
constexpr int kWeightRow = kBlockFilters + 8;             // elements; the pad spreads banks
constexpr int kValueRow = kSliceChannels + 8;
constexpr int kSumRow = kBlockFilters + 4;                // floats
constexpr int kDepths = kSliceChannels / 16;              // products along a tap's channels
constexpr bool kWeightsByEight = kFilters % 8 == 0;

// Weights of one row of the kernel: of each tap and channel, the block's filters.
__device__ __forceinline__ void begin_weights(const Element* weight, const Cell& cell,
                                              int first_channel, int row, Element* weights) {
  constexpr int kPieces = kWeightsByEight ? kBlockFilters / 8 : kBlockFilters;
  constexpr int kPiece = kBlockFilters / kPieces;
  constexpr int kAll = kKernel * kSliceChannels * kPieces;
  for (int i = static_cast<int>(threadIdx.x); i < kAll; i += kThreads) {
    const int filter = i % kPieces * kPiece;
    const int c = i / kPieces % kSliceChannels;
    const int tap = row * kKernel + i / kPieces / kSliceChannels;
    const bool inside = first_channel + c < kChannels && cell.first_filter + filter < kFilters;
    Element* to = weights + (tap * kSliceChannels + c) * kWeightRow + filter;
    const Element* from = weight + ((first_channel + c) * kTaps + tap) * kFilters +
                          cell.first_filter + filter;
    if (!kWeightsByEight) {
      *to = inside ? *from : Element(0);
    } else if (inside) {
      begin_copy(to, from);
    } else {
      *reinterpret_cast<Eight*>(to) = Eight{{0u, 0u, 0u, 0u}};
    }
  }
  end_copies();
}

// The window's values as they lie, under way with the weights that come next; rows of channels.
__device__ __forceinline__ void begin_values(const Element* image, int top, int left,
                                             int first_channel, Element* values) {
  static_assert(!kValuesByEight || kValueRow % 8 == 0, "or copies are out of step");
  constexpr int kPieces = kSliceChannels / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kWindow * kPieces; i += kThreads) {
    const int pixel = i / kPieces;
    const int c = i % kPieces * 8;
    const int offset = offset_in_map(top + pixel / kWindowColumns, left + pixel % kWindowColumns);
    Element* to = values + pixel * kValueRow + c;
    if (offset >= 0 && first_channel + c < kChannels) {
      begin_copy(to, image + offset + first_channel + c);
    } else {
      *reinterpret_cast<Eight*>(to) = Eight{{0u, 0u, 0u, 0u}};
    }
  }
}

// Where in the window the pixel is that an output's place begins at; any for one past the last.
__device__ __forceinline__ int pixel_of(int place) {
  const int own = place < kPlaces ? place : 0;
  return own / kTileColumns * kStride * kWindowColumns + own % kTileColumns * kStride;
}

// This warp's part of one row of the kernel.
__device__ __forceinline__ void multiply_row(float (&sums)[2 * kPairs][kMatrices][4], int row,
                                             int group, const int (&places)[kPairs],
                                             const Element* weights, const Element* values) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Lanes 0-7, 8-15, 16-23, 24-31 name the rows of: filters 0-7 and 8-15 of depth 0-7, then 8-15.
  const Element* own_weights =
      weights + (lane % 8 + lane / 16 * 8) * kWeightRow + lane / 8 % 2 * 8;
#pragma unroll 2
  for (int step = group; step < kKernel * kDepths; step += kGroups) {
    const int column = step / kDepths;
    const int c = step % kDepths * 16;
    unsigned int a[kMatrices][4];
    const Element* from =
        own_weights + ((row * kKernel + column) * kSliceChannels + c) * kWeightRow;
#pragma unroll
    for (int matrix = 0; matrix < kMatrices; ++matrix) {
      load_turned(a[matrix], from + matrix * 16);
    }
    const int shift = (row * kWindowColumns + column) * kValueRow + c;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      unsigned int b[4];
      load_straight(b, values + places[pair] + shift);
      if (kReluInput && kValuesByEight) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          b[i] = halves_above_zero(b[i]);
        }
      }
#pragma unroll
      for (int matrix = 0; matrix < kMatrices; ++matrix) {
        multiply_half(sums[2 * pair][matrix], a[matrix], b[0], b[1]);
        if (2 * pair + 1 < kOwnEights) {
          multiply_half(sums[2 * pair + 1][matrix], a[matrix], b[2], b[3]);
        }
      }
    }
  }
}

// The sums of the groups of warps are added in their order, through shared memory.
__device__ __forceinline__ void put_all(const Element* bias, Element* y, float* partial,
                                        const Cell& cell, int slice,
                                        const float (&sums)[2 * kPairs][kMatrices][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* room = reinterpret_cast<float*>(shared_memory());
  float* own = room + warp / kAcross * kEights * 8 * kSumRow;
  __syncthreads();  // where weights and values were
#pragma unroll
  for (int i = 0; i < kOwnEights; ++i) {
    const int eight = i * kAcross + warp % kAcross;
    if (eight < kEights) {
#pragma unroll
      for (int matrix = 0; matrix < kMatrices; ++matrix) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          own[(eight * 8 + lane % 4 * 2 + k % 2) * kSumRow + matrix * 16 + k / 2 * 8 + lane / 4] =
              sums[i][matrix][k];
        }
      }
    }
  }
  __syncthreads();
  constexpr int kFours = kBlockFilters / 4;
  for (int i = static_cast<int>(threadIdx.x); i < kPlaces * kFours; i += kThreads) {
    const int place = i / kFours;
    const int filter = i % kFours * 4;
    const float* from = room + place * kSumRow + filter;
    Four sum = *reinterpret_cast<const Four*>(from);
#pragma unroll
    for (int group = 1; group < kGroups; ++group) {
      add(*reinterpret_cast<const Four*>(from + group * kEights * 8 * kSumRow), &sum);
    }
    put_four(bias, y, partial, cell, slice, place, filter, sum);
  }
}

// Until the weights of all rows but the last `left` are there, for all threads.
__device__ __forceinline__ void wait_for_rows(int left) {
  switch (left) {  // known when the loop around is unrolled
    case 0: wait_for_copies<0>(); break;
    case 1: wait_for_copies<1>(); break;
    case 2: wait_for_copies<2>(); break;
    case 3: wait_for_copies<3>(); break;
    default: wait_for_copies<4>();
  }
  __syncthreads();
}

__device__ __forceinline__ void convolve(const Element* __restrict__ x,
                                         const Element* __restrict__ weight,
                                         const Element* __restrict__ bias, Element* y,
                                         float* partial, unsigned int* tickets) {
  const Cell cell = cell_of(static_cast<int>(blockIdx.x));
  const int slice = static_cast<int>(blockIdx.y);
  const int first_channel = slice * kSliceChannels;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Element* weights = reinterpret_cast<Element*>(shared_memory());
  Element* values = weights + kTaps * kSliceChannels * kWeightRow;
  const int top = cell.tile_row * kTileRows * kStride - kPadding;
  const int left = cell.tile_column * kTileColumns * kStride - kPadding;
  if (kValuesByEight) {
    begin_values(image_of(x, cell.image), top, left, first_channel, values);
  }
#pragma unroll
  for (int row = 0; row < kKernel; ++row) {
    begin_weights(weight, cell, first_channel, row, weights);
  }
  if (!kValuesByEight) {
    load_values_singly<kSliceChannels, kValueRow>(image_of(x, cell.image), top, left,
                                                  first_channel, values);
  }
  // Lanes 0-7, 8-15 name the pixels of one eight with channels 0-7, 8-15; the others, of the next.
  int places[kPairs];
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const int eight = (2 * pair + lane / 16) * kAcross + warp % kAcross;
    places[pair] = pixel_of(eight * 8 + lane % 8) * kValueRow + lane / 8 % 2 * 8;
  }
  float sums[2 * kPairs][kMatrices][4];
#pragma unroll
  for (int i = 0; i < 2 * kPairs * kMatrices * 4; ++i) {
    sums[i / 4 / kMatrices][i / 4 % kMatrices][i % 4] = 0.0f;
  }
#pragma unroll
  for (int row = 0; row < kKernel; ++row) {
    wait_for_rows(kKernel - 1 - row);
    multiply_row(sums, row, warp / kAcross, places, weights, values);
  }
  put_all(bias, y, partial, cell, slice, sums);
  finish(bias, y, partial, tickets, cell);
}
