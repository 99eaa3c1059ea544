"""Convolution and linear over 8-bit codes with a multiplier of your own: references and functions.

| name   | shape                | meaning                                                    |
|--------|----------------------|------------------------------------------------------------|
| x      | [N, C, H, W]         | activation codes, int8 or uint8 as the multiplier says     |
| weight | [O, C/groups, R, S]  | weight codes, int8 or uint8 as the multiplier says         |
| x_zero | –                    | the code of padding pixels, multiplied like any other      |
| result | [N, O, Ho, Wo]       | int32: the sum of products over C/groups, R and S          |

Of `linear_codes` they are x [..., K], weight [O, K] and result [..., O]. Operands have any strides.

A product is `table[a, b]`, activation first: operands need not commute. There is no bias and no
scale: those are the layer's. A convolution's result has the memory format of x. Sums are exact,
so the bits depend neither on the kernel, nor on threads, nor on the device; a sum that int32 might
not hold, K · max|product| ≥ 2³¹, is refused.

A multiplier is a table of all 65,536 products (`lut8x8`), the exact product (`exact_int8`), or a
sum of masked products (`structured`), which runs as so many exact products.
"""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Sequence, Tuple

import torch

from narrowgauge_kernels.errors import KernelsError
from narrowgauge_kernels.library import require

__all__ = [
    "CodeMac",
    "CodeMacError",
    "Term",
    "conv2d_codes",
    "conv2d_codes_example",
    "conv2d_codes_ref",
    "linear_codes",
    "linear_codes_example",
    "linear_codes_ref",
]

#: Of `CodeMac.name`.
EXACT, TABLE, STRUCTURED = "exact_int8", "lut8x8", "structured"

_CODES = 256


