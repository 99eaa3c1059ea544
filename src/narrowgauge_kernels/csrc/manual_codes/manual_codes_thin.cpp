// Sums of masked products where a group has few output channels, as in a depthwise convolution: a
// lane is an output channel, of whatever group, and has pixels and weights of its own.
//
// A task is some rows of output pixels by a segment of channels. For every row of x that they need,
// the codes of each output column's kernel row lie side by side in units, so that a unit of all
// lanes is one line; rows of pixels share the rows of x. Sums are modulo 2^32.
#include "manual_codes/manual_codes_job.h"

namespace narrowgauge {
namespace codes {
namespace {

constexpr std::int64_t kSegmentLanes = 64;
constexpr std::int64_t kBlockColumns = 64;
// Units of a task, more only where one row of pixels needs them: with four bytes each, 128 KiB.
constexpr std::int64_t kBlockUnits = 32768;
// Output channels of a group, at most: of more, products of matrices cost less, though most of their
// columns are idle.
constexpr std::int64_t kThinOutputs = 2;
// Of one kernel row, above which a line of all output columns is no longer small.
constexpr std::int64_t kMostRowDepth = 512;

// to[lane * (2 or 4) + k] = from[k][lane], which the compiler turns into shuffles.
inline void interleave_pairs(const std::uint8_t* const* from, std::int64_t lanes,
                             std::uint8_t* __restrict to) {
  const std::uint8_t* __restrict first = from[0];
  const std::uint8_t* __restrict second = from[1];
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    to[2 * lane] = first[lane];
    to[2 * lane + 1] = second[lane];
  }
}

inline void interleave_quads(const std::uint8_t* const* from, std::int64_t lanes,
                             std::uint8_t* __restrict to) {
  const std::uint8_t* __restrict first = from[0];
  const std::uint8_t* __restrict second = from[1];
  const std::uint8_t* __restrict third = from[2];
  const std::uint8_t* __restrict fourth = from[3];
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    to[4 * lane] = first[lane];
    to[4 * lane + 1] = second[lane];
    to[4 * lane + 2] = third[lane];
    to[4 * lane + 3] = fourth[lane];
  }
}

// The same of from[k][places[lane]].
template <int PerUnit>
void interleave_places(const std::uint8_t* const* from, const std::int32_t* places,
                       std::int64_t lanes, std::uint8_t* to) {
  const std::uint8_t* rows[PerUnit];
  std::copy(from, from + PerUnit, rows);
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    for (int k = 0; k < PerUnit; ++k) {
      to[lane * PerUnit + k] = rows[k][places[lane]];
    }
  }
}

// Where a product of a kernel row finds its code: columns of x from the pixel's first, and channels
// from the group's first.
struct Tap {
  std::int64_t column;
  std::int64_t channel;
};

// One multiplication of packed factors: a term, or the sums of a term's pixels.
struct Pass {
  const std::uint32_t* right;  // [unit][lane] of a segment's first lane
  std::uint32_t coefficient;
};

class ThinProduct {
 public:
  ThinProduct(const Job& job, const std::vector<Term>& terms, const ProductKernel& kernel)
      : job_(job),
        kernel_(kernel),
        geometry_(job.geometry),
        factors_(factors_of(job, terms)),
        threads_(threads_for(job)),
        row_depth_(geometry_.kernel_width * geometry_.group_channels()),
        row_units_(divide_up(row_depth_, kernel.per_unit)),
        units_(geometry_.kernel_height * row_units_),
        lanes_(divide_up(geometry_.out_channels, kernel.lanes) * kernel.lanes),
        width_(std::min(divide_up(kSegmentLanes, kernel.lanes) * kernel.lanes, lanes_)),
        segments_(divide_up(lanes_, width_)),
        packed_(static_cast<std::int64_t>(factors_.size()) * units_ * segments_ * width_),
        ones_(units_ * width_),
        corrections_(segments_ * width_, 0u),
        padding_(geometry_.channels, job.padding_code) {
    for (std::int64_t at = 0; at < row_units_ * kernel.per_unit; ++at) {
      // What fills up the last unit meets factors of zero.
      const std::int64_t d = std::min(at, row_depth_ - 1);
      taps_.push_back({d / geometry_.group_channels() * geometry_.dilation[1],
                       d % geometry_.group_channels()});
    }
    choose_blocks();
  }

