// A problem over 8-bit codes as the CPU's kernels take it.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>
#include <vector>

#include "manual_codes/manual_codes_product.h"
#include "manual_codes/manual_codes_rows.h"
#include "manual_codes/manual_codes_scratch.h"
#include "manual_codes/manual_codes_table.h"

namespace narrowgauge {
namespace codes {

struct Job {
  Geometry geometry;
  const std::uint8_t* x;       // [N, H, W, C], contiguous
  const std::uint8_t* weight;  // [O, R, S, C / groups], contiguous; planar: [O, C / groups, R, S]
  bool planar;
  bool x_signed;
  bool weight_signed;
  std::uint8_t padding_code;
  std::int32_t* out;
  std::int64_t image_stride;
  std::int64_t pixel_stride;
  std::int64_t channel_stride;

  PixelRows pixels(std::int64_t group) const { return {geometry, x, group, padding_code}; }
  WeightRows weights(std::int64_t group) const { return {geometry, weight, group}; }
  Output output(std::int64_t group) const {
    return {out + group * geometry.group_outputs() * channel_stride,
            geometry.out_height * geometry.out_width, image_stride, pixel_stride, channel_stride};
  }
  double products() const {
    return static_cast<double>(geometry.pixels()) * static_cast<double>(geometry.out_channels) *
           static_cast<double>(geometry.depth());
  }
};

// Whether run_terms wants the weight planar: it is read once, while it is packed.
bool takes_planar_terms(const Job& job);
// `terms` is not empty.
void run_terms(const Job& job, const std::vector<Term>& terms, const ProductKernel& kernel);

// `table` is [256, 256] as in the schema.
void run_table(const Job& job, const std::int32_t* table, const TableKernel& kernel);

// Few output channels in a group, any number of pixels: lanes are channels of all groups.
bool takes_thin_terms(const Job& job);
void run_thin_terms(const Job& job, const std::vector<Term>& terms, const ProductKernel& kernel);
bool takes_thin_table(const Job& job);
void run_thin_table(const Job& job, const std::int32_t* table);

// Few pixels, any number of channels: weights are read where they are.
bool takes_few_terms(const Job& job);
void run_few_terms(const Job& job, const std::vector<Term>& terms, const ProductKernel& kernel);
void run_few_table(const Job& job, const std::int32_t* table);

// A term's sides, of the types of the job's codes.
struct Factors {
  Factor left;
  Factor right;
  std::uint32_t coefficient;
};

inline std::vector<Factors> factors_of(const Job& job, const std::vector<Term>& terms) {
  std::vector<Factors> made;
  for (const Term& term : terms) {
    made.push_back({{static_cast<std::uint8_t>(term.a_mask),
                     static_cast<std::uint8_t>(term.a_shift), job.x_signed},
                    {static_cast<std::uint8_t>(term.b_mask),
                     static_cast<std::uint8_t>(term.b_shift), job.weight_signed},
                    static_cast<std::uint32_t>(term.coefficient)});
  }
  return made;
}

// An entry's place in the schema's table, of codes as raw bytes.
inline std::int64_t table_place(const Job& job, int x, int weight) {
  return (x ^ (job.x_signed ? 0x80 : 0)) * 256 + (weight ^ (job.weight_signed ? 0x80 : 0));
}

// Below this many products, waking threads costs more than it saves.
constexpr double kLeastParallelWork = 1 << 18;

// Threads that take the tasks of a job.
inline std::int64_t threads_for(const Job& job) {
  return job.products() < kLeastParallelWork ? 1 : at::get_num_threads();
}

template <typename Work>
void share(std::int64_t threads, std::int64_t tasks, const Work& work) {
  if (threads == 1) {
    work(std::int64_t(0), tasks);
  } else {
    at::parallel_for(0, tasks, 1, work);
  }
}

}  // namespace codes
}  // namespace narrowgauge