class CodeMacError(KernelsError):
    """A multiplier over codes contradicts itself, or is given codes of another type."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class Term:
    """coefficient · ((a & a_mask) >> a_shift) · ((b & b_mask) >> b_shift).

    Masks are of the code's 8 bits (0…255; -128…-1 mean the same bits), shifts are arithmetic. Of a
    signed code bit 7 is the sign, so a factor is an int8; of an unsigned one it is a uint8.
    """

    a_mask: int
    b_mask: int
    coefficient: int = 1
    a_shift: int = 0
    b_shift: int = 0

    def __post_init__(self) -> None:
        for name, mask in (("a_mask", self.a_mask), ("b_mask", self.b_mask)):
            if not -128 <= mask <= 255:
                raise CodeMacError(f"{name} is {mask}; it must be a mask of 8 bits, -128 to 255")
        for name, shift in (("a_shift", self.a_shift), ("b_shift", self.b_shift)):
            if not 0 <= shift <= 7:
                raise CodeMacError(f"{name} is {shift}; it must be 0 to 7")
        if not -(2**31) < self.coefficient < 2**31:
            raise CodeMacError(f"coefficient is {self.coefficient}; it must be an int32")

    def numbers(self) -> Tuple[int, int, int, int, int]:
        """As the operators take it."""
        masks = (self.a_mask & 0xFF, self.b_mask & 0xFF)
        return (*masks, self.coefficient, self.a_shift, self.b_shift)


@dataclasses.dataclass(frozen=True, eq=False)
class CodeMac:
    """How two codes multiply.

    `table` is int32 [256, 256], row = activation code + 128 where signed, column = weight code
    likewise: needed by `lut8x8`, and where given beside terms it must be their table. Raises
    CodeMacError where the parts do not fit.
    """

    name: str
    table: Optional[torch.Tensor] = None
    a_signed: bool = True
    b_signed: bool = True
    terms: Tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in (EXACT, TABLE, STRUCTURED):
            raise CodeMacError(
                f"no multiplier over codes is called {self.name!r}",
                next_step=f"take one of {EXACT}, {TABLE}, {STRUCTURED}",
            )
        if (self.name == STRUCTURED) != bool(self.terms):
            raise CodeMacError(
                f"{self.name} has {len(self.terms)} terms", why=f"terms are what {STRUCTURED} is"
            )
        if self.table is None:
            if self.name == TABLE:
                raise CodeMacError(f"{TABLE} needs a table")
        else:
            self._check_table(self.table)
        # What every call needs; frozen, so set once here.
        products = self._formula() if self.table is None else self.table.detach().cpu().long()
        largest = int(products.abs().max())
        if largest >= 2**31:
            raise CodeMacError(f"a product of this multiplier reaches {largest}, beyond int32")
        object.__setattr__(self, "_products", products)
        object.__setattr__(self, "_largest", largest)
        object.__setattr__(self, "_on_device", {})

    def _check_table(self, table: torch.Tensor) -> None:
        if table.dtype != torch.int32 or tuple(table.shape) != (_CODES, _CODES):
            raise CodeMacError(
                f"the table is {table.dtype} of shape {tuple(table.shape)}",
                why="a table of products is torch.int32 of shape (256, 256)",
            )
        if self.name != TABLE:
            wrong = int((table.detach().cpu().long() != self._formula()).sum())
            if wrong:
                raise CodeMacError(
                    f"the table and what {self.name} computes differ in {wrong} of 65,536 products",
                    next_step=f"give the multiplier as {TABLE}, or other terms",
                )

    def _formula(self) -> torch.Tensor:
        """int64 [256, 256] of `exact_int8` and `structured`."""
        rows, columns = self.codes(self.a_signed)[:, None], self.codes(self.b_signed)[None, :]
        if not self.terms:
            return rows * columns
        total = torch.zeros(_CODES, _CODES, dtype=torch.int64)
        for term in self.terms:
            left = _factor(rows, term.a_mask, term.a_shift, self.a_signed)
            right = _factor(columns, term.b_mask, term.b_shift, self.b_signed)
            total = total + term.coefficient * (left * right)
        return total

    @staticmethod
    def codes(signed: bool) -> torch.Tensor:
        """int64 [256]: the codes in the order of a table."""
        return torch.arange(_CODES) - (128 if signed else 0)

    @property
    def products(self) -> torch.Tensor:
        """int64 [256, 256] on the CPU: every product, by table or by formula."""
        return self._products  # type: ignore[attr-defined, no-any-return]

    @property
    def largest(self) -> int:
        """The greatest magnitude of a product."""
        return self._largest  # type: ignore[attr-defined, no-any-return]

    def arguments(self, device: torch.device) -> Tuple[Optional[torch.Tensor], List[int], int]:
        """`table`, `terms` and `largest` as the operators take them, the table on the device, to
        which it is copied once."""
        numbers = [number for term in self.terms for number in term.numbers()]
        if self.name != TABLE:
            return None, numbers, self.largest
        copies = self._on_device  # type: ignore[attr-defined]
        if device not in copies:
            copies[device] = self.products.to(torch.int32).to(device)
        return copies[device], numbers, self.largest

    def check_codes(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """CodeMacError where the operands are not of this multiplier's types."""
        for name, codes, signed in (("x", x, self.a_signed), ("weight", weight, self.b_signed)):
            wanted = torch.int8 if signed else torch.uint8
            if codes.dtype != wanted:
                raise CodeMacError(f"{name} is {codes.dtype}; this multiplier takes {wanted}")


def _factor(codes: torch.Tensor, mask: int, shift: int, signed: bool) -> torch.Tensor:
    kept = (codes & 0xFF) & (mask & 0xFF)
    if signed:
        kept = torch.where(kept >= 128, kept - _CODES, kept)
    # Not >>, which torch 1.8 makes a division that rounds toward zero.
    return torch.div(kept, 2**shift, rounding_mode="floor")