  void run() {
    pack();
    const std::int64_t wide = divide_up(geometry_.out_width, columns_);
    const std::int64_t high = divide_up(geometry_.out_height, rows_);
    const std::int64_t tasks = geometry_.batch * high * wide * segments_;
    share(threads_, tasks, [&](std::int64_t begin, std::int64_t end) {
      Workspace space(*this);
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t x = task / segments_ % wide * columns_;
        const std::int64_t y = task / segments_ / wide % high * rows_;
        const Block block = {task / segments_ / wide / high, y,
                             std::min(rows_, geometry_.out_height - y), x,
                             std::min(columns_, geometry_.out_width - x),
                             task % segments_ * width_};
        run_block(block, space);
      }
    });
  }

 private:
  struct Block {
    std::int64_t image;
    std::int64_t y;
    std::int64_t rows;
    std::int64_t x;
    std::int64_t columns;
    std::int64_t lane;
  };

  // Rows of x that so many rows of pixels need, at most.
  std::int64_t needed_rows(std::int64_t rows) const {
    const std::int64_t span = (rows - 1) * geometry_.stride[0] +
                              (geometry_.kernel_height - 1) * geometry_.dilation[0] + 1;
    return std::min(rows * geometry_.kernel_height, span);
  }

  // Halved until a block fits the cache, then until every thread has one.
  void choose_blocks() {
    columns_ = std::min(geometry_.out_width, kBlockColumns);
    rows_ = geometry_.out_height;
    const std::int64_t line = row_units_ * columns_ * width_;
    while (rows_ > 1 && needed_rows(rows_) * line > kBlockUnits) {
      rows_ = divide_up(rows_, 2);
    }
    const std::int64_t beside =
        geometry_.batch * segments_ * divide_up(geometry_.out_width, columns_);
    while (rows_ > 1 && beside * divide_up(geometry_.out_height, rows_) < threads_) {
      rows_ = divide_up(rows_, 2);
    }
  }

  std::uint32_t* packed(std::size_t term, std::int64_t lane) {
    const std::int64_t segment = lane / width_;
    return packed_.data() +
           (static_cast<std::int64_t>(term) * segments_ + segment) * units_ * width_;
  }

  // Weights, and what the offsets of stored factors cost each lane.
  void pack() {
    std::fill_n(packed_.data(), factors_.size() * units_ * segments_ * width_, 0u);
    std::vector<std::uint32_t> line(row_units_);
    for (std::int64_t lane = 0; lane < geometry_.out_channels; ++lane) {
      const std::uint8_t* const codes = job_.weight + lane * geometry_.depth();
      for (std::size_t t = 0; t < factors_.size(); ++t) {
        const Factors& term = factors_[t];
        std::uint32_t* to = packed(t, lane) + lane % width_;
        const int offset = kernel_.left_offset(term.left);
        std::int64_t sum = geometry_.depth() * kernel_.right_offset(term.right);
        for (std::int64_t r = 0; r < geometry_.kernel_height; ++r) {
          sum += kernel_.expand_right(codes + r * row_depth_, row_depth_, term.right, line.data(),
                                      offset != 0);
          for (std::int64_t unit = 0; unit < row_units_; ++unit, to += width_) {
            *to = line[unit];
          }
        }
        corrections_[lane] -= term.coefficient * static_cast<std::uint32_t>(offset * sum);
      }
    }
    pack_ones();
  }

  void pack_ones() {
    const std::vector<std::uint8_t> codes(row_depth_, 1);
    const Factor whole = {0x7F, 0, false};
    std::vector<std::uint32_t> line(row_units_);
    kernel_.expand_right(codes.data(), row_depth_, whole, line.data(), false);
    for (std::int64_t unit = 0; unit < units_; ++unit) {
      std::fill_n(ones_.data() + unit * width_, width_, line[unit % row_units_]);
    }
  }

  struct Workspace {
    explicit Workspace(const ThinProduct& product)
        : units(product.needed_rows(product.rows_) * product.row_units_ * product.columns_ *
                product.width_),
          codes(units * product.kernel_.per_unit),
          left(units),
          tile(product.rows_ * product.columns_ * product.width_),
          offsets(product.units_),
          places(product.width_) {
      // The lanes that fill up the last vector: never stored, but multiplied.
      std::fill_n(codes.data(), units * product.kernel_.per_unit, std::uint8_t(0));
    }
    std::int64_t units;
    Scratch<std::uint8_t> codes;
    Scratch<std::uint32_t> left;
    Scratch<std::int32_t> tile;
    std::vector<std::int64_t> offsets;
    std::vector<std::int32_t> places;  // a lane's group: its first channel, from the block's first
  };

  void run_block(const Block& block, Workspace& space) {
    const std::vector<std::int64_t> rows = rows_of(block);
    const std::int64_t lanes = std::min(width_, geometry_.out_channels - block.lane);
    const std::int64_t line = row_units_ * block.columns * width_;
    const std::int64_t outputs = geometry_.group_outputs();
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      const std::int64_t group = (block.lane + lane) / outputs - block.lane / outputs;
      space.places[lane] = static_cast<std::int32_t>(group * geometry_.group_channels());
    }
    for (std::size_t row = 0; row < rows.size(); ++row) {
      gather(block, rows[row], lanes, space,
             space.codes.data() + static_cast<std::int64_t>(row) * line * kernel_.per_unit);
    }
    const std::int64_t pixels = block.rows * block.columns;
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel) {
      std::copy_n(corrections_.data() + block.lane, width_, space.tile.data() + pixel * width_);
    }
    for (std::size_t t = 0; t < factors_.size(); ++t) {
      const Factors& term = factors_[t];
      const std::int64_t count = block.columns * width_;
      for (std::int64_t at = 0; at < static_cast<std::int64_t>(rows.size()) * row_units_; ++at) {
        kernel_.expand_left(space.codes.data() + at * count * kernel_.per_unit,
                            count * kernel_.per_unit, term.left, space.left.data() + at * count,
                            false);
      }
      multiply(block, rows, {packed(t, block.lane), term.coefficient}, space);
      const int offset = kernel_.right_offset(term.right);
      if (offset != 0) {
        multiply(block, rows, {ones_.data(), term.coefficient * static_cast<std::uint32_t>(offset)},
                 space);
      }
    }
    store(block, lanes, space);
  }

  // The rows of x of a block, each once, in ascending order.
  std::vector<std::int64_t> rows_of(const Block& block) const {
    std::vector<std::int64_t> rows;
    for (std::int64_t y = block.y; y < block.y + block.rows; ++y) {
      for (std::int64_t r = 0; r < geometry_.kernel_height; ++r) {
        rows.push_back(row_of(y, r));
      }
    }
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    return rows;
  }

  std::int64_t row_of(std::int64_t y, std::int64_t r) const {
    return y * geometry_.stride[0] - geometry_.padding[0] + r * geometry_.dilation[0];
  }

  // Codes [unit][output column][lane][of the unit] of one row of x.
  void gather(const Block& block, std::int64_t row, std::int64_t lanes, const Workspace& space,
              std::uint8_t* to) const {
    const bool there = row >= 0 && row < geometry_.height;
    const std::int64_t line = (block.image * geometry_.height + row) * geometry_.width;
    const bool plain = geometry_.group_channels() == 1 && geometry_.group_outputs() == 1;
    const std::int64_t channel =
        block.lane / geometry_.group_outputs() * geometry_.group_channels();
    const std::uint8_t* from[4];
    for (std::int64_t unit = 0; unit < row_units_; ++unit) {
      for (std::int64_t x = block.x; x < block.x + block.columns; ++x) {
        const std::int64_t left = x * geometry_.stride[1] - geometry_.padding[1];
        for (int k = 0; k < kernel_.per_unit; ++k) {
          const Tap& tap = taps_[unit * kernel_.per_unit + k];
          const std::int64_t column = left + tap.column;
          const bool seen = there && column >= 0 && column < geometry_.width;
          from[k] = (seen ? job_.x + (line + column) * geometry_.channels : padding_.data()) +
                    channel + tap.channel;
        }
        if (plain && kernel_.per_unit == 2) {
          interleave_pairs(from, lanes, to);
        } else if (plain) {
          interleave_quads(from, lanes, to);
        } else if (kernel_.per_unit == 2) {
          interleave_places<2>(from, space.places.data(), lanes, to);
        } else {
          interleave_places<4>(from, space.places.data(), lanes, to);
        }
        to += width_ * kernel_.per_unit;
      }
    }
  }

  void multiply(const Block& block, const std::vector<std::int64_t>& rows, const Pass& pass,
                Workspace& space) const {
    const std::int64_t unit_size = block.columns * width_;
    for (std::int64_t y = 0; y < block.rows; ++y) {
      for (std::int64_t r = 0; r < geometry_.kernel_height; ++r) {
        const std::int64_t row =
            std::lower_bound(rows.begin(), rows.end(), row_of(block.y + y, r)) - rows.begin();
        for (std::int64_t unit = 0; unit < row_units_; ++unit) {
          space.offsets[r * row_units_ + unit] = (row * row_units_ + unit) * unit_size;
        }
      }
      kernel_.run_lanes(units_, space.left.data(), space.offsets.data(), pass.right, width_,
                        block.columns, space.tile.data() + y * unit_size,
                        static_cast<std::int32_t>(pass.coefficient));
    }
  }

  void store(const Block& block, std::int64_t lanes, const Workspace& space) const {
    const std::int32_t* from = space.tile.data();
    for (std::int64_t y = block.y; y < block.y + block.rows; ++y, from += block.columns * width_) {
      std::int32_t* const to = job_.out + block.image * job_.image_stride +
                               (y * geometry_.out_width + block.x) * job_.pixel_stride +
                               block.lane * job_.channel_stride;
      if (job_.channel_stride == 1) {
        for (std::int64_t x = 0; x < block.columns; ++x) {
          std::copy_n(from + x * width_, lanes, to + x * job_.pixel_stride);
        }
      } else {
        for (std::int64_t lane = 0; lane < lanes; ++lane) {
          for (std::int64_t x = 0; x < block.columns; ++x) {
            to[lane * job_.channel_stride + x * job_.pixel_stride] = from[x * width_ + lane];
          }
        }
      }
    }
  }

  const Job& job_;
  const ProductKernel& kernel_;
  const Geometry& geometry_;
  std::vector<Factors> factors_;
  std::int64_t threads_;
  std::int64_t row_depth_;  // products of a kernel row
  std::int64_t row_units_;
  std::int64_t units_;
  std::int64_t lanes_;
  std::int64_t width_;
  std::int64_t segments_;
  Scratch<std::uint32_t> packed_;  // [term][segment][unit][lane]
  Scratch<std::uint32_t> ones_;    // [unit][lane]: 1 at every product
  std::vector<std::uint32_t> corrections_;
  std::vector<std::uint8_t> padding_;  // a pixel of it
  std::vector<Tap> taps_;              // of a kernel row, in order of its units
  std::int64_t rows_;
  std::int64_t columns_;
};

}  // namespace

bool takes_thin_terms(const Job& job) {
  const Geometry& geometry = job.geometry;
  return geometry.groups > 1 && geometry.group_outputs() <= kThinOutputs &&
         geometry.kernel_width * geometry.group_channels() <= kMostRowDepth;
}

void run_thin_terms(const Job& job, const std::vector<Term>& terms, const ProductKernel& kernel) {
  ThinProduct(job, terms, kernel).run();
}

}  // namespace codes
}  // namespace narrowgauge
