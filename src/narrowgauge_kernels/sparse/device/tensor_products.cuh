// Instructions of tensor cores, and those that feed them. Behind common.cuh.

#ifndef NARROWGAUGE_EMULATED_THREADS
__device__ __forceinline__ unsigned int shared_address(const void* at) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(at));
}

// Four 8x8 matrices of 16-bit elements, whose rows each lane names one of: turned, and as they are.
__device__ __forceinline__ void load_turned(unsigned int (&words)[4], const unsigned short* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void load_straight(unsigned int (&words)[4],
                                              const unsigned short* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void multiply_half(float (&sums)[4], const unsigned int (&a)[4],
                                              unsigned int b0, unsigned int b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_tf32(float (&sums)[4], const unsigned int (&a)[4],
                                              unsigned int b0, unsigned int b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float round_to_tf32(float value) {
  unsigned int bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}

// The larger of each half and zero; NaN where it is NaN.
__device__ __forceinline__ unsigned int halves_above_zero(unsigned int halves) {
  unsigned int kept;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(kept) : "r"(halves), "r"(0u));
  return kept;
}

// 16 bytes, under way until `wait_for_copies`.
__device__ __forceinline__ void begin_copy(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until so many of this thread's groups of copies are left.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
#endif

// Of 16-bit elements, in one load.
struct __align__(16) Eight {
  unsigned int words[4];
};

// Whether eight channels of a pixel lie at a multiple of 16 bytes.
constexpr bool kValuesByEight = sizeof(Element) == 2 && kChannelsLast && kChannels % 8 == 0;

__device__ __forceinline__ float rounded(float value) { return round_to_tf32(value); }
__device__ __forceinline__ unsigned short rounded(unsigned short bits) { return bits; }

// The values of the window's pixels, which begins at `top` and `left` of the map: rows of kCount
// channels, kRow elements apart, after the ReLU where that is part, rounded for the product.
template <int kCount, int kRow>
__device__ __forceinline__ void load_values_singly(const Element* image, int top, int left,
                                                   int first_channel, Element* values) {
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kWindow * kCount; i += kThreads) {
    // Neighbouring threads read neighbours in memory.
    const int pixel = kChannelsLast ? i / kCount : i % kWindow;
    const int c = kChannelsLast ? i % kCount : i / kWindow;
    const int offset = offset_in_map(top + pixel / kWindowColumns, left + pixel % kWindowColumns);
    Element value = Element(0);
    if (offset >= 0 && first_channel + c < kChannels) {
      value = image[static_cast<long long>(first_channel + c) * kChannelStride + offset];
      value = is_kept(widen(value)) ? value : Element(0);
    }
    values[pixel * kRow + c] = rounded(value);
  }
}
