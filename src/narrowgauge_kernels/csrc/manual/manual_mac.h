// How one product is formed: the float MAC policies, for host and device and for the host's vectors.
// No header of the toolkit or of the library, C++14: NVRTC 11.8, nvcc and g++ take it as it is.
//
// An operand is a word of 32 bits at rest (`prepare_*` makes it of a float, once per element, when a
// tile is filled) and a few registers in use (`activation`, `weight`: hoisted out of the other
// operand's loop). Every policy then is one fused multiply-add:
//
//   sum = step(a, b, sum) = fma(significand(a, b), power(a, b), sum)     sum starts at +0
//
// where significand * power is the product of the policy, without rounding. Of a product that
// overflows, the sum is what fma gives for it. Operands do not commute: activation, then weight.
//
//   policy          prepared                      significand                          power
//   ExactFp32       as it is                      a                                    b
//   Truncated       top k bits of the fraction    a                                    b
//   AxfpmFaithful   |x| < 1e-36 is zero           S of Ax-FPM, 24 bits, in [1, 2)      2^(ea + eb + 1)
//   AxfpmFixed      |x| < 1e-36 is zero           the same in [1, 4)                   2^(ea + eb + 1)
//   Axbf16          top 7, subnormals are zero    S of its 8 x 8 block, in [1, 2)      2^(ea + eb + 1)
//   Mitchell        subnormals are zero           (1 + x + y) or 2 (x + y), in [1, 4)  2^(ea + eb)
//
// The power of the last four is +-2^n, zero, infinite or NaN, and *flushed*: below 2^-126 it is zero.
// So exponents that underflow before normalisation give zero; those that overflow give infinity.
#pragma once

#if defined(__CUDACC__)
#define MAC_INLINE __host__ __device__ __forceinline__
#else
#define MAC_INLINE inline __attribute__((always_inline))
#endif

namespace narrowgauge {
namespace mac {
#if !defined(__CUDACC__)
// Each file of the host has flags of its own; a shared copy would be whichever the linker keeps.
namespace {
#endif

// What a lane can do. Specialised for the vectors of GCC by manual_<instructions>.cpp; there, words
// and floats are vectors of as many lanes, and comparisons give masks that ?: takes.
template <typename F>
struct Ops;

template <>
struct Ops<float> {
  using U = unsigned int;

  static MAC_INLINE U bits(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    U result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
#endif
  }

  static MAC_INLINE float floats(U value) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(value);
#else
    float result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
#endif
  }

  static MAC_INLINE float splat(float value) { return value; }
  static MAC_INLINE U splat_word(U value) { return value; }

  // One rounding, whatever the compiler's contraction is set to.
  static MAC_INLINE float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
  }

  static MAC_INLINE float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
  }

  // The upper half of a * b + c * d, which is below 2^64. Vectors have b and d the same in all lanes.
  static MAC_INLINE U high_sum(U a, U b, U c, U d) {
    return static_cast<U>((static_cast<unsigned long long>(a) * b +
                           static_cast<unsigned long long>(c) * d) >> 32);
  }

  // a * b of powers of two, zero where it is below 2^-126: of the same sign, but for vectors, which
  // only form sums, where it does not show.
  static MAC_INLINE float flushed(float a, float b) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    const float product = a * b;
    const U word = bits(product);
    return (word & 0x7f800000u) == 0 ? floats(word & 0x80000000u) : product;
#endif
  }
};

MAC_INLINE bool is_nan_word(unsigned int word) { return (word & 0x7fffffffu) > 0x7f800000u; }

// `kept` of a float's bits; a NaN stays a NaN, and magnitudes below `least` become a signed zero.
MAC_INLINE float prepare_word(float value, unsigned int kept, unsigned int least) {
  const unsigned int word = Ops<float>::bits(value);
  const unsigned int small = (word & 0x7fffffffu) < least ? 0x80000000u : kept;
  return Ops<float>::floats(is_nan_word(word) ? 0x7fc00000u : word & small);
}

// +-2^e of a prepared word; zeros, infinities and NaNs as they are.
template <typename F>
MAC_INLINE F power_of(F word) {
  using U = typename Ops<F>::U;
  const U bits = Ops<F>::bits(word);
  return Ops<F>::floats((bits & 0x7fffffffu) > 0x7f800000u ? bits : bits & 0xff800000u);
}

// What the words of a product may be, for the policies that take them apart: a power that need not
// look for NaN is one instruction, not three. Neither makes a difference to any other word.
struct MaybeNan {
  template <typename F>
  static MAC_INLINE F power(F word) {
    return power_of(word);
  }
};

