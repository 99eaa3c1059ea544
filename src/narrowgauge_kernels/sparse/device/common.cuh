// Of every generated kernel: numbers, places, and how partial sums become the result. Behind the
// constants that the generator writes. C++14, no toolkit header.

#ifndef NARROWGAUGE_EMULATED_THREADS
extern __shared__ __align__(16) unsigned char shared_bytes[];

__device__ __forceinline__ unsigned char* shared_memory() { return shared_bytes; }

__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
  return wide;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Past the first-level cache, which does not see what other blocks wrote.
__device__ __forceinline__ float load_shared_by_blocks(const float* from) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

// Four in a row, the first at a multiple of 16 bytes.
__device__ __forceinline__ void load_four_shared_by_blocks(const float* from, float (&to)[4]) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "l"(from)
               : "memory");
}

#define NARROWGAUGE_CLUSTER __cluster_dims__(1, kSlices, 1)

// Blocks of a cluster wait for each other, and see what the others wrote: to arrive releases, to
// wait acquires, where nothing else is said.
__device__ __forceinline__ void wait_for_cluster() {
  __syncwarp();  // lanes come out of loops of different lengths; `aligned` wants them together
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
#endif
}

// The same of blocks that have read what others wrote, so that none ends before. Nothing has to be
// released: a barrier that does would first wait until what was written to memory has arrived. So it
// does not wait for loads either: each has to have been used.
__device__ __forceinline__ void leave_cluster() {
  __syncwarp();
#if __CUDA_ARCH__ >= 900
#if __CUDACC_VER_MAJOR__ >= 12  // PTX 8.0
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Four in a row of the shared memory of the cluster's block `rank`, where this block has `own`.
__device__ __forceinline__ void load_four_of_block(const float* own, int rank, float (&to)[4]) {
#if __CUDA_ARCH__ >= 900
  const unsigned int at = static_cast<unsigned int>(__cvta_generic_to_shared(own));
  asm volatile(
      "{\n"
      ".reg .u32 there;\n"
      "mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n"
      "}"
      : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
      : "r"(at), "r"(rank)
      : "memory");
#endif
}
#endif

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(unsigned short bits) { return half_to_float(bits); }
__device__ __forceinline__ void narrow(float value, float* to) { *to = value; }
__device__ __forceinline__ void narrow(float value, unsigned short* to) {
  *to = float_to_half(value);
}

// NaN compares false, so that it is kept by both.
__device__ __forceinline__ bool is_kept(float value) {
  return kReluInput ? !(value <= 0.0f) : !(value == 0.0f);
}

constexpr int kWindow = kWindowRows * kWindowColumns;
constexpr int kWarps = kThreads / 32;

// Of a window, in one load.
struct __align__(16) Four {
  float a;
  float b;
  float c;
  float d;
};

struct Cell {
  int image;
  int tile_row;
  int tile_column;
  int first_filter;
  int number;
};

__device__ __forceinline__ Cell cell_of(int number) {
  const int tile = number / kFilterBlocks % kTiles;
  return {number / kFilterBlocks / kTiles, tile / kTilesAcross, tile % kTilesAcross,
          number % kFilterBlocks * kBlockFilters, number};
}

// Element of x, at a row and column of the map that may be outside; -1 there.
__device__ __forceinline__ int offset_in_map(int row, int column) {
  const bool inside = row >= 0 && row < kHeight && column >= 0 && column < kWidth;
  return inside ? row * kRowStride + column * kColumnStride : -1;
}

__device__ __forceinline__ const Element* image_of(const Element* x, int image) {
  return x + static_cast<long long>(image) * kChannels * kHeight * kWidth;
}

// Element of y, where a cell's place and filter are; -1 past the edge.
__device__ __forceinline__ long long output_at(const Cell& cell, int place, int filter) {
  const int row = cell.tile_row * kTileRows + place / kTileColumns;
  const int column = cell.tile_column * kTileColumns + place % kTileColumns;
  const int own = cell.first_filter + filter;
  if (row >= kOutHeight || column >= kOutWidth || own >= kFilters) {
    return -1;
  }
  const int within = kChannelsLast ? (row * kOutWidth + column) * kFilters + own
                                   : (own * kOutHeight + row) * kOutWidth + column;
  return static_cast<long long>(cell.image) * kFilters * kOutHeight * kOutWidth + within;
}

// What becomes of a whole sum.
__device__ __forceinline__ float finished(const Element* bias, const Cell& cell, int filter,
                                          float sum) {
  const float value = kBias ? sum + widen(bias[cell.first_filter + filter]) : sum;
  return kReluOutput && value <= 0.0f ? 0.0f : value;
}

// One output from its whole sum, where the tile is not past the edge.
__device__ __forceinline__ void write_output(const Element* bias, Element* y, const Cell& cell,
                                             int place, int filter, float sum) {
  const long long at = output_at(cell, place, filter);
  if (at >= 0) {
    narrow(finished(bias, cell, filter, sum), y + at);
  }
}

// Of y, in one store.
struct __align__(4 * sizeof(Element)) FourOutputs {
  Element filters[4];
};

// The same of four filters in a row, the first a multiple of four. Where they are neighbours in
// memory they are written at once: each store of 16 bits alone would be a write of its own to
// memory, for whoever is beside it writes eight bytes further on.
__device__ __forceinline__ void write_four(const Element* bias, Element* y, const Cell& cell,
                                           int place, int filter, const float (&sums)[4]) {
  if (kChannelsLast && kFilters % 4 == 0) {
    const long long at = output_at(cell, place, filter);
    if (at >= 0) {
      FourOutputs four;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        narrow(finished(bias, cell, filter + i, sums[i]), &four.filters[i]);
      }
      *reinterpret_cast<FourOutputs*>(y + at) = four;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      write_output(bias, y, cell, place, filter + i, sums[i]);
    }
  }
}

