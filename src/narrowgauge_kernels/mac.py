"""MAC policies: how one product of a manual layer is formed, and the bits it has.

A product takes the activation first and the weight second; most policies do not commute.

| policy           | product of a and b                                                            |
|------------------|-------------------------------------------------------------------------------|
| `exact_fp32`     | a·b                                                                           |
| `axfpm_faithful` | the Ax-FPM multiplier of Defensive Approximation as published: significands   |
|                  | of 24 bits by nine 8×8 blocks of four AMA5 4×4 blocks, cut to 24 bits; the    |
|                  | exponent is not raised where that product reaches 2^48, which halves it       |
| `axfpm_fixed`    | the same with the exponent raised                                             |
| `axbf16`         | the faithful one with one 8×8 block: operands cut to bfloat16, product too    |
| `truncated`      | a·b of operands cut toward zero to `bits` bits of fraction; the product exact |
| `mitchell`       | Mitchell's logarithmic multiplier on the significands, piecewise linear       |
| `custom`         | a user's function (see custom.py)                                             |

| operand           | what the policies but exact_fp32, truncated and custom make of it            |
|-------------------|------------------------------------------------------------------------------|
| NaN               | NaN                                                                          |
| infinity          | infinity of the product's sign; NaN with a zero, or what counts as one       |
| size below 2^-126 | zero with its sign; for both Ax-FPM, from 1e-36 down, as the original does   |
| exponent too low  | zero with the product's sign: where the two powers of two, for Ax-FPM one    |
|                   | more than their sum, are below 2^-126 before the significand is normalised   |
| exponent too high | infinity with the product's sign                                             |

exact_fp32 and truncated follow IEEE 754, subnormals included; a NaN stays one when cut.

Sums are float32, one accumulator per result from +0, terms in ascending order (channel, row,
column), and one fused multiply-add per term: the product is not rounded before it is added. Only
`custom` adds what the function returned. So a sum's zero is +0, and where a product overflows the
sum is what the fused operation gives. `reference` returns products rounded to float32.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict

import numpy as np

from narrowgauge_kernels.errors import BuildArgumentError

__all__ = ["CODE_MACS", "CUSTOM", "FLOAT_MACS", "Mac", "reference"]

#: float32 operands and products. Order and names are those of csrc/manual_float/manual_float.h.
FLOAT_MACS = ("exact_fp32", "axfpm_faithful", "axfpm_fixed", "axbf16", "truncated", "mitchell")
#: 8-bit codes, integer products; see codes.py.
CODE_MACS = ("exact_int8", "lut8x8", "structured")
CUSTOM = "custom"

_SIGN, _MAGNITUDE, _FRACTION = 0x80000000, 0x7FFFFFFF, 0x007FFFFF
_INFINITY = 0x7F800000
_LEAST_NORMAL = 0x00800000
#: The least float32 that is not below 1e-36, the original's threshold.
_AXFPM_LEAST = 0x03AA2425
_FRACTION_BITS, _BIAS = 23, 127


@dataclasses.dataclass(frozen=True)
class Mac:
    """A policy. `bits` is of `truncated` only: fraction bits kept of both operands, 1 to 23, the
    hidden one not counted. `library` is of `custom` only: the compiled functor's path.

    Raises BuildArgumentError where these do not fit together.
    """

    name: str
    bits: int = 0
    library: str = ""

    def __post_init__(self) -> None:
        known = (*FLOAT_MACS, *CODE_MACS, CUSTOM)
        if self.name not in known:
            raise BuildArgumentError(
                f"no MAC policy '{self.name}'", next_step=f"there are {', '.join(known)}"
            )
        if self.name == "truncated" and not 1 <= self.bits <= _FRACTION_BITS:
            raise BuildArgumentError(
                f"truncated keeps {self.bits} bits",
                why="a float32 has 23 bits of fraction",
                next_step="take 1 to 23, such as Mac('truncated', bits=7)",
            )
        if self.name != "truncated" and self.bits:
            raise BuildArgumentError(f"{self.name} takes no bits; truncated does")
        if (self.name == CUSTOM) != bool(self.library):
            raise BuildArgumentError(
                f"{self.name} has the library '{self.library}'",
                why="custom needs a compiled functor, and no other policy takes one",
                next_step="make one of a source file by narrowgauge_kernels.custom.compile_functor",
            )


def reference(mac: Mac, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The products of activations a and weights b, elementwise, bit for bit what kernels form.

    Both float32, broadcast against each other. Raises BuildArgumentError for a policy of 8-bit
    codes, and for `custom`, whose products only its library knows.
    """
    if mac.name not in FLOAT_MACS:
        raise BuildArgumentError(
            f"{mac.name} has no reference for float32",
            why="it is a user's function" if mac.name == CUSTOM else "it multiplies 8-bit codes",
        )
    a, b = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    with np.errstate(all="ignore"):
        return _PRODUCTS[mac.name](mac, a, b)


