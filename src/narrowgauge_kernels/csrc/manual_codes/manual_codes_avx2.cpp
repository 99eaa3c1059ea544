// AVX2: 16 registers of 256 bits, so 6 × 2 accumulators, two operands and a factor.
#include <immintrin.h>

#include "manual_codes/manual_codes_expand.h"
#include "manual_codes/manual_codes_micro.h"
#include "manual_codes/manual_codes_transpose.h"
#include "manual_codes/manual_codes_wide_turn.h"

namespace narrowgauge {
namespace codes {
namespace {

// Two int16 per unit: vpmaddwd adds their products as int32, where vpmaddubsw would saturate.
struct EightPairs {
  using Vector = __m256i;
  using Operand = __m256i;
  static constexpr int kLanes = 8;
  static __m256i zero() { return _mm256_setzero_si256(); }
  static __m256i load(const std::uint32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static __m256i broadcast(const std::uint32_t* from) {
    return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(from)));
  }
  static __m256i multiply_add(__m256i left, __m256i right, __m256i sum) {
    const __m256i products = _mm256_madd_epi16(left, right);
    // Of the intrinsic GCC 12 makes copies of the accumulators, and stores every one at every step.
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
    return sum;
  }
  static void accumulate(std::int32_t* tile, __m256i sum, std::int32_t coefficient) {
    __m256i* to = reinterpret_cast<__m256i*>(tile);
    const __m256i scaled = _mm256_mullo_epi32(sum, _mm256_set1_epi32(coefficient));
    _mm256_storeu_si256(to, _mm256_add_epi32(_mm256_loadu_si256(to), scaled));
  }
};

struct SixteenWords {
  using Vector = __m256i;
  static constexpr int kLanes = 16;
  static __m256i load(const std::uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static void store(std::uint16_t* to, __m256i value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
  }
  static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
  static __m256i upper(__m256i a) { return _mm256_srli_epi16(a, 8); }
  static void transpose8x8(const std::uint16_t* const* rows, int first, std::uint16_t* to,
                           std::int64_t stride) {
    transpose_words(rows, first, to, stride);
  }
};

}  // namespace

ProductKernel ProductKernel::avx2() {
  return {6, 16, 2, &expand_words, &expand_words, &product_tile<EightPairs, 6, 2>,
          EightPairs::kLanes, &lane_products<EightPairs>, &dot_product<EightPairs>,
          &turn_units_wide, &turn_codes_wide};
}

TableKernel TableKernel::avx2() { return make_table_kernel<SixteenWords>(); }

}  // namespace codes
}  // namespace narrowgauge
