// Products by table where a group has few output channels, as in a depthwise convolution: one look-up
// each, in the rows of the table that a channel's weights select. Those are few and stay in the first
// cache, and so does a block of x, channel by channel with its padding.
#include "manual_codes/manual_codes_job.h"

namespace narrowgauge {
namespace codes {
namespace {

// Of x in a block, in codes; more only where one pixel's kernel spans more.
constexpr std::int64_t kBlockCodes = 32768;
constexpr std::int64_t kMostCodes = 8 * kBlockCodes;
constexpr std::int64_t kBlockColumns = 256;
constexpr std::int64_t kBlockChannels = 64;  // of x
// Pixels summed at a time, so that no look-up waits for the one before.
constexpr int kPixels = 8;

class ThinLookup {
 public:
  ThinLookup(const Job& job, const std::int32_t* table)
      : job_(job),
        geometry_(job.geometry),
        threads_(threads_for(job)),
        depth_(job.geometry.depth()),
        by_weight_(256 * 256) {
    // A few lines at a time, so that those of both sides stay in the cache.
    for (int first = 0; first < 256; first += 16) {
      for (int x = 0; x < 256; ++x) {
        for (int weight = first; weight < first + 16; ++weight) {
          by_weight_[weight * 256 + x] = table[table_place(job, x, weight)];
        }
      }
    }
    choose_blocks();
  }

  void run() const {
    const std::int64_t wide = divide_up(geometry_.out_width, columns_);
    const std::int64_t high = divide_up(geometry_.out_height, rows_);
    const std::int64_t deep = divide_up(geometry_.groups, groups_);
    share(threads_, geometry_.batch * high * wide * deep,
          [&](std::int64_t begin, std::int64_t end) {
            Workspace space(*this);
            for (std::int64_t task = begin; task < end; ++task) {
              const std::int64_t group = task % deep * groups_;
              const std::int64_t x = task / deep % wide * columns_;
              const std::int64_t y = task / deep / wide % high * rows_;
              run_block({task / deep / wide / high, group,
                         std::min(groups_, geometry_.groups - group), y,
                         std::min(rows_, geometry_.out_height - y), x,
                         std::min(columns_, geometry_.out_width - x)},
                        space);
            }
          });
  }

 private:
  struct Block {
    std::int64_t image;
    std::int64_t group;
    std::int64_t groups;
    std::int64_t y;
    std::int64_t rows;
    std::int64_t x;
    std::int64_t columns;
  };

  // What so many pixels along an axis span of x.
  std::int64_t span(int axis, std::int64_t pixels) const {
    const std::int64_t kernel = axis == 0 ? geometry_.kernel_height : geometry_.kernel_width;
    return (pixels - 1) * geometry_.stride[axis] + (kernel - 1) * geometry_.dilation[axis] + 1;
  }

  std::int64_t plane_size() const { return span(0, rows_) * span(1, columns_); }

  // Halved until a block fits the cache, then until every thread has one.
  void choose_blocks() {
    groups_ = std::min(geometry_.groups,
                       divide_up(kBlockChannels, geometry_.group_channels()));
    rows_ = geometry_.out_height;
    columns_ = std::min(geometry_.out_width, kBlockColumns);
    while (rows_ * columns_ * groups_ > 1 &&
           groups_ * geometry_.group_channels() * plane_size() > kBlockCodes) {
      std::int64_t& halved = rows_ > 4 ? rows_ : groups_ > 1 ? groups_ : rows_ > 1 ? rows_ : columns_;
      halved = divide_up(halved, 2);
    }
    const auto tasks = [&] {
      return geometry_.batch * divide_up(geometry_.out_height, rows_) *
             divide_up(geometry_.out_width, columns_) * divide_up(geometry_.groups, groups_);
    };
    while (rows_ > 1 && tasks() < threads_) {
      rows_ = divide_up(rows_, 2);
    }
  }

  struct Workspace {
    explicit Workspace(const ThinLookup& lookup)
        : codes(lookup.groups_ * lookup.geometry_.group_channels() * lookup.plane_size()),
          columns(lookup.depth_),
          offsets(lookup.depth_),
          sums(lookup.columns_ + kPixels) {}
    std::vector<std::uint8_t> codes;            // [channel][row of x][column of x]
    std::vector<const std::int32_t*> columns;   // of the table, by each weight of a channel
    std::vector<std::int64_t> offsets;          // of the codes that these meet, from a pixel's first
    std::vector<std::uint32_t> sums;            // of a row of pixels
  };

