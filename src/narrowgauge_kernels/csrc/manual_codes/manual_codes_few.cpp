// Few pixels by any number of channels, as in a linear layer of one row. Weights are read once, where
// they are: packing them, or laying out a table, would cost more than it saves.
#include "manual_codes/manual_codes_job.h"

namespace narrowgauge {
namespace codes {
namespace {

// Pixels; products of matrices are better above it.
constexpr std::int64_t kFewPixels = 16;
// Channels of a group; below it there are other ways.
constexpr std::int64_t kLeastOutputs = 8;
// Of a weight, with the units made of it in the first cache.
constexpr std::int64_t kBlockDepth = 2048;
// Of a table, whose rows for so many codes of a pixel are in the first cache.
constexpr int kTableBlock = 16;
// Of weights to look up, copied: where K is a power of two, all rows' lines share few places of a cache.
constexpr std::int64_t kCopiedDepth = 64;
// Channels of a task.
constexpr std::int64_t kBlockOutputs = 64;

// Sums of masked products: a weight's units by those of every pixel.
class FewProduct {
 public:
  FewProduct(const Job& job, const std::vector<Term>& terms, const ProductKernel& kernel)
      : job_(job),
        kernel_(kernel),
        factors_(factors_of(job, terms)),
        depth_(job.geometry.depth()),
        pixels_(job.geometry.pixels()),
        row_(divide_up(depth_, kBlockDepth) * kBlockDepth / kernel.per_unit),
        left_(static_cast<std::int64_t>(factors_.size()) * pixels_ * row_),
        corrections_(pixels_) {}

  void run() {
    const std::int64_t outputs = job_.geometry.group_outputs();
    for (std::int64_t group = 0; group < job_.geometry.groups; ++group) {
      expand_pixels(group);
      const std::int64_t blocks = divide_up(outputs, kBlockOutputs);
      share(threads_for(job_), blocks, [&](std::int64_t begin, std::int64_t end) {
        Scratch<std::uint32_t> right(kBlockDepth / kernel_.per_unit);
        const std::int64_t last = std::min(outputs, end * kBlockOutputs);
        for (std::int64_t output = begin * kBlockOutputs; output < last; ++output) {
          run_output(group, output, right.data());
        }
      });
    }
  }

 private:
  // Units that hold `steps` factors, as many as `dot` takes.
  std::int64_t units_of(std::int64_t steps) const {
    return divide_up(divide_up(steps, kernel_.per_unit), kernel_.lanes) * kernel_.lanes;
  }

  // Where a pixel's units of one term start; blocks of depth follow each other.
  std::uint32_t* left(std::size_t term, std::int64_t pixel) {
    return left_.data() + (static_cast<std::int64_t>(term) * pixels_ + pixel) * row_;
  }

  void expand_pixels(std::int64_t group) {
    std::vector<std::uint8_t> codes(kBlockDepth);
    std::fill_n(left_.data(), factors_.size() * pixels_ * row_, 0u);
    std::fill(corrections_.begin(), corrections_.end(), 0u);
    for (std::int64_t pixel = 0; pixel < pixels_; ++pixel) {
      for (std::int64_t d = 0; d < depth_; d += kBlockDepth) {
        const std::int64_t steps = std::min(kBlockDepth, depth_ - d);
        job_.pixels(group).gather(pixel, 1, d, steps, codes.data(), steps);
        for (std::size_t t = 0; t < factors_.size(); ++t) {
          const Factors& term = factors_[t];
          const int offset = kernel_.right_offset(term.right);
          const std::int64_t sum =
              kernel_.expand_left(codes.data(), steps, term.left,
                                  left(t, pixel) + d / kernel_.per_unit, offset != 0);
          corrections_[pixel] += term.coefficient * static_cast<std::uint32_t>(offset * sum);
        }
      }
    }
  }

  void run_output(std::int64_t group, std::int64_t output, std::uint32_t* right) {
    const std::uint8_t* const codes =
        job_.weight + (group * job_.geometry.group_outputs() + output) * depth_;
    std::uint32_t sums[kFewPixels] = {};
    for (std::int64_t d = 0; d < depth_; d += kBlockDepth) {
      const std::int64_t steps = std::min(kBlockDepth, depth_ - d);
      const std::int64_t units = units_of(steps);
      for (std::size_t t = 0; t < factors_.size(); ++t) {
        const Factors& term = factors_[t];
        const std::int64_t filled = divide_up(steps, kernel_.per_unit);
        std::fill(right + filled, right + units, 0u);
        const int left_offset = kernel_.left_offset(term.left);
        const std::int64_t sum =
            kernel_.expand_right(codes + d, steps, term.right, right, left_offset != 0) +
            steps * kernel_.right_offset(term.right);
        const std::uint32_t offset = static_cast<std::uint32_t>(left_offset * sum);
        for (std::int64_t pixel = 0; pixel < pixels_; ++pixel) {
          const std::uint32_t* const from = left(t, pixel) + d / kernel_.per_unit;
          sums[pixel] += term.coefficient * (kernel_.dot(units, from, right) - offset);
        }
      }
    }
    const Output out = job_.output(group);
    for (std::int64_t pixel = 0; pixel < pixels_; ++pixel) {
      out.pixel(pixel)[output * out.channel_stride] =
          static_cast<std::int32_t>(sums[pixel] + corrections_[pixel]);
    }
  }

