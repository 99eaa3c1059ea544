// Products by table: which side is laid side by side, blocking and threads around an instruction
// set's kernel. Where there is too little of either side to lay anything out, manual_codes_thin_table
// and manual_codes_few look up product by product.
#include <limits>

#include "manual_codes/manual_codes_job.h"
#include "manual_codes/manual_codes_store.h"
#include "manual_codes/manual_codes_turn.h"

namespace narrowgauge {
namespace codes {
namespace {

// Laying out costs as much as about a hundred rows of look-ups, and idle lanes cost their share.
constexpr std::int64_t kLeastRows = 192;
constexpr std::int64_t kLeastLanes = 3;
constexpr std::int64_t kBlockRows = 2048;
constexpr std::int64_t kLeastBlockRows = 512;
// Lanes of a task: with kBlockRows sums of four bytes each, 1 MB.
constexpr std::int64_t kSegmentLanes = 128;

// The table by raw bytes, first the code that selects a row; `least` makes every entry of `planes`
// not negative: product = least + planes[0] + 65536 * planes[1].
struct Planes {
  std::vector<std::vector<std::uint16_t>> planes;
  std::int32_t least;
};

Planes planes_of(const Job& job, const std::int32_t* table, bool weights_select) {
  const std::int32_t least = *std::min_element(table, table + 256 * 256);
  const std::int32_t most = *std::max_element(table, table + 256 * 256);
  const std::int64_t range = static_cast<std::int64_t>(most) - least;
  Planes made{{}, least};
  for (int shift = 0; shift == 0 || range >> shift != 0; shift += 16) {
    made.planes.emplace_back(256 * 256);
    for (int select = 0; select < 256; ++select) {
      for (int entry = 0; entry < 256; ++entry) {
        const std::int64_t at =
            weights_select ? table_place(job, entry, select) : table_place(job, select, entry);
        const std::int64_t value = static_cast<std::int64_t>(table[at]) - least;
        made.planes.back()[select * 256 + entry] = static_cast<std::uint16_t>(value >> shift);
      }
    }
  }
  return made;
}

// Rows look up, lanes are laid side by side: pixels and channels, or the reverse.
class Lookup {
 public:
  Lookup(const Job& job, const std::int32_t* table, const TableKernel& kernel, bool pixels_are_rows)
      : job_(job),
        kernel_(kernel),
        pixels_are_rows_(pixels_are_rows),
        planes_(planes_of(job, table, pixels_are_rows)),
        depth_(job.geometry.depth()),
        threads_(threads_for(job)) {
    const std::int64_t pixels = job.geometry.pixels();
    const std::int64_t outputs = job.geometry.group_outputs();
    rows_ = pixels_are_rows ? pixels : outputs;
    lanes_ = pixels_are_rows ? outputs : pixels;
  }

  void run() const {
    const std::int64_t segment = divide_up(kSegmentLanes, kernel_.lanes) * kernel_.lanes;
    const std::int64_t segments = divide_up(lanes_, segment);
    std::int64_t height = std::min(kBlockRows, rows_);
    while (height > kLeastBlockRows &&
           job_.geometry.groups * segments * divide_up(rows_, height) < threads_) {
      height = divide_up(height, 2);
    }
    const std::int64_t blocks = divide_up(rows_, height);
    const std::int64_t tasks = job_.geometry.groups * segments * blocks;
    share(threads_, tasks, [&](std::int64_t begin, std::int64_t end) {
      Workspace space(height, std::min(segment, divide_up(lanes_, kernel_.lanes) * kernel_.lanes),
                      kernel_.lanes);
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t row = task % blocks * height;
        const std::int64_t lane = task / blocks % segments * segment;
        run_block(task / blocks / segments, row, std::min(height, rows_ - row), lane,
                  std::min(segment, lanes_ - lane), space);
      }
    });
  }

 private:
  struct Workspace {
    Workspace(std::int64_t rows, std::int64_t lanes, std::int64_t width)
        : row_codes(rows * kTableDepth),
          indices(rows * kTableDepth),
          lane_codes(lanes * kTableDepth),
          expanded(kTableStep * kTableEntries * width),
          sums(rows * 2 * width),
          wide(rows * lanes) {}
    Scratch<std::uint8_t> row_codes;
    Scratch<std::uint8_t> indices;
    Scratch<std::uint8_t> lane_codes;
    Scratch<std::uint16_t> expanded;
    Scratch<std::uint16_t> sums;
    Scratch<std::int32_t> wide;
  };

