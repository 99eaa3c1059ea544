// How a table of products lies in memory for the kernels. Device code without a toolkit header.
#pragma once

namespace narrowgauge {
namespace codes {

// The prepared table: a head, then for each weight (as a raw byte) its products with each raw byte
// of x: in pairs of 16 bits where they span less than 2^16, and as 32 bits.
struct TableHead {
  int least;
  int narrow;
};

constexpr int kTableHeadWords = 64;
constexpr int kNarrowWords = 128;  // per weight; word p has codes a and a + 128, by narrow_code
constexpr int kWideWords = 256;    // word p has code a, by wide_code
constexpr int kWideOffset = kTableHeadWords + 256 * kNarrowWords;
constexpr int kTableWords = kWideOffset + 256 * kWideWords;

// Neighbours in memory are half of the codes apart, so that threads which read two words write
// entries beside those of their neighbours.
inline __device__ int narrow_code(int position) { return position / 2 + position % 2 * 64; }
inline __device__ int wide_code(int position) { return position / 2 + position % 2 * 128; }
inline __device__ int wide_position(int code) { return code % 128 * 2 + code / 128; }

}  // namespace codes
}  // namespace narrowgauge
