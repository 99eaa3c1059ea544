// Zeros skipped one by one: lists of a window's other values, each multiplied by all filters, one
// filter a thread or a few, into sums in registers. `multiply_entry` and `multiply_window` are generated: a
// register must be named when the code is made, so each place of the window has its own case, to
// which all lanes of a warp jump together; or, without lists, straight code goes through all values
// and may jump over the zeros.

struct __align__(8) Entry {
  float value;
  int place;
};

constexpr int kFilterThreads = kBlockFilters / kWide;  // of a group

// The weights of a thread's filters, in one load where no row of them begins in between.
struct __align__(sizeof(Element) * kWide) Weights {
  Element filters[kWide];
};

// By tap, then by filter.
__device__ __forceinline__ void load_weights(float (&taps)[kTaps * kWide], const Element* weight,
                                             int channel, int filter) {
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    const Element* from = weight + (channel * kTaps + tap) * kFilters + filter;
    Weights some;
    if (kFilters % kWide == 0) {
      if (channel < kChannels && filter < kFilters) {
        some = *reinterpret_cast<const Weights*>(from);
      } else {
        some = Weights();
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        some.filters[i] = channel < kChannels && filter + i < kFilters ? from[i] : Element(0);
      }
    }
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      taps[tap * kWide + i] = widen(some.filters[i]);
    }
  }
}

// Where no output sees a place, as between the steps of a stride, its value is not kept.
__device__ __forceinline__ bool is_seen(int row, int column) {
  return row % kStride < kKernel && column % kStride < kKernel;
}

// Each warp's channels of the block's slice, compacted in the order of their places.
__device__ __forceinline__ void make_lists(const Element* image, const Cell& cell,
                                           int first_channel, Entry* entries, int* lengths) {
  constexpr int kChunks = (kWindow + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int top = cell.tile_row * kTileRows * kStride - kPadding;
  const int left = cell.tile_column * kTileColumns * kStride - kPadding;
  int offsets[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int place = chunk * 32 + lane;
    const int row = place / kWindowColumns;
    const int column = place % kWindowColumns;
    const bool used = place < kWindow && is_seen(row, column);
    offsets[chunk] = used ? offset_in_map(top + row, left + column) : -1;
  }
#pragma unroll 2
  for (int c = static_cast<int>(threadIdx.x) / 32; c < kSliceChannels; c += kWarps) {
    const int channel = first_channel + c;
    const Element* plane = image + static_cast<long long>(channel) * kChannelStride;
    float values[kChunks];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool inside = offsets[chunk] >= 0 && channel < kChannels;
      values[chunk] = inside ? widen(plane[offsets[chunk]]) : 0.0f;
    }
    int length = 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool kept = is_kept(values[chunk]);
      const unsigned int mask = __ballot_sync(0xffffffffu, kept);
      if (kept) {
        const int at = length + __popc(mask & ((1u << lane) - 1u));
        entries[c * kWindow + at] = {values[chunk], chunk * 32 + lane};
      }
      length += __popc(mask);
    }
    if (lane == 0) {
      lengths[c] = length;
    }
  }
}

// A producer's lists of this tile and slice.
__device__ __forceinline__ void load_lists(const Cell& cell, int first_channel,
                                           const Entry* all_entries, const int* all_lengths,
                                           Entry* entries, int* lengths) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = cell.tile_row * kTilesAcross + cell.tile_column;
  for (int c = static_cast<int>(threadIdx.x) / 32; c < kSliceChannels; c += kWarps) {
    const int channel = first_channel + c;
    const int list = (cell.image * kChannels + channel) * kTiles + tile;
    const int length = channel < kChannels ? all_lengths[list] : 0;
    for (int i = lane; i < length; i += 32) {
      entries[c * kWindow + i] = all_entries[static_cast<long long>(list) * kWindow + i];
    }
    if (lane == 0) {
      lengths[c] = length;
    }
  }
}

