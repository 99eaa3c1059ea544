// 8 × 8 uint16 turned about their diagonal by SSE2, which every x86-64 has. Included once by each
// file of x86 kernels; the anonymous namespace is load-bearing, as in manual_codes_expand.h.
#pragma once

#include <emmintrin.h>

#include <cstdint>

namespace narrowgauge {
namespace codes {
namespace {

// to[a * stride + lane] = rows[lane][first + a]; `rows` and `to` are aligned to 16 bytes.
inline void transpose_words(const std::uint16_t* const* rows, int first, std::uint16_t* to,
                            std::int64_t stride) {
  __m128i in[8];
  for (int lane = 0; lane < 8; ++lane) {
    in[lane] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[lane] + first));
  }
  __m128i pairs[8];
  for (int i = 0; i < 4; ++i) {
    pairs[i] = _mm_unpacklo_epi16(in[2 * i], in[2 * i + 1]);
    pairs[4 + i] = _mm_unpackhi_epi16(in[2 * i], in[2 * i + 1]);
  }
  for (int half = 0; half < 2; ++half) {
    const __m128i* p = pairs + 4 * half;
    const __m128i quads[4] = {_mm_unpacklo_epi32(p[0], p[1]), _mm_unpacklo_epi32(p[2], p[3]),
                              _mm_unpackhi_epi32(p[0], p[1]), _mm_unpackhi_epi32(p[2], p[3])};
    for (int i = 0; i < 2; ++i) {
      std::uint16_t* line = to + (4 * half + 2 * i) * stride;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(line),
                       _mm_unpacklo_epi64(quads[2 * i], quads[2 * i + 1]));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(line + stride),
                       _mm_unpackhi_epi64(quads[2 * i], quads[2 * i + 1]));
    }
  }
}

}  // namespace
}  // namespace codes
}  // namespace narrowgauge
