// Sums of masked products: packing, blocking and threads around an instruction set's kernel.
//
// Weights are packed once, all terms of them, in chunks that fit kPackedBytes; a task is a block of
// output pixels by a segment of output channels, whose codes are gathered once per block of depth
// and masked once per term. Sums are modulo 2^32, so intermediate terms may exceed what the whole
// sum may not.
#include "manual_codes/manual_codes_job.h"
#include "manual_codes/manual_codes_store.h"

namespace narrowgauge {
namespace codes {
namespace {

constexpr std::int64_t kBlockRows = 96;  // a multiple of every kernel's rows
constexpr std::int64_t kBlockDepth = 512;
constexpr std::int64_t kSegmentColumns = 512;
// Of a row of sums: without it a channel's would all lie in a few sets of the cache.
constexpr std::int64_t kTilePad = 16;
// Units of a column while it is packed; not a power of two, which would share few cache sets.
constexpr std::int64_t kLine = kBlockDepth / 2 + 16;
constexpr std::int64_t kPackedBytes = std::int64_t(32) << 20;

// Output channels of one group, whole panels of the kernel but for the group's last.
struct Segment {
  std::int64_t group;
  std::int64_t first;
  std::int64_t count;
  std::int64_t packed;  // where its panels start, in units
};

// The thread as the kernel wants it, for as long as this lives.
class Ready {
 public:
  explicit Ready(const ProductKernel& kernel) : kernel_(kernel) {
    if (kernel_.begin != nullptr) {
      kernel_.begin(&state_);
    }
  }
  ~Ready() {
    if (kernel_.end != nullptr) {
      kernel_.end(&state_);
    }
  }
  Ready(const Ready&) = delete;
  Ready& operator=(const Ready&) = delete;

 private:
  const ProductKernel& kernel_;
  KernelState state_{};
};

class Product {
 public:
  Product(const Job& job, const std::vector<Term>& terms, const ProductKernel& kernel)
      : job_(job),
        kernel_(kernel),
        factors_(factors_of(job, terms)),
        depth_(job.geometry.depth()),
        threads_(threads_for(job)) {
    // Units of a row, all blocks and terms; only the last block may need filling up.
    units_ = divide_up(depth_, kernel_.per_unit) * static_cast<std::int64_t>(factors_.size());
  }

  void run() {
    const std::vector<Segment> segments = make_segments();
    const std::int64_t most = std::max<std::int64_t>(1, kPackedBytes / (4 * units_));
    for (std::size_t begin = 0; begin < segments.size();) {
      std::size_t end = begin;
      std::int64_t columns = 0;
      while (end < segments.size() && (end == begin || columns + padded(segments[end]) <= most)) {
        columns += padded(segments[end++]);
      }
      std::vector<Segment> chunk(segments.begin() + begin, segments.begin() + end);
      run_chunk(chunk, columns);
      begin = end;
    }
  }

 private:
  std::int64_t padded(const Segment& segment) const {
    return divide_up(segment.count, kernel_.columns) * kernel_.columns;
  }

  std::vector<Segment> make_segments() const {
    const std::int64_t outputs = job_.geometry.group_outputs();
    const std::int64_t blocks = divide_up(job_.geometry.pixels(), kBlockRows);
    std::int64_t width = std::min(kSegmentColumns, std::max<std::int64_t>(
                                                       1, kPackedBytes / (4 * units_)));
    // Where pixels are few, threads share the channels.
    const std::int64_t wanted = divide_up(2 * threads_, blocks * job_.geometry.groups);
    width = std::min(width, divide_up(outputs, wanted));
    width = divide_up(width, kernel_.columns) * kernel_.columns;
    std::vector<Segment> segments;
    for (std::int64_t group = 0; group < job_.geometry.groups; ++group) {
      for (std::int64_t first = 0; first < outputs; first += width) {
        segments.push_back({group, first, std::min(width, outputs - first), 0});
      }
    }
    return segments;
  }