def conv2d_codes_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    mac: CodeMac,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    x_zero: int = 0,
) -> torch.Tensor:
    """What `conv2d_codes` should give, product by product from the table, in int64."""
    mac.check_codes(x, weight)
    images, channels, height, width = x.shape
    outputs, depth, rows, columns = weight.shape
    padded = torch.full(
        (images, channels, height + 2 * padding[0], width + 2 * padding[1]), x_zero
    ).long()
    padded[:, :, padding[0] : padding[0] + height, padding[1] : padding[1] + width] = x.long()
    out_height = (padded.shape[2] - dilation[0] * (rows - 1) - 1) // stride[0] + 1
    out_width = (padded.shape[3] - dilation[1] * (columns - 1) - 1) // stride[1] + 1
    result = torch.zeros(images, outputs, out_height, out_width, dtype=torch.int64)
    factors = weight.long().reshape(1, groups, outputs // groups, depth, rows, columns, 1, 1)
    for row in range(rows):
        for column in range(columns):
            top, left = row * dilation[0], column * dilation[1]
            seen = padded[
                :,
                :,
                top : top + (out_height - 1) * stride[0] + 1 : stride[0],
                left : left + (out_width - 1) * stride[1] + 1 : stride[1],
            ].reshape(images, groups, 1, depth, out_height, out_width)
            for channel in range(depth):
                taken = _products(
                    mac, seen[:, :, :, channel], factors[:, :, :, channel, row, column]
                )
                result += taken.reshape(result.shape)
    return result


def linear_codes_ref(x: torch.Tensor, weight: torch.Tensor, mac: CodeMac) -> torch.Tensor:
    """What `linear_codes` should give, product by product from the table, in int64."""
    mac.check_codes(x, weight)
    result = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.int64)
    for k in range(weight.shape[1]):
        result += _products(mac, x[..., k : k + 1].long(), weight[:, k].long())
    return result


def _products(mac: CodeMac, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    row = a + (128 if mac.a_signed else 0)
    column = b + (128 if mac.b_signed else 0)
    return mac.products.reshape(-1)[row * _CODES + column]


def conv2d_codes(
    x: torch.Tensor,
    weight: torch.Tensor,
    mac: CodeMac,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    x_zero: int = 0,
) -> torch.Tensor:
    """A convolution of codes, as in the module's table; int32, not differentiable.

    Raises RuntimeError naming both sides where shapes or devices disagree or a sum may overflow,
    CodeMacError where the codes are not of the multiplier's types, and KernelsNotBuiltError, with
    the command that builds, when there are no kernels for this torch and device.
    """
    require(x.device.type)
    mac.check_codes(x, weight)
    geometry = (list(stride), list(padding), list(dilation), groups)
    return torch.ops.narrowgauge.conv2d_codes(
        x, weight, *mac.arguments(x.device), *geometry, x_zero
    )


def linear_codes(x: torch.Tensor, weight: torch.Tensor, mac: CodeMac) -> torch.Tensor:
    """x · weightᵀ of codes, as in the module's table; int32, not differentiable.

    Raises as `conv2d_codes`.
    """
    require(x.device.type)
    mac.check_codes(x, weight)
    return torch.ops.narrowgauge.linear_codes(x, weight, *mac.arguments(x.device))


def _example_mac(generator: torch.Generator) -> CodeMac:
    table = torch.randint(-32768, 32768, (_CODES, _CODES), generator=generator, dtype=torch.int32)
    return CodeMac(TABLE, table, a_signed=False, b_signed=True)


def conv2d_codes_example(generator: torch.Generator) -> Tuple[Any, ...]:
    """Inputs for the self-check: a random table, of sizes that leave remainders in blockings."""
    x = torch.randint(0, 256, (2, 6, 13, 11), generator=generator, dtype=torch.uint8)
    weight = torch.randint(-128, 128, (10, 3, 3, 2), generator=generator, dtype=torch.int8)
    mac = _example_mac(generator)
    return x, weight, mac, (2, 1), (1, 2), (1, 2), 2, 7


def linear_codes_example(generator: torch.Generator) -> Tuple[Any, ...]:
    """Inputs for the self-check: a sum of two masked products."""
    x = torch.randint(-128, 128, (5, 37), generator=generator, dtype=torch.int8)
    weight = torch.randint(-128, 128, (11, 37), generator=generator, dtype=torch.int8)
    terms = (Term(0xF0, 0xFF), Term(0x0F, 0xFC, coefficient=3, b_shift=2))
    return x, weight, CodeMac(STRUCTURED, terms=terms)
