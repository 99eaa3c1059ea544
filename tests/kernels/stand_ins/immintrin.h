// The AVX2, AVX-512 and AMX instructions that the kernels over codes use, lane by lane as Intel's manual
// describes them, so that the kernels' logic runs on any x86-64.
#pragma once

#include <emmintrin.h>

#include <cstdint>
#include <cstring>

template <typename T>
struct StandIn512 {
  T lanes[64 / sizeof(T)];
};

struct __m512i {
  std::uint8_t bytes[64];
};

template <typename T>
StandIn512<T> stand_in_lanes(const __m512i& value) {
  StandIn512<T> lanes;
  std::memcpy(&lanes, &value, sizeof(value));
  return lanes;
}

template <typename T>
__m512i stand_in_vector(const StandIn512<T>& lanes) {
  __m512i value;
  std::memcpy(&value, &lanes, sizeof(value));
  return value;
}

template <typename T, typename Make>
__m512i stand_in_make(const Make& make) {
  StandIn512<T> made;
  for (unsigned i = 0; i < 64 / sizeof(T); ++i) {
    made.lanes[i] = static_cast<T>(make(i));
  }
  return stand_in_vector(made);
}

struct __m256i {
  std::uint8_t bytes[32];
};

inline __m256i _mm256_loadu_si256(const __m256i* from) {
  __m256i value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline void _mm256_storeu_si256(__m256i* to, __m256i value) {
  std::memcpy(to, &value, sizeof(value));
}

inline __m256i _mm256_castsi128_si256(__m128i lower) {
  __m256i value{};
  std::memcpy(value.bytes, &lower, 16);
  return value;
}

inline __m256i _mm256_inserti128_si256(__m256i value, __m128i half, int which) {
  std::memcpy(value.bytes + 16 * which, &half, 16);
  return value;
}

// Of each half's lower or upper eight bytes: pieces of a and b in turns.
template <int Bytes, int From>
__m256i stand_in_unpack(const __m256i& a, const __m256i& b) {
  __m256i made;
  for (int half = 0; half < 32; half += 16) {
    for (int i = 0; i < 8; i += Bytes) {
      std::memcpy(made.bytes + half + 2 * i, a.bytes + half + From + i, Bytes);
      std::memcpy(made.bytes + half + 2 * i + Bytes, b.bytes + half + From + i, Bytes);
    }
  }
  return made;
}

inline __m256i _mm256_unpacklo_epi8(__m256i a, __m256i b) { return stand_in_unpack<1, 0>(a, b); }
inline __m256i _mm256_unpackhi_epi8(__m256i a, __m256i b) { return stand_in_unpack<1, 8>(a, b); }
inline __m256i _mm256_unpacklo_epi32(__m256i a, __m256i b) { return stand_in_unpack<4, 0>(a, b); }
inline __m256i _mm256_unpackhi_epi32(__m256i a, __m256i b) { return stand_in_unpack<4, 8>(a, b); }
inline __m256i _mm256_unpacklo_epi64(__m256i a, __m256i b) { return stand_in_unpack<8, 0>(a, b); }
inline __m256i _mm256_unpackhi_epi64(__m256i a, __m256i b) { return stand_in_unpack<8, 8>(a, b); }

// Two of the four halves of a and b, by number.
inline __m256i _mm256_permute2x128_si256(__m256i a, __m256i b, int which) {
  const __m256i both[2] = {a, b};
  __m256i made;
  std::memcpy(made.bytes, both[which >> 1 & 1].bytes + 16 * (which & 1), 16);
  std::memcpy(made.bytes + 16, both[which >> 5 & 1].bytes + 16 * (which >> 4 & 1), 16);
  return made;
}

inline __m512i _mm512_setzero_si512() { return __m512i{}; }

inline __m512i _mm512_loadu_si512(const void* from) {
  __m512i value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline void _mm512_storeu_si512(void* to, __m512i value) { std::memcpy(to, &value, sizeof(value)); }

inline __m512i _mm512_set1_epi32(int value) {
  return stand_in_make<std::uint32_t>([&](unsigned) { return value; });
}

inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  const auto x = stand_in_lanes<std::uint32_t>(a), y = stand_in_lanes<std::uint32_t>(b);
  return stand_in_make<std::uint32_t>([&](unsigned i) { return x.lanes[i] + y.lanes[i]; });
}

inline __m512i _mm512_mullo_epi32(__m512i a, __m512i b) {
  const auto x = stand_in_lanes<std::uint32_t>(a), y = stand_in_lanes<std::uint32_t>(b);
  return stand_in_make<std::uint32_t>([&](unsigned i) { return x.lanes[i] * y.lanes[i]; });
}

inline __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  const auto x = stand_in_lanes<std::uint16_t>(a), y = stand_in_lanes<std::uint16_t>(b);
  return stand_in_make<std::uint16_t>([&](unsigned i) { return x.lanes[i] + y.lanes[i]; });
}