  void run_chunk(std::vector<Segment>& segments, std::int64_t columns) {
    Scratch<std::uint32_t> packed(columns * units_);
    Scratch<std::uint32_t> corrections(columns);
    std::int64_t start = 0;
    for (Segment& segment : segments) {
      segment.packed = start;
      start += padded(segment);
    }
    const std::int64_t count = static_cast<std::int64_t>(segments.size());
    share(threads_, count, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t index = begin; index < end; ++index) {
        const Segment& segment = segments[index];
        pack(segment, packed.data() + segment.packed * units_,
             corrections.data() + segment.packed);
      }
    });
    const std::int64_t blocks = divide_up(job_.geometry.pixels(), kBlockRows);
    share(threads_, blocks * count, [&](std::int64_t begin, std::int64_t end) {
      const Ready ready(kernel_);
      Workspace space(*this);
      for (std::int64_t index = begin; index < end; ++index) {
        const Segment& segment = segments[index / blocks];
        run_block(segment, index % blocks * kBlockRows, packed.data() + segment.packed * units_,
                  corrections.data() + segment.packed, space);
      }
    });
  }

  // Panels of kernel_.columns channels; in each, blocks of depth, in each, terms:
  // units [unit][column]. A column's correction is what the offsets of stored factors cost it.
  void pack(const Segment& segment, std::uint32_t* to, std::uint32_t* corrections) const {
    const WeightRows weights = job_.weights(segment.group);
    const bool turn = job_.planar && job_.geometry.group_channels() != depth_;
    Scratch<std::uint8_t> turned(turn ? kernel_.columns * depth_ : 0);
    std::vector<const std::uint8_t*> rows(kernel_.columns);
    std::vector<std::uint32_t> lines(kernel_.columns * kLine);
    std::fill(corrections, corrections + padded(segment), 0u);
    for (std::int64_t panel = 0; panel < segment.count; panel += kernel_.columns) {
      const std::int64_t there = std::min<std::int64_t>(kernel_.columns, segment.count - panel);
      for (std::int64_t column = 0; column < there; ++column) {
        rows[column] = weights.row(segment.first + panel + column);
        if (turn) {
          rows[column] = turn_row(rows[column], turned.data() + column * depth_);
        }
      }
      for (std::int64_t d = 0; d < depth_; d += kBlockDepth) {
        const std::int64_t steps = std::min(kBlockDepth, depth_ - d);
        const std::int64_t units = divide_up(steps, kernel_.per_unit);
        for (const Factors& term : factors_) {
          const int offset = kernel_.left_offset(term.left);
          for (std::int64_t column = 0; column < there; ++column) {
            const std::int64_t sum =
                kernel_.expand_right(rows[column] + d, steps, term.right,
                                     lines.data() + column * kLine, offset != 0);
            const std::int64_t whole = sum + steps * kernel_.right_offset(term.right);
            corrections[panel + column] -=
                term.coefficient * static_cast<std::uint32_t>(offset * whole);
          }
          for (std::int64_t column = there; column < kernel_.columns; ++column) {
            std::fill_n(lines.data() + column * kLine, units, 0u);
          }
          kernel_.turn_units(lines.data(), kLine, kernel_.columns, units, to, kernel_.columns);
          to += units * kernel_.columns;
        }
      }
    }
  }

  // A planar channel's weights in order of depth.
  const std::uint8_t* turn_row(const std::uint8_t* from, std::uint8_t* to) const {
    const std::int64_t channels = job_.geometry.group_channels();
    kernel_.turn_codes(from, channels, depth_ / channels, 0, channels, to);
    return to;
  }

  struct Workspace {
    explicit Workspace(const Product& product)
        : codes(kBlockRows * kBlockDepth),
          left(kBlockRows * divide_up(kBlockDepth, product.kernel_.per_unit)),
          tile(kBlockRows * tile_stride(kSegmentColumns)),
          corrections(kBlockRows),
          rows(kBlockRows) {}
    Scratch<std::uint8_t> codes;
    Scratch<std::uint32_t> left;
    Scratch<std::int32_t> tile;
    std::vector<std::uint32_t> corrections;
    std::vector<const std::uint8_t*> rows;  // where a pixel's codes are
  };

