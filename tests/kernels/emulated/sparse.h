// In front of a generated convolution that is compiled for the CPU: what it takes from the device,
// on the threads of threads.h. Instructions are written from their specification (PTX ISA: ldmatrix
// .trans, mma.m16n8k16 of f16, mma.m16n8k8 and cvt.rna of tf32, vote, shfl), not from the kernels.
// Included once, in front of everything, and compiled beforehand: no guard.

#include "threads.h"

#include <cmath>
#include <utility>

#define __forceinline__ inline

typedef unsigned int Word;

inline void __syncwarp() { emulated::wait_for_warp(); }
inline void __threadfence() {}
inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }

inline float __uint_as_float(Word bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline Word __float_as_uint(float value) {
  Word bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline unsigned int __ballot_sync(unsigned int, bool vote) {
  emulated::self().words[0] = vote ? 1u : 0u;
  emulated::wait_for_warp();
  unsigned int mask = 0;
  for (unsigned int i = 0; i < 32; ++i) {
    mask |= emulated::lane(i).words[0] << i;
  }
  emulated::wait_for_warp();
  return mask;
}

inline unsigned int __shfl_sync(unsigned int, unsigned int value, int from) {
  emulated::self().words[0] = value;
  emulated::wait_for_warp();
  const unsigned int found = emulated::lane(static_cast<std::size_t>(from) % 32).words[0];
  emulated::wait_for_warp();
  return found;
}

inline unsigned int __shfl_xor_sync(unsigned int all, unsigned int value, int other) {
  return __shfl_sync(all, value, static_cast<int>(emulated::running % 32) ^ other);
}

inline float atomicAdd(float* to, float value) {
  const float before = *to;
  *to = before + value;
  return before;
}

inline unsigned int atomicAdd(unsigned int* to, unsigned int value) {
  const unsigned int before = *to;
  *to = before + value;
  return before;
}

inline unsigned int atomicExch(unsigned int* to, unsigned int value) {
  const unsigned int before = *to;
  *to = value;
  return before;
}

inline unsigned char* shared_memory() { return emulated::memory_of(emulated::block()); }

#define NARROWGAUGE_CLUSTER
inline void wait_for_cluster() { emulated::wait_for_cluster(); }
inline void leave_cluster() { emulated::wait_for_cluster(); }
inline void load_four_of_block(const float* own, int rank, float (&to)[4]) {
  const auto at = reinterpret_cast<const unsigned char*>(own) - shared_memory();
  if (at % 16 != 0) {
    std::abort();
  }
  std::memcpy(to, emulated::memory_of(static_cast<std::size_t>(rank)) + at, sizeof to);
}

inline float half_to_float(unsigned short bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  float value = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                : exponent == 31 ? (fraction ? NAN : INFINITY)
                                 : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return bits >> 15 ? -value : value;
}

inline unsigned short float_to_half(float value) {
  const unsigned short sign = std::signbit(value) ? 0x8000u : 0u;
  const float size = std::fabs(value);
  if (std::isnan(value)) {
    return sign | 0x7fffu;
  }
  if (size >= 65520.0f) {
    return sign | 0x7c00u;
  }
  if (size < std::ldexp(1.0f, -14)) {  // nearest multiple of 2^-24, ties to even
    return sign | static_cast<unsigned short>(std::nearbyint(std::ldexp(size, 24)));
  }
  int exponent;
  const float part = std::frexp(size, &exponent);  // 0.5 to 1
  const int fraction = static_cast<int>(std::nearbyint(std::ldexp(part, 11)));  // 1024 to 2048
  return static_cast<unsigned short>(sign | (((exponent + 13) << 10) + fraction));
}

inline float load_shared_by_blocks(const float* from) { return *from; }
inline void load_four_shared_by_blocks(const float* from, float (&to)[4]) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
    std::abort();  // as the device faults
  }
  std::memcpy(to, from, sizeof to);
}

// To 10 bits, nearest, ties away from zero.
inline float round_to_tf32(float value) {
  const Word bits = __float_as_uint(value);
  return std::isfinite(value) ? __uint_as_float((bits + 0x1000u) & 0xffffe000u) : value;
}

inline void load_turned(unsigned int (&words)[4], const unsigned short* row) {
  if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) {
    std::abort();
  }
  emulated::self().row = row;
  emulated::wait_for_warp();
  const std::size_t own = emulated::running % 32;
  for (std::size_t matrix = 0; matrix < 4; ++matrix) {
    // Of the matrix turned: row own / 4, columns 2 (own % 4) and one more.
    Word word = 0;
    for (std::size_t i = 0; i < 2; ++i) {
      const void* from = emulated::lane(8 * matrix + own % 4 * 2 + i).row;
      word |= static_cast<Word>(static_cast<const unsigned short*>(from)[own / 4]) << (16 * i);
    }
    words[matrix] = word;
  }
  emulated::wait_for_warp();
}

