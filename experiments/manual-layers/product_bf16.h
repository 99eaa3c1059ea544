// A functor of one's own: the exact product, cut to bfloat16 before it is added up.
//
//     narrowgauge run manual-layers -p policy=custom:product_bf16.h

#include <cstdint>
#include <cstring>

struct Multiply {
  MAC_INLINE float operator()(float a, float b) const {
    float product = a * b;
    std::uint32_t bits;
    memcpy(&bits, &product, sizeof bits);
    bits &= 0xffff0000u;
    memcpy(&product, &bits, sizeof bits);
    return product;
  }
};
