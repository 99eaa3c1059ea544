// Any processor.
#include "manual_codes/manual_codes_expand.h"
#include "manual_codes/manual_codes_micro.h"
#include "manual_codes/manual_codes_turn.h"

namespace narrowgauge {
namespace codes {
namespace {

constexpr int kRows = 4;
constexpr int kColumns = 8;

void product(std::int64_t units, const std::uint32_t* left, std::int64_t left_stride,
             const std::uint32_t* right, std::int32_t* tile, std::int64_t tile_stride,
             std::int32_t coefficient) {
  std::uint32_t sums[kRows][kColumns] = {};
  for (std::int64_t unit = 0; unit < units; ++unit) {
    std::int16_t operand[2 * kColumns];
    std::memcpy(operand, right + unit * kColumns, sizeof(operand));
    for (int row = 0; row < kRows; ++row) {
      std::int16_t pair[2];
      std::memcpy(pair, left + row * left_stride + unit, sizeof(pair));
      for (int column = 0; column < kColumns; ++column) {
        sums[row][column] += static_cast<std::uint32_t>(pair[0] * operand[2 * column] +
                                                        pair[1] * operand[2 * column + 1]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      std::int32_t& out = tile[row * tile_stride + column];
      out = static_cast<std::int32_t>(static_cast<std::uint32_t>(out) +
                                      static_cast<std::uint32_t>(coefficient) * sums[row][column]);
    }
  }
}

// Two int16 per unit, lane by lane.
struct FourPairs {
  struct Operand {
    std::int16_t factors[8];
  };
  struct Vector {
    std::uint32_t lanes[4];
  };
  static constexpr int kLanes = 4;
  static Vector zero() { return {}; }
  static Operand load(const std::uint32_t* from) {
    Operand made;
    std::memcpy(made.factors, from, sizeof(made.factors));
    return made;
  }
  static Vector multiply_add(const Operand& left, const Operand& right, Vector sum) {
    for (int lane = 0; lane < kLanes; ++lane) {
      sum.lanes[lane] += static_cast<std::uint32_t>(
          left.factors[2 * lane] * right.factors[2 * lane] +
          left.factors[2 * lane + 1] * right.factors[2 * lane + 1]);
    }
    return sum;
  }
  static void accumulate(std::int32_t* tile, const Vector& sum, std::int32_t coefficient) {
    for (int lane = 0; lane < kLanes; ++lane) {
      tile[lane] = static_cast<std::int32_t>(static_cast<std::uint32_t>(tile[lane]) +
                                             static_cast<std::uint32_t>(coefficient) *
                                                 sum.lanes[lane]);
    }
  }
};

struct EightWords {
  struct Vector {
    std::uint16_t lanes[8];
  };
  static constexpr int kLanes = 8;
  static Vector load(const std::uint16_t* from) {
    Vector made;
    std::memcpy(made.lanes, from, sizeof(made.lanes));
    return made;
  }
  static void store(std::uint16_t* to, const Vector& value) {
    std::memcpy(to, value.lanes, sizeof(value.lanes));
  }
  static Vector add(Vector a, const Vector& b) {
    for (int lane = 0; lane < kLanes; ++lane) {
      a.lanes[lane] = static_cast<std::uint16_t>(a.lanes[lane] + b.lanes[lane]);
    }
    return a;
  }
  static Vector upper(Vector a) {
    for (int lane = 0; lane < kLanes; ++lane) {
      a.lanes[lane] = static_cast<std::uint16_t>(a.lanes[lane] >> 8);
    }
    return a;
  }
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

ProductKernel ProductKernel::generic() {
  return {kRows, kColumns, 2, &expand_words, &expand_words, &product,
          FourPairs::kLanes, &lane_products<FourPairs>, &dot_product<FourPairs>,
          &codes::turn_units, &codes::turn_codes};
}

TableKernel TableKernel::generic() { return make_table_kernel<EightWords>(); }

}  // namespace codes
}  // namespace narrowgauge
