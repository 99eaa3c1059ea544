// AVX2: 16 registers of 256 bits: 4 × 2 accumulators. Compressing is a shuffle by a table.
#include <immintrin.h>

#include "sparse_conv/sparse_conv_micro.h"
#include "sparse_conv/sparse_conv_turn.h"

namespace narrowgauge {
namespace sparse_conv {
namespace {

struct EightFloats {
  using Vector = __m256;
  static constexpr int kLanes = 8;
  static __m256 load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, __m256 value) { _mm256_storeu_ps(to, value); }
  static __m256 broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
};

// For each mask of eight lanes, the lanes that are set, in order. Not std::array, whose functions
// the linker may take from here for everyone.
struct Table {
  std::int32_t lanes[256][8];
  std::int32_t count[256];
  Table() {
    for (int mask = 0; mask < 256; ++mask) {
      int found = 0;
      for (int lane = 0; lane < 8; ++lane) {
        lanes[mask][lane] = 0;
        if (mask >> lane & 1) {
          lanes[mask][found++] = lane;
        }
      }
      count[mask] = found;
    }
  }
};

const Table& table() {
  static const Table made;
  return made;
}

template <bool kRelu>
int nonzeros(__m256 values) {
  // Unordered comparisons: true of NaN.
  return _mm256_movemask_ps(
      kRelu ? _mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_NLE_UQ)
            : _mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_NEQ_UQ));
}

template <bool kRelu>
struct Compress {
  const Table& known = table();
  std::int64_t operator()(const float* from, int channels, float* values, std::int32_t* offsets,
                          std::int64_t at) const {
    __m256i offset = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                        _mm256_set1_epi32(kGrainBytes));
    const __m256i step = _mm256_set1_epi32(8 * kGrainBytes);
    int c = 0;
    for (; c + 8 <= channels; c += 8) {
      const __m256 some = _mm256_loadu_ps(from + c);
      const int mask = nonzeros<kRelu>(some);
      const __m256i lanes =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(known.lanes[mask]));
      _mm256_storeu_ps(values + at, _mm256_permutevar8x32_ps(some, lanes));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(offsets + at),
                          _mm256_permutevar8x32_epi32(offset, lanes));
      at += known.count[mask];
      offset = _mm256_add_epi32(offset, step);
    }
    return append_scalar<kRelu>(from, c, channels, values, offsets, at);
  }
};

template <bool kRelu>
std::int64_t count(const float* from, std::int64_t length) {
  const Table& known = table();
  std::int64_t found = 0, i = 0;
  for (; i + 8 <= length; i += 8) {
    found += 8 - known.count[nonzeros<kRelu>(_mm256_loadu_ps(from + i))];
  }
  return found + count_scalar<kRelu>(from, i, length);
}

std::int64_t count_zeros(const float* from, std::int64_t length, bool relu) {
  return relu ? count<true>(from, length) : count<false>(from, length);
}

}  // namespace

Loops Loops::avx2() {
  return {build_lists<Compress, TurnAvx>, visit<EightFloats, 2, 16>, visit<EightFloats, 4, 32>,
          visit<EightFloats, 4, 64>, finish_sums<TurnAvx>, count_zeros};
}

}  // namespace sparse_conv
}  // namespace narrowgauge