inline __m512i _mm512_srli_epi16(__m512i a, unsigned count) {
  const auto x = stand_in_lanes<std::uint16_t>(a);
  return stand_in_make<std::uint16_t>([&](unsigned i) { return x.lanes[i] >> count; });
}

// Unsigned bytes of a by signed bytes of b.
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  const auto s = stand_in_lanes<std::uint32_t>(sum);
  const auto x = stand_in_lanes<std::uint8_t>(a);
  const auto y = stand_in_lanes<std::int8_t>(b);
  return stand_in_make<std::uint32_t>([&](unsigned i) {
    std::uint32_t total = s.lanes[i];
    for (unsigned j = 4 * i; j < 4 * i + 4; ++j) {
      total += static_cast<std::uint32_t>(x.lanes[j] * y.lanes[j]);
    }
    return total;
  });
}

// AMX with every tile of 16 rows of 64 bytes, which is what is configured.
struct StandInTile {
  std::uint8_t rows[16][64];
};

inline StandInTile* stand_in_tiles() {
  static StandInTile tiles[8];
  return tiles;
}

inline std::uint8_t* stand_in_configuration() {
  static std::uint8_t configuration[64];
  return configuration;
}

inline void _tile_storeconfig(void* to) { std::memcpy(to, stand_in_configuration(), 64); }

inline void _tile_release() {
  std::memset(stand_in_configuration(), 0, 64);
  std::memset(stand_in_tiles(), 0, 8 * sizeof(StandInTile));
}

inline void _tile_loadconfig(const void* from) {
  _tile_release();
  std::memcpy(stand_in_configuration(), from, 64);
}

// A tile that is not configured for what it is used as faults, as on the processor.
inline StandInTile& stand_in_tile(int tile) {
  std::uint16_t row_bytes;
  std::memcpy(&row_bytes, stand_in_configuration() + 16 + 2 * tile, sizeof(row_bytes));
  const bool whole = stand_in_configuration()[0] == 1 && row_bytes == 64 &&
                     stand_in_configuration()[48 + tile] == 16;
  if (!whole) {
    __builtin_trap();
  }
  return stand_in_tiles()[tile];
}

inline void _tile_zero(int tile) { stand_in_tile(tile) = StandInTile{}; }

inline void _tile_loadd(int tile, const void* from, long stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(stand_in_tile(tile).rows[row],
                static_cast<const std::uint8_t*>(from) + row * stride, 64);
  }
}

inline void _tile_stored(int tile, void* to, long stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(static_cast<std::uint8_t*>(to) + row * stride, stand_in_tile(tile).rows[row], 64);
  }
}

inline void _tile_dpbusd(int sum, int a, int b) {
  StandInTile& out = stand_in_tile(sum);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      std::uint32_t total;
      std::memcpy(&total, out.rows[m] + 4 * n, 4);
      for (int k = 0; k < 16; ++k) {
        for (int i = 0; i < 4; ++i) {
          const int left = stand_in_tile(a).rows[m][4 * k + i];
          const int right = static_cast<std::int8_t>(stand_in_tile(b).rows[k][4 * n + i]);
          total += static_cast<std::uint32_t>(left * right);
        }
      }
      std::memcpy(out.rows[m] + 4 * n, &total, 4);
    }
  }
}