  void run_block(std::int64_t group, std::int64_t row, std::int64_t rows, std::int64_t lane,
                 std::int64_t lanes, Workspace& space) const {
    const PixelRows pixels = job_.pixels(group);
    const WeightRows weights = job_.weights(group);
    const Rows& row_side = pixels_are_rows_ ? static_cast<const Rows&>(pixels) : weights;
    const Rows& lane_side = pixels_are_rows_ ? static_cast<const Rows&>(weights) : pixels;
    const std::int64_t width = kernel_.lanes;
    std::fill_n(space.wide.data(), rows * divide_up(lanes, width) * width, 0);
    std::fill_n(space.sums.data(), rows * 2 * width, std::uint16_t(0));
    for (std::int64_t d = 0; d < depth_; d += kTableDepth) {
      const std::int64_t steps = std::min<std::int64_t>(kTableDepth, depth_ - d);
      row_side.gather(row, rows, d, steps, space.row_codes.data(), kTableDepth);
      interleave(rows, steps, space);
      lane_side.gather(lane, lanes, d, steps, space.lane_codes.data(), kTableDepth);
      // The lanes that fill up the last vector: never stored, but looked up.
      const std::int64_t surplus = divide_up(lanes, width) * width - lanes;
      std::fill_n(space.lane_codes.data() + lanes * kTableDepth, surplus * kTableDepth,
                  std::uint8_t(0));
      for (std::int64_t first = 0; first < lanes; first += width) {
        add_products(first, rows, steps, space);
      }
    }
    store(job_.output(group), row, rows, lane, lanes, space);
  }

  // [row][d] to [d / 4][row][d % 4], so that a sweep reads its indices in order.
  void interleave(std::int64_t rows, std::int64_t steps, Workspace& space) const {
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::uint8_t* from = space.row_codes.data() + row * kTableDepth;
      std::uint8_t* to = space.indices.data() + row * kTableStep;
      for (std::int64_t d = 0; d < steps; d += kTableStep, to += rows * kTableStep) {
        std::memcpy(to, from + d, kTableStep);
      }
    }
  }

  // One vector of lanes, one block of depth, every plane.
  void add_products(std::int64_t first, std::int64_t rows, std::int64_t steps,
                    Workspace& space) const {
    const std::int64_t entry = kTableEntries * kernel_.lanes;
    int shift = 0;
    for (const std::vector<std::uint16_t>& plane : planes_.planes) {
      for (std::int64_t d = 0; d < steps; d += kTableStep) {
        for (int step = 0; step < kTableStep; ++step) {
          std::uint16_t* to = space.expanded.data() + step * entry;
          if (d + step < steps) {
            kernel_.expand(plane.data(), space.lane_codes.data() + first * kTableDepth + d + step,
                           kTableDepth, to);
          } else {
            std::fill_n(to, entry, std::uint16_t(0));
          }
        }
        kernel_.sweep(rows, space.indices.data() + d * rows, space.expanded.data(),
                      space.sums.data());
      }
      kernel_.flush(rows, space.sums.data(), shift, space.wide.data() + first * rows);
      shift += 16;
    }
  }

  void store(const Output& out, std::int64_t row, std::int64_t rows, std::int64_t lane,
             std::int64_t lanes, Workspace& space) const {
    const std::uint32_t least =
        static_cast<std::uint32_t>(planes_.least) * static_cast<std::uint32_t>(depth_);
    const std::int64_t width = kernel_.lanes;
    for (std::int64_t first = 0; first < lanes; first += width) {
      std::uint32_t* const sums =
          reinterpret_cast<std::uint32_t*>(space.wide.data()) + first * rows;
      for (std::int64_t i = 0; i < rows * width; ++i) {
        sums[i] += least;
      }
      const std::int64_t filled = std::min(width, lanes - first);
      if (pixels_are_rows_) {
        store_pixels(out, row, rows, lane + first, filled, sums, width, &turn_units);
      } else {
        store_channels(out, lane + first, filled, row, rows, sums, width);
      }
    }
  }

  const Job& job_;
  const TableKernel& kernel_;
  bool pixels_are_rows_;
  Planes planes_;
  std::int64_t depth_;
  std::int64_t threads_;
  std::int64_t rows_;
  std::int64_t lanes_;
};

}  // namespace

void run_table(const Job& job, const std::int32_t* table, const TableKernel& kernel) {
  const std::int64_t pixels = job.geometry.pixels();
  const std::int64_t outputs = job.geometry.group_outputs();
  const bool pixels_are_rows = pixels >= outputs;
  if (outputs < kLeastLanes && takes_thin_table(job)) {
    run_thin_table(job, table);
  } else if (std::max(pixels, outputs) < kLeastRows || std::min(pixels, outputs) < kLeastLanes) {
    run_few_table(job, table);
  } else {
    Lookup(job, table, kernel, pixels_are_rows).run();
  }
}

}  // namespace codes
}  // namespace narrowgauge
