// What the kernels over 8-bit codes take from the machine: asynchronous copies to shared memory, matrix
// fragments, the int8 tensor cores, dp4a. C++14, no toolkit header: NVRTC 11.8 and nvcc 13 take it. A
// test that runs the kernels on emulated threads defines the same names in its own way.
#pragma once

namespace narrowgauge {
namespace codes {

#ifndef NARROWGAUGE_EMULATED_THREADS

inline __device__ unsigned int shared_address(const void* pointer) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

// kBytes (4 or 16) from global to shared memory, both aligned to them. There by `copies_left` and a
// barrier; below 8.0 at once.
template <int kBytes>
inline __device__ void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  if (kBytes == 16) {  // past L1, which tables need
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  }
#else
  if (kBytes == 16) {
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
  } else {
    *static_cast<unsigned int*>(to) = *static_cast<const unsigned int*>(from);
  }
#endif
}

inline __device__ void end_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until no more than the last kGroups groups of this thread's copies are under way.
template <int kGroups>
inline __device__ void copies_left() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

// Four matrices of 8 rows of 16 bytes. Lane 8 i + r gives the address of row r of matrix i; lane l
// gets bytes 4 (l % 4) to 4 (l % 4) + 3 of row l / 4 of each.
inline __device__ void load_matrices(unsigned int (&words)[4], const void* row) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
#else
  __trap();
#endif
}

#if __CUDA_ARCH__ >= 800
#define NARROWGAUGE_MMA(types)                                                         \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." types ".s32 {%0, %1, %2, %3}, " \
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                          \
               : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#else
#define NARROWGAUGE_MMA(types) __trap()
#endif

// sums += A [16, 32] * B [32, 8] on the tensor cores, modulo 2^32. Lane l = 4 g + t has of A bytes
// 4 t to 4 t + 3 of rows g and g + 8, then the same 16 bytes on; of B those of column g, then 16 on;
// of the sums columns 2 t and 2 t + 1 of row g, then of row g + 8.
template <bool kASigned, bool kBSigned>
inline __device__ void multiply_matrices(int (&sums)[4], const unsigned int (&a)[4],
                                         unsigned int b0, unsigned int b1) {
  if (kASigned && kBSigned) {
    NARROWGAUGE_MMA("s8.s8");
  } else if (kASigned) {
    NARROWGAUGE_MMA("s8.u8");
  } else if (kBSigned) {
    NARROWGAUGE_MMA("u8.s8");
  } else {
    NARROWGAUGE_MMA("u8.u8");
  }
}

#undef NARROWGAUGE_MMA

// sum + the four products of bytes.
template <bool kASigned, bool kBSigned>
inline __device__ int multiply_bytes(unsigned int a, unsigned int b, int sum) {
  int result;
  if (kASigned && kBSigned) {
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  } else if (kASigned) {
    asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  } else if (kBSigned) {
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  } else {
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  }
  return result;
}

// The low halves of two words, and the high ones, the first word's below.
inline __device__ unsigned int low_halves(unsigned int first, unsigned int second) {
  return __byte_perm(first, second, 0x5410);
}
inline __device__ unsigned int high_halves(unsigned int first, unsigned int second) {
  return __byte_perm(first, second, 0x7632);
}

// The bytes of two words in turns, the first word's below: of the low halves, and of the high ones.
inline __device__ unsigned int interleave_low(unsigned int first, unsigned int second) {
  return __byte_perm(first, second, 0x5140);
}
inline __device__ unsigned int interleave_high(unsigned int first, unsigned int second) {
  return __byte_perm(first, second, 0x7362);
}

// The block's dynamic shared memory.
inline __device__ unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char narrowgauge_codes_shared[];
  return narrowgauge_codes_shared;
}

#endif  // NARROWGAUGE_EMULATED_THREADS

}  // namespace codes
}  // namespace narrowgauge