  const Job& job_;
  const ProductKernel& kernel_;
  std::vector<Factors> factors_;
  std::int64_t depth_;
  std::int64_t pixels_;
  std::int64_t row_;
  Scratch<std::uint32_t> left_;
  std::vector<std::uint32_t> corrections_;  // what the offsets of stored weights cost a pixel
};

// Products by table, one look-up each: a pixel's code selects a row, a weight an entry of it.
class FewLookup {
 public:
  FewLookup(const Job& job, const std::int32_t* table)
      : job_(job), depth_(job.geometry.depth()), by_pixel_(256 * 256) {
    for (int x = 0; x < 256; ++x) {
      for (int weight = 0; weight < 256; ++weight) {
        by_pixel_[x * 256 + weight] = table[table_place(job, x, weight)];
      }
    }
  }

  void run() const {
    const std::int64_t outputs = job_.geometry.group_outputs();
    const std::int64_t blocks = divide_up(outputs, kBlockOutputs);
    const std::int64_t pixels = job_.geometry.pixels();
    share(threads_for(job_), job_.geometry.groups * blocks * pixels,
          [&](std::int64_t begin, std::int64_t end) {
            std::vector<std::uint8_t> codes(depth_);
            for (std::int64_t task = begin; task < end; ++task) {
              const std::int64_t output = task % blocks * kBlockOutputs;
              const std::int64_t pixel = task / blocks % pixels;
              const std::int64_t group = task / blocks / pixels;
              if (task == begin || output == 0) {
                job_.pixels(group).gather(pixel, 1, 0, depth_, codes.data(), depth_);
              }
              run_block(group, pixel, output, std::min(kBlockOutputs, outputs - output),
                        codes.data());
            }
          });
  }

 private:
  void run_block(std::int64_t group, std::int64_t pixel, std::int64_t output, std::int64_t count,
                 const std::uint8_t* codes) const {
    const std::uint8_t* const weights =
        job_.weight + (group * job_.geometry.group_outputs() + output) * depth_;
    std::uint32_t sums[kBlockOutputs] = {};
    std::uint8_t copied[kBlockOutputs * kCopiedDepth];
    for (std::int64_t d = 0; d < depth_; d += kCopiedDepth) {
      const std::int64_t steps = std::min(kCopiedDepth, depth_ - d);
      for (std::int64_t i = 0; i < count; ++i) {
        std::memcpy(copied + i * kCopiedDepth, weights + i * depth_ + d, steps);
      }
      std::int64_t step = 0;
      for (; step + kTableBlock <= steps; step += kTableBlock) {
        add_products<kTableBlock>(codes + d + step, copied + step, count, sums);
      }
      for (; step < steps; ++step) {
        add_products<1>(codes + d + step, copied + step, count, sums);
      }
    }
    const Output out = job_.output(group);
    std::int32_t* const to = out.pixel(pixel) + output * out.channel_stride;
    for (std::int64_t i = 0; i < count; ++i) {
      to[i * out.channel_stride] = static_cast<std::int32_t>(sums[i]);
    }
  }

  template <int Steps>
  void add_products(const std::uint8_t* codes, const std::uint8_t* weights, std::int64_t count,
                    std::uint32_t* sums) const {
    const std::int32_t* rows[Steps];
    for (int step = 0; step < Steps; ++step) {
      rows[step] = by_pixel_.data() + codes[step] * 256;
    }
    for (std::int64_t i = 0; i < count; ++i, weights += kCopiedDepth) {
      std::uint32_t sum = 0;
#pragma GCC unroll 16
      for (int step = 0; step < Steps; ++step) {
        sum += static_cast<std::uint32_t>(rows[step][weights[step]]);
      }
      sums[i] += sum;
    }
  }

  const Job& job_;
  std::int64_t depth_;
  std::vector<std::int32_t> by_pixel_;
};

}  // namespace

bool takes_few_terms(const Job& job) {
  return job.geometry.pixels() <= kFewPixels && job.geometry.group_outputs() >= kLeastOutputs;
}

void run_few_terms(const Job& job, const std::vector<Term>& terms, const ProductKernel& kernel) {
  FewProduct(job, terms, kernel).run();
}

void run_few_table(const Job& job, const std::int32_t* table) { FewLookup(job, table).run(); }

}  // namespace codes
}  // namespace narrowgauge
