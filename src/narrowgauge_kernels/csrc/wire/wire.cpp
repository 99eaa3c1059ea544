// The operators of the int8 wire format: schema, shape functions, and the CPU implementation.
#include "wire/wire.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "common/instruction_set.h"
#include "common/torch_tensor.h"
#include "wire/wire_packing.h"
#include "wire/wire_problem.h"

namespace narrowgauge {
namespace wire {
namespace {

template <typename T>
void unpack(const Order& order, const std::int8_t* values, const float* scale, T* out,
            InstructionSet set) {
  const Loops<T> loops = loops_for<Loops<T>>(set);
  if (!order.rows) {
    const std::int64_t count = order.samples * order.channels * order.spatial;
    at::parallel_for(0, count, kLeastParallelCount, [&](std::int64_t begin, std::int64_t end) {
      runs(order, begin, end, [&](std::int64_t i, std::int64_t run, std::int64_t channel) {
        loops.unpack_run(run, values + i, scale + channel, out + i);
      });
    });
    return;
  }
  const std::int64_t step = rows_at_once(order);
  std::vector<float> table(step * order.channels);
  for (std::size_t i = 0; i < table.size(); ++i) {
    table[i] = scale[static_cast<std::int64_t>(i) % order.channels];
  }
  at::parallel_for(0, order.samples * order.spatial, least_parallel_rows(order),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t row = begin; row < end; row += step) {
                       const std::int64_t count = std::min(step, end - row) * order.channels;
                       const std::int64_t i = row * order.channels;
                       loops.unpack_columns(count, values + i, table.data(), out + i);
                     }
                   });
}

// Calls run(T{}) for the loops' type of a tensor's.
template <typename Run>
void for_type(at::ScalarType type, const Run& run) {
  switch (type) {
    case at::kHalf:
      run(Half{});
      break;
    case at::kBFloat16:
      run(BFloat16{});
      break;
    default:
      run(float{});
  }
}

void pack_int8_cpu(const at::Tensor& given, c10::optional<std::int64_t> seed, std::int64_t first,
                   const at::Tensor& values, const at::Tensor& scale, std::string isa) {
  check_pack(given, first, values, scale);
  const InstructionSet set = instruction_set(isa);
  if (given.numel() == 0) {
    scale.fill_(1);
    return;
  }
  const at::Tensor x = ordered_as(given, values);
  for_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    Packing<T>(order_of(values), static_cast<const T*>(x.data_ptr()), seed, first,
               values.data_ptr<std::int8_t>(), scale.data_ptr<float>(), set)
        .run();
  });
}

void unpack_int8_cpu(const at::Tensor& given, const at::Tensor& scale, const at::Tensor& out,
                     std::string isa) {
  check_unpack(given, scale, out);
  const InstructionSet set = instruction_set(isa);
  if (given.numel() == 0) {
    return;
  }
  const at::Tensor values = ordered_as(given, out);
  const at::Tensor scales = scale.contiguous();
  for_type(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    unpack(order_of(out), values.data_ptr<std::int8_t>(), scales.data_ptr<float>(),
           static_cast<T*>(out.data_ptr()), set);
  });
}

void mapped_copy_cpu(const at::Tensor& x, const at::Tensor& out) {
  check_copy(x, out);
  at::Tensor(out).copy_(x);
}

void pack_int8_meta(const at::Tensor& x, c10::optional<std::int64_t>, std::int64_t first,
                    const at::Tensor& values, const at::Tensor& scale, std::string) {
  check_pack(x, first, values, scale);
}

void unpack_int8_meta(const at::Tensor& values, const at::Tensor& scale, const at::Tensor& out,
                      std::string) {
  check_unpack(values, scale, out);
}

}  // namespace

// `isa` forces one instruction set of the CPU (generic, avx2, avx512, neon); results do not differ.
TORCH_LIBRARY_FRAGMENT(narrowgauge, m) {
  m.def(
      "wire_pack_int8(Tensor x, int? seed, int first, Tensor(a!) values, Tensor(b!) scale, *, "
      "str isa='auto') -> ()");
  m.def("wire_unpack_int8(Tensor values, Tensor scale, Tensor(a!) out, *, str isa='auto') -> ()");
  m.def("mapped_copy(Tensor x, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(narrowgauge, CPU, m) {
  m.impl("wire_pack_int8", pack_int8_cpu);
  m.impl("wire_unpack_int8", unpack_int8_cpu);
  m.impl("mapped_copy", mapped_copy_cpu);
}

TORCH_LIBRARY_IMPL(narrowgauge, Meta, m) {
  m.impl("wire_pack_int8", pack_int8_meta);
  m.impl("wire_unpack_int8", unpack_int8_meta);
  m.impl("mapped_copy", check_copy);
}

}  // namespace wire
}  // namespace narrowgauge
