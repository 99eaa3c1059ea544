// unverified: NEON kernels over 8-bit codes | no arm64 host or compiler was at hand; run on stand-ins of their instructions | on an arm64 host: pytest tests/kernels/test_codes.py
// AArch64 Advanced SIMD: 32 registers of 128 bits, so 6 × 4 accumulators, 2 operands and a factor.
#include <arm_neon.h>

#include "manual_codes/manual_codes_expand.h"
#include "manual_codes/manual_codes_micro.h"
#include "manual_codes/manual_codes_turn.h"

namespace narrowgauge {
namespace codes {
namespace {

// Two int16 per unit: smlal keeps the two products of a unit in neighbouring lanes, which
// `accumulate` adds. Every aarch64 has it, and it takes both signs; sdot, which not all have, would
// take one.
struct FourPairs {
  struct Vector {
    int32x4_t low;
    int32x4_t high;
  };
  using Operand = int16x8_t;
  static constexpr int kLanes = 4;
  static Vector zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  static int16x8_t load(const std::uint32_t* from) {
    return vreinterpretq_s16_u32(vld1q_u32(from));
  }
  static int16x8_t broadcast(const std::uint32_t* from) {
    return vreinterpretq_s16_u32(vdupq_n_u32(*from));
  }
  static Vector multiply_add(int16x8_t left, int16x8_t right, const Vector& sum) {
    return {vmlal_s16(sum.low, vget_low_s16(left), vget_low_s16(right)),
            vmlal_s16(sum.high, vget_high_s16(left), vget_high_s16(right))};
  }
  static void accumulate(std::int32_t* tile, const Vector& sum, std::int32_t coefficient) {
    const int32x4_t units = vpaddq_s32(sum.low, sum.high);
    vst1q_s32(tile, vmlaq_n_s32(vld1q_s32(tile), units, coefficient));
  }
};

struct EightWords {
  using Vector = uint16x8_t;
  static constexpr int kLanes = 8;
  static uint16x8_t load(const std::uint16_t* from) { return vld1q_u16(from); }
  static void store(std::uint16_t* to, uint16x8_t value) { vst1q_u16(to, value); }
  static uint16x8_t add(uint16x8_t a, uint16x8_t b) { return vaddq_u16(a, b); }
  static uint16x8_t upper(uint16x8_t a) { return vshrq_n_u16(a, 8); }
  // Left to the compiler: once per step of depth, beside thousands of look-ups.
  static void transpose8x8(const std::uint16_t* const* rows, int first, std::uint16_t* to,
                           std::int64_t stride) {
    for (int a = 0; a < 8; ++a) {
      for (int lane = 0; lane < 8; ++lane) {
        to[a * stride + lane] = rows[lane][first + a];
      }
    }
  }
};

}  // namespace

ProductKernel ProductKernel::neon() {
  return {6, 8, 2, &expand_words, &expand_words, &product_tile<FourPairs, 6, 2>,
          FourPairs::kLanes, &lane_products<FourPairs>, &dot_product<FourPairs>,
          &codes::turn_units, &codes::turn_codes};
}

TableKernel TableKernel::neon() { return make_table_kernel<EightWords>(); }

}  // namespace codes
}  // namespace narrowgauge
