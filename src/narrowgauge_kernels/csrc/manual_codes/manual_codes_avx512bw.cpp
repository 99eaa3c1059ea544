// AVX-512BW: 32 products of one entry by one load.
#include <immintrin.h>

#include "manual_codes/manual_codes_micro.h"
#include "manual_codes/manual_codes_transpose.h"

namespace narrowgauge {
namespace codes {
namespace {

struct ThirtyTwoWords {
  using Vector = __m512i;
  static constexpr int kLanes = 32;
  static __m512i load(const std::uint16_t* from) { return _mm512_loadu_si512(from); }
  static void store(std::uint16_t* to, __m512i value) { _mm512_storeu_si512(to, value); }
  static __m512i add(__m512i a, __m512i b) { return _mm512_add_epi16(a, b); }
  static __m512i upper(__m512i a) { return _mm512_srli_epi16(a, 8); }
  static void transpose8x8(const std::uint16_t* const* rows, int first, std::uint16_t* to,
                           std::int64_t stride) {
    transpose_words(rows, first, to, stride);
  }
};

}  // namespace

TableKernel TableKernel::avx512bw() { return make_table_kernel<ThirtyTwoWords>(); }

}  // namespace codes
}  // namespace narrowgauge
