// The NEON instructions that the kernels over codes use, lane by lane as Arm's manual describes
// them, so that the kernels' logic runs on any little-endian processor.
#pragma once

#include <cstdint>
#include <cstring>

template <typename T, int Lanes>
struct StandInNeon {
  T lanes[Lanes];
};

using int16x4_t = StandInNeon<std::int16_t, 4>;
using int16x8_t = StandInNeon<std::int16_t, 8>;
using uint16x8_t = StandInNeon<std::uint16_t, 8>;
using int32x4_t = StandInNeon<std::int32_t, 4>;
using uint32x4_t = StandInNeon<std::uint32_t, 4>;

template <typename To, typename From>
To stand_in_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a register is reinterpreted whole");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename Vector, typename Make>
Vector stand_in_make(const Make& make) {
  Vector made;
  for (unsigned i = 0; i < sizeof(made.lanes) / sizeof(made.lanes[0]); ++i) {
    made.lanes[i] = make(i);
  }
  return made;
}

inline int32x4_t vdupq_n_s32(std::int32_t value) {
  return stand_in_make<int32x4_t>([&](unsigned) { return value; });
}

inline uint32x4_t vdupq_n_u32(std::uint32_t value) {
  return stand_in_make<uint32x4_t>([&](unsigned) { return value; });
}

inline uint32x4_t vld1q_u32(const std::uint32_t* from) {
  return stand_in_make<uint32x4_t>([&](unsigned i) { return from[i]; });
}

inline int32x4_t vld1q_s32(const std::int32_t* from) {
  return stand_in_make<int32x4_t>([&](unsigned i) { return from[i]; });
}

inline uint16x8_t vld1q_u16(const std::uint16_t* from) {
  return stand_in_make<uint16x8_t>([&](unsigned i) { return from[i]; });
}

inline void vst1q_s32(std::int32_t* to, int32x4_t value) { std::memcpy(to, &value, 16); }

inline void vst1q_u16(std::uint16_t* to, uint16x8_t value) { std::memcpy(to, &value, 16); }

inline int16x8_t vreinterpretq_s16_u32(uint32x4_t value) { return stand_in_cast<int16x8_t>(value); }

inline int16x4_t vget_low_s16(int16x8_t value) {
  return stand_in_make<int16x4_t>([&](unsigned i) { return value.lanes[i]; });
}

inline int16x4_t vget_high_s16(int16x8_t value) {
  return stand_in_make<int16x4_t>([&](unsigned i) { return value.lanes[4 + i]; });
}

inline int32x4_t vmlal_s16(int32x4_t sum, int16x4_t a, int16x4_t b) {
  return stand_in_make<int32x4_t>([&](unsigned i) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(sum.lanes[i]) +
                                     static_cast<std::uint32_t>(a.lanes[i] * b.lanes[i]));
  });
}

inline int32x4_t vpaddq_s32(int32x4_t a, int32x4_t b) {
  return stand_in_make<int32x4_t>([&](unsigned i) {
    const int32x4_t& from = i < 2 ? a : b;
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(from.lanes[2 * (i % 2)]) +
                                     static_cast<std::uint32_t>(from.lanes[2 * (i % 2) + 1]));
  });
}

inline int32x4_t vmlaq_n_s32(int32x4_t sum, int32x4_t a, std::int32_t factor) {
  return stand_in_make<int32x4_t>([&](unsigned i) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(sum.lanes[i]) +
                                     static_cast<std::uint32_t>(a.lanes[i]) *
                                         static_cast<std::uint32_t>(factor));
  });
}

inline uint16x8_t vaddq_u16(uint16x8_t a, uint16x8_t b) {
  return stand_in_make<uint16x8_t>(
      [&](unsigned i) { return static_cast<std::uint16_t>(a.lanes[i] + b.lanes[i]); });
}

inline uint16x8_t vshrq_n_u16(uint16x8_t a, int count) {
  return stand_in_make<uint16x8_t>(
      [&](unsigned i) { return static_cast<std::uint16_t>(a.lanes[i] >> count); });
}