  void run_block(const Block& block, Workspace& space) const {
    gather(block, space);
    const std::int64_t wide = span(1, columns_);
    const std::int64_t channels = geometry_.group_channels();
    for (std::int64_t d = 0; d < depth_; ++d) {
      const std::int64_t element = d / channels;
      space.offsets[d] = d % channels * plane_size() +
                         element / geometry_.kernel_width * geometry_.dilation[0] * wide +
                         element % geometry_.kernel_width * geometry_.dilation[1];
    }
    const std::int64_t outputs = geometry_.group_outputs();
    for (std::int64_t index = 0; index < block.groups * outputs; ++index) {
      const std::int64_t output = block.group * outputs + index;
      for (std::int64_t d = 0; d < depth_; ++d) {
        space.columns[d] = by_weight_.data() + job_.weight[output * depth_ + d] * 256;
      }
      const std::uint8_t* const codes =
          space.codes.data() + index / outputs * channels * plane_size();
      for (std::int64_t y = 0; y < block.rows; ++y) {
        add_row(block.columns, codes + y * geometry_.stride[0] * wide, space);
        std::int32_t* const to =
            job_.out + block.image * job_.image_stride + output * job_.channel_stride +
            ((block.y + y) * geometry_.out_width + block.x) * job_.pixel_stride;
        for (std::int64_t x = 0; x < block.columns; ++x) {
          to[x * job_.pixel_stride] = static_cast<std::int32_t>(space.sums[x]);
        }
      }
    }
  }

  // A block of x, turned from channels last to channels first.
  void gather(const Block& block, Workspace& space) const {
    const std::int64_t channels = block.groups * geometry_.group_channels();
    const std::int64_t wide = span(1, columns_);
    const std::int64_t plane = plane_size();
    const std::int64_t top = block.y * geometry_.stride[0] - geometry_.padding[0];
    const std::int64_t left = block.x * geometry_.stride[1] - geometry_.padding[1];
    for (std::int64_t row = 0; row < span(0, block.rows); ++row) {
      const std::int64_t y = top + row;
      for (std::int64_t column = 0; column < span(1, block.columns); ++column) {
        const std::int64_t x = left + column;
        std::uint8_t* const to = space.codes.data() + row * wide + column;
        if (y >= 0 && y < geometry_.height && x >= 0 && x < geometry_.width) {
          const std::uint8_t* const from =
              job_.x + ((block.image * geometry_.height + y) * geometry_.width + x) *
                           geometry_.channels +
              block.group * geometry_.group_channels();
          for (std::int64_t channel = 0; channel < channels; ++channel) {
            to[channel * plane] = from[channel];
          }
        } else {
          for (std::int64_t channel = 0; channel < channels; ++channel) {
            to[channel * plane] = job_.padding_code;
          }
        }
      }
    }
  }

  void add_row(std::int64_t count, const std::uint8_t* codes, Workspace& space) const {
    const std::int64_t step = geometry_.stride[1];
    std::int64_t x = 0;
    for (; x + kPixels <= count; x += kPixels) {
      if (step == 1) {
        add_pixels<kPixels, 1>(codes + x, step, space, x);
      } else {
        add_pixels<kPixels, 0>(codes + x * step, step, space, x);
      }
    }
    for (; x < count; ++x) {
      add_pixels<1, 0>(codes + x * step, step, space, x);
    }
  }

  // Pixels `Step` codes apart, or where that is 0 `step`.
  template <int Pixels, int Step>
  void add_pixels(const std::uint8_t* codes, std::int64_t step, Workspace& space,
                  std::int64_t x) const {
    const std::int64_t pitch = Step == 0 ? step : Step;
    const std::int32_t* const* const columns = space.columns.data();
    const std::int64_t* const offsets = space.offsets.data();
    std::uint32_t sums[Pixels] = {};
    for (std::int64_t d = 0; d < depth_; ++d) {
      const std::int32_t* const column = columns[d];
      const std::uint8_t* const from = codes + offsets[d];
#pragma GCC unroll 8
      for (int pixel = 0; pixel < Pixels; ++pixel) {
        sums[pixel] += static_cast<std::uint32_t>(column[from[pixel * pitch]]);
      }
    }
#pragma GCC unroll 8
    for (int pixel = 0; pixel < Pixels; ++pixel) {
      space.sums[x + pixel] = sums[pixel];
    }
  }

  const Job& job_;
  const Geometry& geometry_;
  std::int64_t threads_;
  std::int64_t depth_;
  std::vector<std::int32_t> by_weight_;
  std::int64_t groups_;
  std::int64_t rows_;
  std::int64_t columns_;
};

}  // namespace

// What one pixel spans of x must fit a block. In double: dilations reach 2^31.
bool takes_thin_table(const Job& job) {
  const Geometry& geometry = job.geometry;
  double codes = static_cast<double>(geometry.group_channels());
  codes *= static_cast<double>((geometry.kernel_height - 1) * geometry.dilation[0] + 1);
  codes *= static_cast<double>((geometry.kernel_width - 1) * geometry.dilation[1] + 1);
  return codes <= static_cast<double>(kMostCodes);
}

void run_thin_table(const Job& job, const std::int32_t* table) { ThinLookup(job, table).run(); }

}  // namespace codes
}  // namespace narrowgauge