// Where a block leaves its sums for the others of its cluster: rows of filters, place by place. The
// pad spreads banks where neighbouring threads read neighbouring places.
constexpr int kOwnRow = kBlockFilters + 4;

__device__ __forceinline__ float* own_sums(int place, int filter) {
  return reinterpret_cast<float*>(shared_memory() + kSumsAt) + place * kOwnRow + filter;
}

// Where a slice's sums of a cell have one of them.
__device__ __forceinline__ long long partial_at(const Cell& cell, int slice, int place,
                                                int filter) {
  const long long cells = static_cast<long long>(slice) * kCells + cell.number;
  return cells * kCellFloats + place * kBlockFilters + filter;
}

// A block's sum of one output: the result where no other block has a share, else a partial sum.
__device__ __forceinline__ void put(const Element* bias, Element* y, float* partial,
                                    const Cell& cell, int slice, int place, int filter, float sum) {
  if (kSlices == 1) {
    write_output(bias, y, cell, place, filter, sum);
    return;
  }
  if (kFinishByCluster) {
    *own_sums(place, filter) = sum;
    return;
  }
  if (kAtomic) {
    atomicAdd(partial + partial_at(cell, 0, place, filter), sum);
  } else {
    partial[partial_at(cell, slice, place, filter)] = sum;
  }
}

// The same of four filters in a row, the first a multiple of four.
__device__ __forceinline__ void put_four(const Element* bias, Element* y, float* partial,
                                         const Cell& cell, int slice, int place, int filter,
                                         const Four& sums) {
  if (kSlices > 1 && kFinishByCluster) {
    *reinterpret_cast<Four*>(own_sums(place, filter)) = sums;
    return;
  }
  if (kSlices > 1 && !kAtomic) {
    *reinterpret_cast<Four*>(partial + partial_at(cell, slice, place, filter)) = sums;
    return;
  }
  const float each[4] = {sums.a, sums.b, sums.c, sums.d};
  if (kSlices == 1) {
    write_four(bias, y, cell, place, filter, each);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      put(bias, y, partial, cell, slice, place, filter + i, each[i]);
    }
  }
}

__device__ __forceinline__ void add(const Four& more, Four* sums) {
  sums->a += more.a;
  sums->b += more.b;
  sums->c += more.c;
  sums->d += more.d;
}