  void run_block(const Segment& segment, std::int64_t row, const std::uint32_t* packed,
                 const std::uint32_t* column_corrections, Workspace& space) const {
    const PixelRows pixels = job_.pixels(segment.group);
    const std::int64_t rows = std::min(kBlockRows, pixels.count() - row);
    const std::int64_t columns = padded(segment);
    // Sums begin with what the offsets cost their column, or a row at the end.
    for (std::int64_t r = 0; r < divide_up(rows, kernel_.rows) * kernel_.rows; ++r) {
      std::copy_n(column_corrections, columns,
                  reinterpret_cast<std::uint32_t*>(space.tile.data() + r * tile_stride(columns)));
    }
    std::fill(space.corrections.begin(), space.corrections.end(), 0u);
    for (std::int64_t d = 0; d < depth_; d += kBlockDepth) {
      const std::int64_t steps = std::min(kBlockDepth, depth_ - d);
      const std::int64_t units = divide_up(steps, kernel_.per_unit);
      find_rows(pixels, row, rows, d, steps, space);
      for (const Factors& term : factors_) {
        expand_rows(term, rows, steps, units, space);
        multiply(rows, columns, units, packed, term.coefficient, space);
        packed += units * kernel_.columns;
      }
    }
    store(segment, row, rows, columns, space);
  }

  // The codes of a block of depth: where they are, or gathered.
  static void find_rows(const PixelRows& pixels, std::int64_t row, std::int64_t rows,
                        std::int64_t d, std::int64_t steps, Workspace& space) {
    if (pixels.lie_whole()) {
      pixels.find(row, rows, space.rows.data());
      for (std::int64_t r = 0; r < rows; ++r) {
        space.rows[r] += d;
      }
      return;
    }
    pixels.gather(row, rows, d, steps, space.codes.data(), steps);
    for (std::int64_t r = 0; r < rows; ++r) {
      space.rows[r] = space.codes.data() + r * steps;
    }
  }

  void expand_rows(const Factors& term, std::int64_t rows, std::int64_t steps, std::int64_t units,
                   Workspace& space) const {
    const std::uint32_t scale =
        term.coefficient * static_cast<std::uint32_t>(kernel_.right_offset(term.right));
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t sum =
          kernel_.expand_left(space.rows[r], steps, term.left, space.left.data() + r * units,
                              scale != 0);
      space.corrections[r] += scale * static_cast<std::uint32_t>(sum);
    }
    // The rows that fill up the last register tile: never stored, but read.
    const std::int64_t surplus = divide_up(rows, kernel_.rows) * kernel_.rows - rows;
    std::fill_n(space.left.data() + rows * units, surplus * units, 0u);
  }

  void multiply(std::int64_t rows, std::int64_t columns, std::int64_t units,
                const std::uint32_t* packed, std::uint32_t coefficient, Workspace& space) const {
    for (std::int64_t c = 0; c < columns; c += kernel_.columns) {
      for (std::int64_t r = 0; r < rows; r += kernel_.rows) {
        kernel_.run(units, space.left.data() + r * units, units, packed + c * units_,
                    space.tile.data() + r * tile_stride(columns) + c, tile_stride(columns),
                    static_cast<std::int32_t>(coefficient));
      }
    }
  }

  void store(const Segment& segment, std::int64_t row, std::int64_t rows, std::int64_t columns,
             Workspace& space) const {
    std::uint32_t* const sums = reinterpret_cast<std::uint32_t*>(space.tile.data());
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::uint32_t correction = space.corrections[r];
      if (correction == 0) {
        continue;
      }
      std::uint32_t* const line = sums + r * tile_stride(columns);
      for (std::int64_t c = 0; c < segment.count; ++c) {
        line[c] += correction;
      }
    }
    store_pixels(job_.output(segment.group), row, rows, segment.first, segment.count, sums,
                 tile_stride(columns), kernel_.turn_units);
  }

  static std::int64_t tile_stride(std::int64_t columns) { return columns + kTilePad; }

  const Job& job_;
  const ProductKernel& kernel_;
  std::vector<Factors> factors_;
  std::int64_t depth_;
  std::int64_t threads_;
  std::int64_t units_;
};

}  // namespace

bool takes_planar_terms(const Job& job) {
  return !takes_few_terms(job) && !takes_thin_terms(job);
}

void run_terms(const Job& job, const std::vector<Term>& terms, const ProductKernel& kernel) {
  if (takes_few_terms(job)) {
    run_few_terms(job, terms, kernel);
  } else if (takes_thin_terms(job)) {
    run_thin_terms(job, terms, kernel);
  } else {
    Product(job, terms, kernel).run();
  }
}

}  // namespace codes
}  // namespace narrowgauge