struct NeverNan {
  template <typename F>
  static MAC_INLINE F power(F word) {
    return Ops<F>::floats(Ops<F>::bits(word) & 0xff800000u);
  }
};

// An integer below 2^23 as a float, without the slow conversion.
template <typename F>
MAC_INLINE F small_integer(typename Ops<F>::U value) {
  return Ops<F>::floats(value | 0x4b000000u) - 8388608.0f;
}

// 2^(e + 1) of a weight, and what a significand in [2^23, 2^24) is raised by to lie in [1, 2). Of
// the largest exponent, whose double is no float, it is 2^e and [2, 4): the product is the same.
template <typename F>
struct Doubled {
  F power;
  typename Ops<F>::U lift;
};

template <typename Words, typename F>
MAC_INLINE Doubled<F> doubled_power(F word) {
  using U = typename Ops<F>::U;
  const U zero = Ops<F>::bits(word) & 0u;
  const U exponent = Ops<F>::bits(word) & 0x7f800000u;
  const U one = zero + 0x00800000u;
  // 1 to 253 without a second comparison: 0 wraps around.
  const U raise = (exponent - 0x00800000u) < 0x7e800000u ? one : zero;
  const U lift = exponent == 0x7f000000u ? zero + 0x3f800000u : zero + 0x3f000000u;
  return {Ops<F>::floats(Ops<F>::bits(Words::power(word)) + raise), lift};
}

// a and b as they are: the base of the policies that keep nothing else of an operand.
struct Plain {
  template <typename F>
  struct A {
    F value;
  };
  template <typename F>
  struct B {
    F value;
  };
  template <typename F>
  static MAC_INLINE A<F> activation(F word) {
    return {word};
  }
  template <typename F>
  static MAC_INLINE B<F> weight(F word) {
    return {word};
  }
  template <typename F>
  static MAC_INLINE B<F> spread(const B<float>& b) {
    return {Ops<F>::splat(b.value)};
  }
  template <typename F>
  static MAC_INLINE F step(const A<F>& a, const B<F>& b, F sum) {
    return Ops<F>::fma(a.value, b.value, sum);
  }
  template <typename F>
  static MAC_INLINE F multiply(const A<F>& a, const B<F>& b) {
    return Ops<F>::multiply(a.value, b.value);
  }
};

// `kept` is the mask of the bits that Truncated keeps of an operand; the others take and ignore it.
struct ExactFp32 : Plain {
  static MAC_INLINE float prepare_activation(float value, unsigned int) { return value; }
  static MAC_INLINE float prepare_weight(float value, unsigned int) { return value; }
};

struct Truncated : Plain {
  static MAC_INLINE float prepare_activation(float value, unsigned int kept) {
#if defined(__CUDA_ARCH__)
    // An addition makes every NaN one whose upper bits are set, which no mask here clears.
    return Ops<float>::floats(Ops<float>::bits(__fadd_rn(value, -0.0f)) & kept);
#else
    return prepare_word(value, kept, 0u);
#endif
  }
  static MAC_INLINE float prepare_weight(float value, unsigned int kept) {
    return prepare_activation(value, kept);
  }
};

// Of `bits` bits of fraction, 1 to 23.
MAC_INLINE unsigned int kept_mask(int bits) { return 0xffffffffu << (23 - bits); }

// The Ax-FPM of Defensive Approximation. Its 24 x 24 significand product out of 4 x 4 AMA5 blocks is,
// with a and b in 24 bits and the hidden one among them,
//   S = (a & 0x111111) * b + 16 * ((a & 0xeeeeee) * ((b >> 3) & 0x111111)),   2^47 <= S < 2^49,
// kept to 24 bits toward zero. Where S >= 2^48, the original does not raise the exponent, so the
// product is half of what it should be (Fixed = false); Fixed raises it.
template <bool Fixed, typename Words = MaybeNan>
struct Axfpm {
  template <typename F>
  struct A {
    typename Ops<F>::U low;   // a & 0x111111
    typename Ops<F>::U high;  // (a & 0xeeeeee) << 4
    F power;
  };
  template <typename F>
  struct B {
    typename Ops<F>::U full;   // b << 8
    typename Ops<F>::U tops;   // ((b >> 3) & 0x111111) << 8: the top bit of each nibble
    typename Ops<F>::U lift;
    F power;
  };

  // The least float that is not below the original's threshold, 1e-36 in double.
  static constexpr unsigned int kLeast = 0x03aa2425u;

