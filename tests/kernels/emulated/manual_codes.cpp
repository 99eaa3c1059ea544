// The launchers over 8-bit codes, and the planner, with C linkage, on emulated threads.
#include "threads.h"

#include "manual_codes/cuda/manual_codes_direct.cu"
#include "manual_codes/cuda/manual_codes_structured.cu"
#include "manual_codes/cuda/manual_codes_table.cu"
#include "manual_codes/cuda/manual_codes_transpose.cu"

using namespace narrowgauge::codes;

namespace {

// batch, channels, height, width, outputs, kernel (2), stride (2), padding (2), dilation (2), groups
Geometry geometry_of(const std::int64_t* n) {
  Geometry made{};
  made.batch = n[0];
  made.channels = n[1];
  made.height = n[2];
  made.width = n[3];
  made.out_channels = n[4];
  made.kernel_height = n[5];
  made.kernel_width = n[6];
  for (int i = 0; i < 2; ++i) {
    made.stride[i] = n[7 + i];
    made.padding[i] = n[9 + i];
    made.dilation[i] = n[11 + i];
  }
  made.groups = n[13];
  made.out_height = (n[2] + 2 * n[9] - n[11] * (n[5] - 1) - 1) / n[7] + 1;
  made.out_width = (n[3] + 2 * n[10] - n[12] * (n[6] - 1) - 1) / n[8] + 1;
  return made;
}

std::vector<Term> terms_of(const std::int64_t* numbers, int count) {
  std::vector<Term> terms;
  for (int i = 0; i < count; ++i, numbers += 5) {
    terms.push_back({static_cast<std::int32_t>(numbers[0]), static_cast<std::int32_t>(numbers[1]),
                     static_cast<std::int32_t>(numbers[2]), static_cast<std::int32_t>(numbers[3]),
                     static_cast<std::int32_t>(numbers[4])});
  }
  return terms;
}

Operands operands_of(const void* x, const void* weight, int* out, const std::int64_t* facts) {
  Operands operands{};
  operands.x = x;
  operands.weight = weight;
  operands.out = out;
  operands.rows = facts[0] != 0;
  operands.a_signed = facts[1] != 0;
  operands.b_signed = facts[2] != 0;
  operands.padding_code = static_cast<int>(facts[3]);
  for (int i = 0; i < 4; ++i) {
    operands.x_strides[i] = facts[4 + i];
    operands.weight_strides[i] = facts[8 + i];
  }
  return operands;
}

}  // namespace

extern "C" {

// facts: rows, a_signed, b_signed, padding code, strides of x and weight (kDirect), largest.
// plan: path (of enum Path), tile, splits, and multiprocessors. table null: by terms.
void run(const std::int64_t* sizes, const std::int64_t* facts, const std::int64_t* plan,
         const void* x, const void* weight, const int* table, const std::int64_t* terms,
         int term_count, int* out) {
  const Geometry geometry = geometry_of(sizes);
  const Operands operands = operands_of(x, weight, out, facts);
  const std::vector<FoldedSweep> sweeps =
      table ? std::vector<FoldedSweep>() : fold(terms_of(terms, term_count));
  std::vector<unsigned int> prepared(static_cast<std::size_t>(prepared_words()), 0xA5C3A5C3u);
  const Path path = static_cast<Path>(plan[0]);
  if (table) {
    launch_prepare(table, operands.a_signed, operands.b_signed, facts[12], path, prepared.data(),
                   nullptr);
  }
  if (path == Path::kDirect) {
    if (!table) {
      launch_tabulate(sweeps, operands.a_signed, operands.b_signed, prepared.data(), nullptr);
    }
    const Machine machine{90, static_cast<int>(plan[3]), 0};
    launch_direct(geometry, operands, prepared.data(), machine, nullptr);
    return;
  }
  const Extents extents = extents_of(geometry, sweeps);
  const TileCost& tile = tiles_of(path)[static_cast<std::size_t>(plan[1])];
  Plan made{path, static_cast<int>(plan[1]), 0, 1, 0};
  made.tiles =
      divided_up(extents.pixels, tile.pixels) * divided_up(extents.outputs, tile.channels);
  const std::int64_t unit = split_unit(path);
  const std::int64_t depth = divided_up(divided_up(extents.depth, plan[2]), unit) * unit;
  made.split_depth = static_cast<int>(depth);
  made.splits = static_cast<int>(divided_up(extents.depth, depth));
  if (table) {
    launch_table(geometry, operands, prepared.data(), facts[12], made, nullptr);
  } else {
    launch_structured(geometry, operands, sweeps, made, nullptr);
  }
}

// planes: images, channels, pixels.
int takes_planes(const std::int64_t* planes) { return transposes({planes[0], planes[1], planes[2]}); }

void transpose(const std::int64_t* planes, const void* from, void* to) {
  launch_transpose({planes[0], planes[1], planes[2]}, from, to, nullptr);
}

// plan: path, tile, tiles, splits, split depth. machine: capability, multiprocessors, shared bytes.
void choose(const std::int64_t* sizes, int table, const std::int64_t* terms, int term_count,
            const std::int64_t* machine, std::int64_t* plan) {
  const std::vector<FoldedSweep> sweeps =
      table ? std::vector<FoldedSweep>() : fold(terms_of(terms, term_count));
  const Extents extents = extents_of(geometry_of(sizes), sweeps);
  const Plan made = plan_automatically(
      table != 0, extents,
      {static_cast<int>(machine[0]), static_cast<int>(machine[1]), static_cast<int>(machine[2])});
  const std::int64_t results[] = {static_cast<int>(made.path), made.tile, made.tiles, made.splits,
                                  made.split_depth};
  std::memcpy(plan, results, sizeof results);
}

// Five numbers a sweep: masks, passes, coefficient, shift. The number of sweeps.
int folded(const std::int64_t* terms, int term_count, std::int64_t* sweeps) {
  const std::vector<FoldedSweep> made = fold(terms_of(terms, term_count));
  for (const FoldedSweep& sweep : made) {
    *sweeps++ = static_cast<std::int64_t>(sweep.a_masks);
    *sweeps++ = static_cast<std::int64_t>(sweep.b_masks);
    *sweeps++ = sweep.passes;
    *sweeps++ = sweep.coefficient;
    *sweeps++ = sweep.shift;
  }
  return static_cast<int>(made.size());
}
}
