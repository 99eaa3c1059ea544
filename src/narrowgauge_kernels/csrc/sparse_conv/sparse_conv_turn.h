// Eight channels of eight pixels turned by AVX. For x86-64 files with AVX2 or more.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace narrowgauge {
namespace sparse_conv {
namespace {

struct TurnAvx {
  void operator()(const float* from, std::int64_t from_stride, float* to,
                  std::int64_t to_stride) const {
    __m256 rows[8];
    for (int i = 0; i < 8; ++i) {
      rows[i] = _mm256_loadu_ps(from + i * from_stride);
    }
    __m256 pairs[8];
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    __m256 fours[8];
    for (int i = 0; i < 8; i += 4) {
      fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
      _mm256_storeu_ps(to + (i + 4) * to_stride,
                       _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
  }
};

}  // namespace
}  // namespace sparse_conv
}  // namespace narrowgauge