def _exact(_mac: Mac, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.multiply(a, b)


def _truncated(mac: Mac, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    mask = np.uint32(0xFFFFFFFF << (_FRACTION_BITS - mac.bits) & 0xFFFFFFFF)
    cut = [np.where(np.isnan(x), x, _floats(_bits(x) & mask)) for x in (a, b)]
    return np.multiply(*cut)


def _axfpm(mac: Mac, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    significand_a, significand_b = _significand(a), _significand(b)
    low = (significand_a & 0x111111) * significand_b
    high = (significand_a & 0xEEEEEE) * ((significand_b >> 3) & 0x111111)
    product = low + (high << 4)
    carry = product >> 48  # 0 or 1: bit 47 is always set and the product is below 2^49
    fraction = (product >> (24 + carry)) & _FRACTION
    exponent = _exponent(a) + _exponent(b) + 1
    raised = exponent + carry if mac.name == "axfpm_fixed" else exponent
    return _assembled(a, b, _AXFPM_LEAST, exponent, raised, fraction)


def _axbf16(_mac: Mac, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    significand_a, significand_b = _significand(a) >> 16, _significand(b) >> 16
    low = (significand_a & 0x11) * significand_b
    high = (significand_a & 0xEE) * ((significand_b >> 3) & 0x11)
    product = low + (high << 4)
    fraction = (product >> (8 + (product >> 16))) & 0x7F
    exponent = _exponent(a) + _exponent(b) + 1
    return _assembled(a, b, _LEAST_NORMAL, exponent, exponent, fraction << 16)


def _mitchell(_mac: Mac, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = (_significand(a) & _FRACTION) + (_significand(b) & _FRACTION)
    exponent = _exponent(a) + _exponent(b)
    raised = exponent + (total >> _FRACTION_BITS)
    return _assembled(a, b, _LEAST_NORMAL, exponent, raised, total & _FRACTION)


def _assembled(
    a: np.ndarray,
    b: np.ndarray,
    least: int,
    exponent: np.ndarray,
    raised: np.ndarray,
    fraction: np.ndarray,
) -> np.ndarray:
    """float32 of a sign, an unbiased exponent before and after normalisation, and 23 bits."""
    sign = ((_bits(a) ^ _bits(b)) & np.uint32(_SIGN)).astype(np.int64)
    word = ((raised + _BIAS) << _FRACTION_BITS) | fraction
    word = np.where(raised > _BIAS, _INFINITY, word)
    zeros = [(_bits(x) & np.uint32(_MAGNITUDE)) < least for x in (a, b)]
    word = np.where((exponent < 1 - _BIAS) | zeros[0] | zeros[1], 0, word)
    infinite = np.isinf(a) | np.isinf(b)
    word = np.where(infinite, _INFINITY, word)
    result = _floats((word | sign).astype(np.uint32))
    undefined = np.isnan(a) | np.isnan(b) | (infinite & (zeros[0] | zeros[1]))
    return np.where(undefined, np.float32(np.nan), result)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)


def _floats(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words.astype(np.uint32)).view(np.float32).reshape(words.shape)


def _significand(x: np.ndarray) -> np.ndarray:
    """24 bits with the hidden one, as int64."""
    return (_bits(x) & np.uint32(_FRACTION)).astype(np.int64) | (1 << _FRACTION_BITS)


def _exponent(x: np.ndarray) -> np.ndarray:
    return ((_bits(x) >> np.uint32(_FRACTION_BITS)) & np.uint32(0xFF)).astype(np.int64) - _BIAS


_PRODUCTS: Dict[str, Callable[[Mac, np.ndarray, np.ndarray], np.ndarray]] = {
    "exact_fp32": _exact,
    "axfpm_faithful": _axfpm,
    "axfpm_fixed": _axfpm,
    "axbf16": _axbf16,
    "truncated": _truncated,
    "mitchell": _mitchell,
}
