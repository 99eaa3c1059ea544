// Runs the kernels over codes whose instructions this processor lacks, on stand-ins of those, inside
// the real packing and blocking: `program` prints a line per kernel, and exits 1 at a wrong bit.
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "manual_codes/manual_codes_amx.h"
#include "manual_codes/manual_codes_job.h"

namespace narrowgauge {
namespace codes {
namespace {

std::mt19937 generator(7);

std::vector<std::uint8_t> random_codes(std::int64_t count) {
  std::vector<std::uint8_t> made(count);
  for (std::uint8_t& code : made) {
    code = static_cast<std::uint8_t>(generator());
  }
  return made;
}

int value_of(std::uint8_t code, bool is_signed) {
  return is_signed ? static_cast<std::int8_t>(code) : code;
}

// 3 × 3 with padding and stride; depths that fill no unit, some, and more than a block.
Geometry geometry_of(std::int64_t batch, std::int64_t channels, std::int64_t outputs,
                     std::int64_t groups) {
  Geometry made{};
  made.batch = batch;
  made.channels = channels;
  made.height = 9;
  made.width = 10;
  made.out_channels = outputs;
  made.kernel_height = made.kernel_width = 3;
  made.out_height = 5;
  made.out_width = 10;
  made.stride[0] = 2;
  made.stride[1] = 1;
  made.padding[0] = made.padding[1] = 1;
  made.dilation[0] = made.dilation[1] = 1;
  made.groups = groups;
  return made;
}

// Each image is one window: a pixel per image.
Geometry few_pixels(std::int64_t pixels, std::int64_t channels, std::int64_t outputs) {
  Geometry made = geometry_of(pixels, channels, outputs, 1);
  made.height = made.width = 3;
  made.out_height = made.out_width = 1;
  made.padding[0] = made.padding[1] = 0;
  return made;
}

// A pixel's codes lie whole, of which a group takes some.
Geometry whole_pixels(std::int64_t channels, std::int64_t groups) {
  Geometry made = geometry_of(2, channels, 70, groups);
  made.kernel_height = made.kernel_width = 1;
  made.padding[0] = made.padding[1] = 0;
  return made;
}

struct Case {
  Geometry geometry;
  std::vector<std::uint8_t> x;
  std::vector<std::uint8_t> weight;
  std::vector<std::int32_t> out;

  explicit Case(const Geometry& given)
      : geometry(given),
        x(random_codes(given.batch * given.height * given.width * given.channels)),
        weight(random_codes(given.out_channels * given.depth())),
        out(given.pixels() * given.out_channels) {}

  // [O, R, S, C / groups] as [O, C / groups, R, S].
  std::vector<std::uint8_t> planar_weight() const {
    const std::int64_t channels = geometry.group_channels();
    const std::int64_t places = geometry.depth() / channels;
    std::vector<std::uint8_t> made(weight.size());
    for (std::size_t at = 0; at < weight.size(); ++at) {
      const std::int64_t d = static_cast<std::int64_t>(at) % geometry.depth();
      made[at - d + d % channels * places + d / channels] = weight[at];
    }
    return made;
  }

  Job job(bool x_signed, bool weight_signed, const std::uint8_t* planar = nullptr) {
    std::fill(out.begin(), out.end(), 0x5A5A5A5A);
    const std::int64_t area = geometry.out_height * geometry.out_width;
    const std::uint8_t* const weights = planar == nullptr ? weight.data() : planar;
    return {geometry, x.data(), weights, planar != nullptr, x_signed, weight_signed, 0x93,
            out.data(), area * geometry.out_channels, 1, area};
  }