// In the order of the slices, whatever the order of the blocks was.
__device__ __forceinline__ float total_of(float* partial, long long at) {
  if (kAtomic) {
    const float sum = load_shared_by_blocks(partial + at);
    partial[at] = 0.0f;  // for the next launch: there is no memset
    return sum;
  }
  float sum = 0.0f;
#pragma unroll 8
  for (int slice = 0; slice < kSlices; ++slice) {
    sum += load_shared_by_blocks(partial + static_cast<long long>(slice) * kCells * kCellFloats +
                                 at);
  }
  return sum;
}

// The same of four outputs in a row, each in the order of the slices: the bits are those of
// total_of. One block reads a cell's sums alone here, and has to have many bytes under way.
__device__ __forceinline__ void four_totals_of(float* partial, long long at, float (&sums)[4]) {
  float share[4];
  sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll 4
  for (int slice = 0; slice < (kAtomic ? 1 : kSlices); ++slice) {
    load_four_shared_by_blocks(
        partial + static_cast<long long>(slice) * kCells * kCellFloats + at, share);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = kAtomic ? share[i] : sums[i] + share[i];
    }
  }
  if (kAtomic) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      partial[at + i] = 0.0f;  // for the next launch: there is no memset
    }
  }
}

// The blocks of a cell are a cluster: each adds up its share of the outputs, in the order of the
// slices, from the shared memory of all.
__device__ __forceinline__ void finish_in_cluster(const Element* bias, Element* y,
                                                  const Cell& cell) {
  constexpr int kFours = kBlockFilters / 4;
  wait_for_cluster();
  const int first = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  for (int i = first; i < kPlaces * kFours; i += kThreads * kSlices) {
    // Neighbouring threads write neighbours in memory.
    const int place = kChannelsLast ? i / kFours : i % kPlaces;
    const int own = (kChannelsLast ? i % kFours : i / kPlaces) * 4;
    if (output_at(cell, place, own) < 0) {
      continue;  // its sums would be used by nothing (see leave_cluster)
    }
    float shares[kSlices][4];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      load_four_of_block(own_sums(place, own), slice, shares[slice]);
    }
    float sums[4];
#pragma unroll
    for (int filter = 0; filter < 4; ++filter) {
      sums[filter] = 0.0f;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        sums[filter] += shares[slice][filter];
      }
    }
    write_four(bias, y, cell, place, own, sums);
  }
  leave_cluster();  // what others read here has to stay until they have
}

// The block that comes last to a cell adds up all. Tickets are zero before and after.
__device__ __forceinline__ void finish(const Element* bias, Element* y, float* partial,
                                       unsigned int* tickets, const Cell& cell) {
  if (kSlices == 1 || kFinishByLaunch) {
    return;
  }
  if (kFinishByCluster) {
    finish_in_cluster(bias, y, cell);
    return;
  }
  __shared__ int is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(tickets + cell.number, 1u) == static_cast<unsigned int>(kSlices) - 1u;
    if (is_last) {
      tickets[cell.number] = 0u;
    }
  }
  __syncthreads();
  if (!is_last) {
    return;
  }
  __threadfence();
  static_assert(kBlockFilters % 4 == 0 && kCellFloats % 4 == 0, "four in a row are of one place");
  const long long base = static_cast<long long>(cell.number) * kCellFloats;
  for (int i = 4 * static_cast<int>(threadIdx.x); i < kCellFloats; i += 4 * kThreads) {
    float sums[4];
    four_totals_of(partial, base + i, sums);
    write_four(bias, y, cell, i / kBlockFilters, i % kBlockFilters, sums);
  }
}

// The same, as a launch of its own: a thread for each output.
__device__ __forceinline__ void reduce(const Element* bias, Element* y, float* partial) {
  const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < static_cast<long long>(kCells) * kCellFloats) {
    const int within = static_cast<int>(at % kCellFloats);
    write_output(bias, y, cell_of(static_cast<int>(at / kCellFloats)), within / kBlockFilters,
                 within % kBlockFilters, total_of(partial, at));
  }
}