  static MAC_INLINE float prepare_activation(float value, unsigned int) {
    return prepare_word(value, 0xffffffffu, kLeast);
  }
  static MAC_INLINE float prepare_weight(float value, unsigned int) {
    return prepare_word(value, 0xffffffffu, kLeast);
  }
  template <typename F>
  static MAC_INLINE A<F> activation(F word) {
    const typename Ops<F>::U bits = Ops<F>::bits(word);
    return {bits & 0x111111u, ((bits & 0x6eeeeeu) | 0x800000u) << 4, Words::power(word)};
  }
  template <typename F>
  static MAC_INLINE B<F> weight(F word) {
    const typename Ops<F>::U bits = Ops<F>::bits(word);
    const Doubled<F> doubled = doubled_power<Words>(word);
    return {(bits << 8) | 0x80000000u, ((bits << 5) & 0x01111100u) | 0x10000000u, doubled.lift,
            doubled.power};
  }
  template <typename F>
  static MAC_INLINE B<F> spread(const B<float>& b) {
    return {Ops<F>::splat_word(b.full), Ops<F>::splat_word(b.tops), Ops<F>::splat_word(b.lift),
            Ops<F>::splat(b.power)};
  }
  template <typename F>
  static MAC_INLINE F kept(typename Ops<F>::U top, const B<F>& b) {  // top = S >> 24
    const typename Ops<F>::U carry = top >> 24;
    const typename Ops<F>::U bits = (top >> carry) + b.lift;
    return Ops<F>::floats(Fixed ? bits + (carry << 23) : bits);
  }
  template <typename F>
  static MAC_INLINE F significand(const A<F>& a, const B<F>& b) {
    return kept<F>(Ops<F>::high_sum(a.high, b.tops, a.low, b.full), b);
  }
  template <typename F>
  static MAC_INLINE F step(const A<F>& a, const B<F>& b, F sum) {
    return Ops<F>::fma(significand(a, b), Ops<F>::flushed(a.power, b.power), sum);
  }
  // `step` where all lanes have the same a: a vector's high_sum takes that second and fourth.
  template <typename F>
  static MAC_INLINE F turned_step(const A<F>& a, const B<F>& b, F sum) {
    const F product = kept<F>(Ops<F>::high_sum(b.tops, a.high, b.full, a.low), b);
    return Ops<F>::fma(product, Ops<F>::flushed(a.power, b.power), sum);
  }
  template <typename F>
  static MAC_INLINE F multiply(const A<F>& a, const B<F>& b) {
    return Ops<F>::multiply(significand(a, b), Ops<F>::flushed(a.power, b.power));
  }
};

using AxfpmFaithful = Axfpm<false>;
using AxfpmFixed = Axfpm<true>;

// The same with one 8 x 8 block on the top 8 bits of each significand, kept to 8 bits; exponents as in
// AxfpmFaithful. Its S is below 2^17, so that float arithmetic forms it without rounding.
template <typename Words>
struct Axbf16Of {
  template <typename F>
  struct A {
    F low;   // a & 0x11
    F high;  // 16 * (a & 0xee)
    F power;
  };
  template <typename F>
  struct B {
    F full;  // b
    F tops;  // (b >> 3) & 0x11
    typename Ops<F>::U lift;
    F power;
  };

  static MAC_INLINE float prepare_activation(float value, unsigned int) {
    return prepare_word(value, 0xffff0000u, 0x00800000u);
  }
  static MAC_INLINE float prepare_weight(float value, unsigned int) {
    return prepare_word(value, 0xffff0000u, 0x00800000u);
  }
  template <typename F>
  static MAC_INLINE A<F> activation(F word) {
    const typename Ops<F>::U top = (Ops<F>::bits(word) >> 16 & 0x7fu) | 0x80u;
    return {small_integer<F>(top & 0x11u), small_integer<F>((top & 0xeeu) << 4),
            Words::power(word)};
  }
  template <typename F>
  static MAC_INLINE B<F> weight(F word) {
    const typename Ops<F>::U top = (Ops<F>::bits(word) >> 16 & 0x7fu) | 0x80u;
    const Doubled<F> doubled = doubled_power<Words>(word);
    return {small_integer<F>(top), small_integer<F>((top >> 3) & 0x11u),
            doubled.lift + 0x00800000u, doubled.power};
  }
  template <typename F>
  static MAC_INLINE B<F> spread(const B<float>& b) {
    return {Ops<F>::splat(b.full), Ops<F>::splat(b.tops), Ops<F>::splat_word(b.lift),
            Ops<F>::splat(b.power)};
  }
  template <typename F>
  static MAC_INLINE F significand(const A<F>& a, const B<F>& b) {
    const F exact = Ops<F>::fma(a.high, b.tops, Ops<F>::multiply(a.low, b.full));
    return Ops<F>::floats((Ops<F>::bits(exact) & 0x007f0000u) | b.lift);
  }
  template <typename F>
  static MAC_INLINE F step(const A<F>& a, const B<F>& b, F sum) {
    return Ops<F>::fma(significand(a, b), Ops<F>::flushed(a.power, b.power), sum);
  }
  template <typename F>
  static MAC_INLINE F multiply(const A<F>& a, const B<F>& b) {
    return Ops<F>::multiply(significand(a, b), Ops<F>::flushed(a.power, b.power));
  }
};

