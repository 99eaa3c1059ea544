// Convolution and linear over 8-bit codes with a multiplier that is a table or a sum of masked
// products. No torch header. The operators, of one schema on every device:
//
//   conv2d_codes(Tensor x, Tensor weight, Tensor? table, int[] terms, int largest, int[] stride,
//                int[] padding, int[] dilation, int groups, int x_zero, *, str isa='auto')
//                -> Tensor
//   linear_codes(Tensor x, Tensor weight, Tensor? table, int[] terms, int largest, *,
//                str isa='auto') -> Tensor
//   codes_instruction_sets(bool table) -> str[]      what isa may name on this CPU, best last
//
// x       [N, C, H, W] or [..., K] of int8 (signed codes) or uint8 (unsigned), any strides
// weight  [O, C / groups, R, S] or [O, K] of int8 or uint8, whatever x is
// table   int32 [256, 256]: product of codes a and b at [a + 128 if x is int8, b + 128 if weight is]
// terms   without a table: five integers per term, a_mask, b_mask, coefficient, a_shift, b_shift;
//         product = sum of coefficient * ((a & a_mask) >> a_shift) * ((b & b_mask) >> b_shift), on
//         two's complement codes with arithmetic shifts. Masks are 0..255; for a signed code the
//         mask's bit 7 is extended to all bits above. No term: the exact product a * b.
// largest the greatest magnitude of any product: an output of K products with K * largest >= 2^31
//         is refused
// x_zero  the code of padding pixels, which are multiplied like any other
// result  int32 [N, O, Ho, Wo], in the memory format of x (channels_last or contiguous), or [..., O]
//         contiguous. Integers: the same bits by every kernel, thread count and device.
#pragma once

#include <cstdint>

namespace narrowgauge {
namespace codes {

// One masked product; as in the schema.
struct Term {
  std::int32_t a_mask;
  std::int32_t b_mask;
  std::int32_t coefficient;
  std::int32_t a_shift;
  std::int32_t b_shift;
};

// A convolution over `groups` independent parts. Linear is one with height = width = 1 and a kernel
// of 1 x 1, each row an image.
struct Geometry {
  std::int64_t batch;
  std::int64_t channels;      // of x, all groups
  std::int64_t height;
  std::int64_t width;
  std::int64_t out_channels;  // of all groups
  std::int64_t kernel_height;
  std::int64_t kernel_width;
  std::int64_t out_height;
  std::int64_t out_width;
  std::int64_t stride[2];
  std::int64_t padding[2];
  std::int64_t dilation[2];
  std::int64_t groups;

  std::int64_t group_channels() const { return channels / groups; }
  std::int64_t group_outputs() const { return out_channels / groups; }
  // Products that make one output.
  std::int64_t depth() const { return group_channels() * kernel_height * kernel_width; }
  // Output pixels of all images.
  std::int64_t pixels() const { return batch * out_height * out_width; }
};

}  // namespace codes
}  // namespace narrowgauge
