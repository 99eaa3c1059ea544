// AVX-512 VNNI: 32 registers of 512 bits, so 12 × 2 accumulators, two operands and a factor.
#include <immintrin.h>

#include "manual_codes/manual_codes_expand.h"
#include "manual_codes/manual_codes_micro.h"
#include "manual_codes/manual_codes_wide_turn.h"

namespace narrowgauge {
namespace codes {
namespace {

// Four bytes per unit, left uint8 and right int8: vpdpbusd adds their products without saturation.
struct SixteenQuads {
  using Vector = __m512i;
  using Operand = __m512i;
  static constexpr int kLanes = 16;
  static __m512i zero() { return _mm512_setzero_si512(); }
  static __m512i load(const std::uint32_t* from) { return _mm512_loadu_si512(from); }
  static __m512i broadcast(const std::uint32_t* from) {
    return _mm512_set1_epi32(static_cast<int>(*from));
  }
  static __m512i multiply_add(__m512i left, __m512i right, __m512i sum) {
#if defined(NARROWGAUGE_STAND_INS)
    return _mm512_dpbusd_epi32(sum, left, right);
#else
    // Of the intrinsic GCC 12 makes copies of the accumulators, and spills a third of them.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
    return sum;
#endif
  }
  static void accumulate(std::int32_t* tile, __m512i sum, std::int32_t coefficient) {
    const __m512i scaled = _mm512_mullo_epi32(sum, _mm512_set1_epi32(coefficient));
    _mm512_storeu_si512(tile, _mm512_add_epi32(_mm512_loadu_si512(tile), scaled));
  }
};

}  // namespace

ProductKernel ProductKernel::avx512vnni() {
  return {12, 32, 4, &expand_left_bytes, &expand_right_bytes, &product_tile<SixteenQuads, 12, 2>,
          SixteenQuads::kLanes, &lane_products<SixteenQuads>, &dot_product<SixteenQuads>,
          &turn_units_wide, &turn_codes_wide};
}

}  // namespace codes
}  // namespace narrowgauge