using Axbf16 = Axbf16Of<MaybeNan>;

// Mitchell's logarithmic multiplier on the significands: with fractions x and y, 1 + x + y where that
// is below 2, else 2 (x + y). The addition of the fractions carries into the exponent by itself.
template <typename Words>
struct MitchellOf {
  template <typename F>
  struct A {
    typename Ops<F>::U fraction;
    F power;
  };
  template <typename F>
  struct B {
    typename Ops<F>::U fraction;  // with the exponent of 1.0
    F power;
  };

  static MAC_INLINE float prepare_activation(float value, unsigned int) {
    return prepare_word(value, 0xffffffffu, 0x00800000u);
  }
  static MAC_INLINE float prepare_weight(float value, unsigned int) {
    return prepare_word(value, 0xffffffffu, 0x00800000u);
  }
  template <typename F>
  static MAC_INLINE A<F> activation(F word) {
    return {Ops<F>::bits(word) & 0x7fffffu, Words::power(word)};
  }
  template <typename F>
  static MAC_INLINE B<F> weight(F word) {
    return {(Ops<F>::bits(word) & 0x7fffffu) | 0x3f800000u, Words::power(word)};
  }
  template <typename F>
  static MAC_INLINE B<F> spread(const B<float>& b) {
    return {Ops<F>::splat_word(b.fraction), Ops<F>::splat(b.power)};
  }
  template <typename F>
  static MAC_INLINE F significand(const A<F>& a, const B<F>& b) {
    return Ops<F>::floats(a.fraction + b.fraction);
  }
  template <typename F>
  static MAC_INLINE F step(const A<F>& a, const B<F>& b, F sum) {
    return Ops<F>::fma(significand(a, b), Ops<F>::flushed(a.power, b.power), sum);
  }
  template <typename F>
  static MAC_INLINE F multiply(const A<F>& a, const B<F>& b) {
    return Ops<F>::multiply(significand(a, b), Ops<F>::flushed(a.power, b.power));
  }
};

using Mitchell = MitchellOf<MaybeNan>;

// The policy of the same products where no prepared word is NaN; most are their own.
template <typename Policy>
struct WithoutNan {
  static constexpr bool differs = false;
  using Type = Policy;
};

template <bool Fixed>
struct WithoutNan<Axfpm<Fixed>> {
  static constexpr bool differs = true;
  using Type = Axfpm<Fixed, NeverNan>;
};

template <>
struct WithoutNan<Axbf16> {
  static constexpr bool differs = true;
  using Type = Axbf16Of<NeverNan>;
};

template <>
struct WithoutNan<Mitchell> {
  static constexpr bool differs = true;
  using Type = MitchellOf<NeverNan>;
};

// A user's `struct Multiply { MAC_INLINE float operator()(float a, float b) const; };` as a policy: the
// product, rounded by the user, is added. Padding is zeros, which are multiplied too.
template <typename Multiply>
struct Custom : Plain {
  static MAC_INLINE float prepare_activation(float value, unsigned int) { return value; }
  static MAC_INLINE float prepare_weight(float value, unsigned int) { return value; }
  static MAC_INLINE float multiply(const A<float>& a, const B<float>& b) {
    return Multiply()(a.value, b.value);
  }
  static MAC_INLINE float step(const A<float>& a, const B<float>& b, float sum) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(sum, Multiply()(a.value, b.value));
#else
    return sum + Multiply()(a.value, b.value);
#endif
  }
  // A vector of the host: lane by lane, which the compiler turns into vectors again where it can.
  template <typename F>
  static MAC_INLINE F step(const A<F>& a, const B<F>& b, F sum) {
    constexpr unsigned int kLanes = sizeof(F) / sizeof(float);
    float left[kLanes], right[kLanes], total[kLanes];
    __builtin_memcpy(left, &a.value, sizeof left);
    __builtin_memcpy(right, &b.value, sizeof right);
    __builtin_memcpy(total, &sum, sizeof total);
    for (unsigned int lane = 0; lane < kLanes; ++lane) {
      total[lane] += Multiply()(left[lane], right[lane]);
    }
    F result;
    __builtin_memcpy(&result, total, sizeof total);
    return result;
  }
};

#if !defined(__CUDACC__)
}  // namespace
#endif
}  // namespace mac
}  // namespace narrowgauge