// All values of the window, zero where ReLU makes them so: a warp takes a channel at a time, and
// knows its places from the first on.
__device__ __forceinline__ void load_window(const Element* image, const Cell& cell,
                                            int first_channel, float* values) {
  constexpr int kChunks = (kWindow + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int top = cell.tile_row * kTileRows * kStride - kPadding;
  const int left = cell.tile_column * kTileColumns * kStride - kPadding;
  int offsets[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int place = chunk * 32 + lane;
    offsets[chunk] = place < kWindow ? offset_in_map(top + place / kWindowColumns,
                                                     left + place % kWindowColumns)
                                     : -1;
  }
#pragma unroll 8
  for (int c = static_cast<int>(threadIdx.x) / 32; c < kSliceChannels; c += kWarps) {
    const int channel = first_channel + c;
    const Element* plane = image + static_cast<long long>(channel) * kChannelStride;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool inside = offsets[chunk] >= 0 && channel < kChannels;
      const float value = inside ? widen(plane[offsets[chunk]]) : 0.0f;
      const int place = chunk * 32 + lane;
      if (place < kWindowStride) {  // what fills up the last four is zero too
        values[c * kWindowStride + place] = is_kept(value) ? value : 0.0f;
      }
    }
  }
}

// The sums of the block's groups of threads are added in the groups' order.
__device__ __forceinline__ void put_all(const Element* bias, Element* y, float* partial,
                                        const Cell& cell, int slice,
                                        float (&sums)[kPlaces * kWide]) {
  const int thread = static_cast<int>(threadIdx.x);
  const int filter = thread % kFilterThreads * kWide;
  if (kGroups == 1) {
    if (kFinishByCluster) {
      __syncthreads();  // the sums lie where values were
    }
#pragma unroll
    for (int i = 0; i < kPlaces * kWide; ++i) {
      put(bias, y, partial, cell, slice, i / kWide, filter + i % kWide, sums[i]);
    }
    return;
  }
  float* room = reinterpret_cast<float*>(shared_memory());
  constexpr int kRound = kRoundPlaces * kBlockFilters;
#pragma unroll
  for (int first = 0; first < kPlaces; first += kRoundPlaces) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRoundPlaces * kWide; ++i) {
      const int sum = first * kWide + i;
      if (sum < kPlaces * kWide) {
        room[thread / kFilterThreads * kRound + i / kWide * kBlockFilters + filter + i % kWide] =
            sums[sum < kPlaces * kWide ? sum : 0];
      }
    }
    __syncthreads();
    for (int i = 4 * thread; i < kRound; i += 4 * kThreads) {
      if (first + i / kBlockFilters < kPlaces) {
        Four sum = *reinterpret_cast<const Four*>(room + i);
#pragma unroll
        for (int group = 1; group < kGroups; ++group) {
          add(*reinterpret_cast<const Four*>(room + group * kRound + i), &sum);
        }
        put_four(bias, y, partial, cell, slice, first + i / kBlockFilters, i % kBlockFilters, sum);
      }
    }
  }
}

enum Source { kFromMap, kFromLists, kFromWindow };

template <int kSource>
__device__ __forceinline__ void convolve(const Element* __restrict__ x,
                                         const Element* __restrict__ weight,
                                         const Element* __restrict__ bias, Element* y,
                                         float* partial, unsigned int* tickets,
                                         const Entry* __restrict__ all_entries,
                                         const int* __restrict__ all_lengths) {
  const Cell cell = cell_of(static_cast<int>(blockIdx.x));
  const int slice = static_cast<int>(blockIdx.y);
  const int first_channel = slice * kSliceChannels;
  const int filter =
      cell.first_filter + static_cast<int>(threadIdx.x) % kFilterThreads * kWide;
  const int group = static_cast<int>(threadIdx.x) / kFilterThreads;
  Entry* entries = reinterpret_cast<Entry*>(shared_memory());
  float* window = reinterpret_cast<float*>(shared_memory());
  int* lengths = reinterpret_cast<int*>(entries + kSliceChannels * kWindow);
  float next[kTaps * kWide];
  load_weights(next, weight, first_channel + group, filter);  // under way while lists are made
  if (kSource == kFromMap) {
    make_lists(image_of(x, cell.image), cell, first_channel, entries, lengths);
  } else if (kSource == kFromLists) {
    load_lists(cell, first_channel, all_entries, all_lengths, entries, lengths);
  } else {
    load_window(image_of(x, cell.image), cell, first_channel, window);
  }
  __syncthreads();
  float sums[kPlaces * kWide];
#pragma unroll
  for (int i = 0; i < kPlaces * kWide; ++i) {
    sums[i] = 0.0f;
  }
  for (int c = group; c < kSliceChannels; c += kGroups) {
    float taps[kTaps * kWide];
#pragma unroll
    for (int i = 0; i < kTaps * kWide; ++i) {
      taps[i] = next[i];
    }
    if (c + kGroups < kSliceChannels) {
      load_weights(next, weight, first_channel + c + kGroups, filter);
    }
    if (kSource == kFromWindow) {
      multiply_window(window + c * kWindowStride, taps, sums);
      continue;
    }
    const int length = lengths[c];
    const Entry* list = entries + c * kWindow;
    Entry entry = list[0];
#pragma unroll 1
    for (int i = 0; i < length; ++i) {
      const Entry following = list[i + 1 < length ? i + 1 : i];  // under way behind the products
      multiply_entry(entry.place, entry.value, taps, sums);
      entry = following;
    }
  }
  put_all(bias, y, partial, cell, slice, sums);
  finish(bias, y, partial, tickets, cell);
}