  // product(x code, weight code), summed as the definition says.
  template <typename Product>
  bool matches(const Product& product) const {
    const Geometry& g = geometry;
    for (std::int64_t p = 0; p < g.pixels(); ++p) {
      const std::int64_t area = g.out_height * g.out_width;
      for (std::int64_t o = 0; o < g.out_channels; ++o) {
        std::uint32_t sum = 0;
        for (std::int64_t d = 0; d < g.depth(); ++d) {
          const std::int64_t element = d / g.group_channels();
          const std::int64_t y =
              p % area / g.out_width * g.stride[0] - g.padding[0] + element / g.kernel_width;
          const std::int64_t column =
              p % g.out_width * g.stride[1] - g.padding[1] + element % g.kernel_width;
          const bool there = y >= 0 && y < g.height && column >= 0 && column < g.width;
          const std::int64_t at = ((p / area * g.height + y) * g.width + column) * g.channels;
          const std::int64_t channel =
              o / g.group_outputs() * g.group_channels() + d % g.group_channels();
          const std::uint8_t code = there ? x[at + channel] : 0x93;
          sum += static_cast<std::uint32_t>(product(code, weight[o * g.depth() + d]));
        }
        if (static_cast<std::uint32_t>(out[(p / area * g.out_channels + o) * area + p % area]) !=
            sum) {
          return false;
        }
      }
    }
    return true;
  }
};

std::int64_t factor_of(std::uint8_t code, int mask, int shift, bool is_signed) {
  return value_of(static_cast<std::uint8_t>(code & mask), is_signed) >> shift;
}

// Products of matrices, lanes of thin groups (more channels than a segment), and few pixels.
std::vector<Geometry> product_geometries() {
  std::vector<Geometry> made;
  for (const std::int64_t channels : {1, 5, 64}) {
    made.push_back(geometry_of(1, channels, 67, 1));
  }
  made.push_back(whole_pixels(530, 1));
  made.push_back(whole_pixels(36, 2));
  made.push_back(geometry_of(1, 70, 70, 70));
  made.push_back(geometry_of(2, 39, 26, 13));
  for (const std::int64_t pixels : {1, 4}) {
    made.push_back(few_pixels(pixels, 5, 67));
    made.push_back(few_pixels(pixels, 230, 9));
  }
  return made;
}

bool check(const char* name, const ProductKernel& kernel) {
  const std::vector<std::vector<Term>> several = {
      {{0xFF, 0xFF, 1, 0, 0}},
      {{0xF0, 0xFF, 1, 0, 0}, {0x7F, 0x3C, -5, 2, 1}, {0xFF, 0xFF, 1000, 7, 3}}};
  for (const Geometry& geometry : product_geometries()) {
    Case made(geometry);
    const std::vector<std::uint8_t> planar = made.planar_weight();
    const bool takes_planar = takes_planar_terms(made.job(true, true));
    for (int signs = 0; signs < 4; ++signs) {
      const bool x_signed = signs & 1, weight_signed = signs & 2;
      for (const std::vector<Term>& terms : several) {
        run_terms(made.job(x_signed, weight_signed, takes_planar ? planar.data() : nullptr), terms,
                  kernel);
        const bool right = made.matches([&](std::uint8_t a, std::uint8_t b) {
          std::int64_t sum = 0;
          for (const Term& term : terms) {
            sum += term.coefficient * factor_of(a, term.a_mask, term.a_shift, x_signed) *
                   factor_of(b, term.b_mask, term.b_shift, weight_signed);
          }
          return sum;
        });
        if (!right) {
          std::printf("%s is wrong: %d channels, %d groups, %d pixels, signs %d, %d terms\n", name,
                      static_cast<int>(geometry.channels), static_cast<int>(geometry.groups),
                      static_cast<int>(geometry.pixels()), signs,
                      static_cast<int>(terms.size()));
          return false;
        }
      }
    }
  }
  std::printf("%s\n", name);
  return true;
}

bool check(const char* name, const TableKernel& kernel) {
  for (const int range : {60000, 900000}) {
    std::vector<std::int32_t> table(256 * 256);
    for (std::int32_t& product : table) {
      product = static_cast<std::int32_t>(generator() % range) - range / 2;
    }
    // Pixels look up, then channels; the depth is more than a block.
    for (const bool pixels : {true, false}) {
      Case made(geometry_of(pixels ? 4 : 1, pixels ? 31 : 3, pixels ? 35 : 210, 1));
      run_table(made.job(true, false), table.data(), kernel);
      if (!made.matches([&](std::uint8_t a, std::uint8_t b) {
            return table[(a ^ 0x80) * 256 + b];
          })) {
        std::printf("%s is wrong: range %d, pixels look up: %d\n", name, range, pixels);
        return false;
      }
    }
  }
  std::printf("%s table\n", name);
  return true;
}

int run() {
  bool right = check("avx512vnni", ProductKernel::avx512vnni());
#if defined(NARROWGAUGE_HAS_AMX)
  right = check("amx", amx_kernel()) && right;
#endif
  right = check("neon", ProductKernel::neon()) && right;
  right = check("avx512bw", TableKernel::avx512bw()) && right;
  right = check("neon", TableKernel::neon()) && right;
  return right ? 0 : 1;
}

}  // namespace
}  // namespace codes
}  // namespace narrowgauge

int main() { return narrowgauge::codes::run(); }