inline void load_straight(unsigned int (&words)[4], const unsigned short* row) {
  if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) {
    std::abort();
  }
  narrowgauge::codes::load_matrices(words, row);
}

inline void begin_copy(void* to, const void* from) { narrowgauge::codes::copy_async<16>(to, from); }
inline void end_copies() { narrowgauge::codes::end_copies(); }
template <int kLeft>
inline void wait_for_copies() {
  narrowgauge::codes::copies_left<kLeft>();
}

inline unsigned int halves_above_zero(unsigned int halves) {
  unsigned int kept = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const unsigned short half = static_cast<unsigned short>(halves >> shift);
    kept |= (half_to_float(half) <= 0.0f ? 0u : static_cast<unsigned int>(half)) << shift;
  }
  return kept;
}

// Tensor-core products of all warps, for tests of how many there are.
static long tensor_core_products = 0;
extern "C" long take_products() {
  const long count = tensor_core_products;
  tensor_core_products = 0;
  return count;
}

namespace emulated {

inline void show(const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
  const Word shown[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(self().words, shown, sizeof shown);
  wait_for_warp();
}

inline float half_of(Word word, int index) {
  return half_to_float(static_cast<unsigned short>(word >> (16 * index)));
}

// An operand that was not rounded to tf32 would be cut off by the product.
inline float tf32_of(Word word) { return __uint_as_float(word & 0xffffe000u); }

// c0, c1: row lane / 4; c2, c3: row lane / 4 + 8; columns 2 (lane % 4) and one more.
template <typename Left, typename Right>
inline void accumulate(float (&sums)[4], int depth, const Left& left, const Right& right) {
  tensor_core_products += running % 32 == 0 ? 1 : 0;
  const std::size_t group = running % 32 / 4;
  const std::size_t place = running % 4;
  for (int i = 0; i < 4; ++i) {
    double sum = 0.0;
    for (int k = 0; k < depth; ++k) {
      sum += static_cast<double>(left(group, i >= 2, k)) *
             right(2 * place + static_cast<std::size_t>(i % 2), k);
    }
    sums[i] = static_cast<float>(sums[i] + sum);
  }
  wait_for_warp();
}

}  // namespace emulated

inline void multiply_half(float (&sums)[4], const unsigned int (&a)[4], unsigned int b0,
                          unsigned int b1) {
  emulated::show(a, b0, b1);
  emulated::accumulate(
      sums, 16,
      [](std::size_t row, bool lower, int k) {
        const auto& holder = emulated::lane(4 * row + static_cast<std::size_t>(k % 8 / 2));
        return emulated::half_of(holder.words[(lower ? 1 : 0) + (k >= 8 ? 2 : 0)], k % 2);
      },
      [](std::size_t column, int k) {
        const auto& holder = emulated::lane(4 * column + static_cast<std::size_t>(k % 8 / 2));
        return emulated::half_of(holder.words[4 + (k >= 8 ? 1 : 0)], k % 2);
      });
}

inline void multiply_tf32(float (&sums)[4], const unsigned int (&a)[4], unsigned int b0,
                          unsigned int b1) {
  emulated::show(a, b0, b1);
  emulated::accumulate(
      sums, 8,
      [](std::size_t row, bool lower, int k) {
        const auto& holder = emulated::lane(4 * row + static_cast<std::size_t>(k % 4));
        return emulated::tf32_of(holder.words[(lower ? 1 : 0) + (k >= 4 ? 2 : 0)]);
      },
      [](std::size_t column, int k) {
        const auto& holder = emulated::lane(4 * column + static_cast<std::size_t>(k % 4));
        return emulated::tf32_of(holder.words[4 + (k >= 4 ? 1 : 0)]);
      });
}

// A launch, from what a driver is given: addresses in the order of the kernel's arguments.
template <typename... Arguments, std::size_t... kAt>
inline void call(void (*kernel)(Arguments...), const std::uint64_t* values,
                 std::index_sequence<kAt...>) {
  kernel((Arguments)(values[kAt])...);
}

template <typename... Arguments>
inline void launch(void (*kernel)(Arguments...), unsigned int cells, unsigned int slices,
                   unsigned int clustered, int threads, int shared_bytes, bool backwards,
                   const std::uint64_t* values) {
  gridDim = dim3(cells, slices, 1);
  blockDim = dim3(static_cast<unsigned int>(threads));
  emulated::body = [&] { call(kernel, values, std::index_sequence_for<Arguments...>()); };
  const unsigned int all = cells * slices / clustered;
  for (unsigned int i = 0; i < all; ++i) {
    const unsigned int number = backwards ? all - 1 - i : i;
    emulated::prepare(static_cast<std::size_t>(threads), static_cast<std::size_t>(shared_bytes),
                      dim3(number % cells, number / cells * clustered, 0), clustered);
    emulated::run_blocks();
  }
}