// ReLU, the count of zeros and the lists in one pass: a warp for each image, channel and tile. The
// count of this launch is counts[0] when it ends; counts[1] and counts[2] are zero before and after.
__device__ __forceinline__ void produce(const Element* __restrict__ x, Entry* entries, int* lengths,
                                        unsigned int* counts) {
  constexpr int kHull = kHullRows * kHullColumns;
  constexpr int kLists = kBatch * kChannels * kTiles;
  constexpr int kWarpsHere = kProducerThreads / 32;
  __shared__ unsigned int zeros_of_warp[kWarpsHere];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int list = static_cast<int>(blockIdx.x) * kWarpsHere + warp;
  unsigned int zeros = 0;
  if (list < kLists) {
    const int tile = list % kTiles;
    const int channel = list / kTiles % kChannels;
    const Element* plane = image_of(x, list / kTiles / kChannels) +
                           static_cast<long long>(channel) * kChannelStride;
    const int tile_row = tile / kTilesAcross;
    const int tile_column = tile % kTilesAcross;
    int length = 0;
    for (int first = 0; first < kHull; first += 32) {
      // Of the tile's own part of the map, and of its window; from the tile's first element.
      const int row = (first + lane) / kHullColumns + kHullTop;
      const int column = (first + lane) % kHullColumns + kHullTop;
      const int offset = first + lane < kHull
                             ? offset_in_map(tile_row * kTileRows * kStride + row,
                                             tile_column * kTileColumns * kStride + column)
                             : -1;
      const float value = offset < 0 ? 0.0f : widen(plane[offset]);
      const bool kept = is_kept(value);
      const bool owned = offset >= 0 && row >= 0 && column >= 0 &&
                         (row < kTileRows * kStride || tile_row == kTilesDown - 1) &&
                         (column < kTileColumns * kStride || tile_column == kTilesAcross - 1);
      zeros += __popc(__ballot_sync(0xffffffffu, owned && !kept));
      const int place_row = row + kPadding;
      const int place_column = column + kPadding;
      const bool listed = kept && place_row < kWindowRows && place_column < kWindowColumns &&
                          is_seen(place_row, place_column);
      const unsigned int mask = __ballot_sync(0xffffffffu, listed);
      if (listed) {
        const int at = length + __popc(mask & ((1u << lane) - 1u));
        entries[static_cast<long long>(list) * kWindow + at] = {
            value, place_row * kWindowColumns + place_column};
      }
      length += __popc(mask);
    }
    if (lane == 0) {
      lengths[list] = length;
    }
  }
  if (lane == 0) {
    zeros_of_warp[warp] = zeros;
  }
  __syncthreads();
  if (threadIdx.x != 0) {
    return;
  }
  unsigned int sum = 0;
  for (int i = 0; i < kWarpsHere; ++i) {
    sum += zeros_of_warp[i];
  }
  atomicAdd(counts + 1, sum);
  __threadfence();
  if (atomicAdd(counts + 2, 1u) == gridDim.x - 1u) {
    __threadfence();
    counts[0] = atomicExch(counts + 1, 0u);
    counts[2] = 0u;
  }
}
