// Products by table: what an instruction set provides. No torch header.
//
// For one step of depth and `lanes` output channels, the rows of the table that their weights
// select are laid side by side: entry a of the result holds the products of code a with all of them,
// and each pixel adds one such entry by one load. A pixel and a channel may change places.
// Products are uint16 (the table less its least value, in one plane or in two of 16 bits each) and
// are summed modulo 2^16, beside sums of their upper bytes: after 256 of them both are still exact,
// as sum of lower bytes = sum - 256 * sum of upper bytes, modulo 2^16.
#pragma once

#include <cstdint>

namespace narrowgauge {
namespace codes {

constexpr int kTableStep = 4;        // depth per call of `sweep`
constexpr int kTableDepth = 256;     // depth per call of `flush`, at most
constexpr int kTableEntries = 256;

struct TableKernel {
  int lanes;
  // to[a * lanes + lane] = plane[codes[lane * stride] * 256 + a]
  void (*expand)(const std::uint16_t* plane, const std::uint8_t* codes, std::int64_t stride,
                 std::uint16_t* to);
  // For each of `count` rows of kTableStep indices: adds the entries of kTableStep expanded tables
  // to sums[row * 2 * lanes], and their upper bytes to the `lanes` behind.
  void (*sweep)(std::int64_t count, const std::uint8_t* indices, const std::uint16_t* expanded,
                std::uint16_t* sums);
  // wide[row * lanes + lane] += sum << shift; sums become 0.
  void (*flush)(std::int64_t count, std::uint16_t* sums, int shift, std::int32_t* wide);

  static TableKernel generic();
  static TableKernel avx2();
  static TableKernel avx512bw();
  static TableKernel neon();
};

}  // namespace codes
}  // namespace narrowgauge
