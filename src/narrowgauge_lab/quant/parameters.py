"""Scale and zero point of a range: x ~ (q - zero_point) · scale, with q in [quant_min, quant_max].

After arXiv 2004.09602: a symmetric range has zero point 0 and signed integers; an affine one has
unsigned integers and always contains 0, so that padding and ReLU stay exact.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, Tuple

import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.errors import CalibrationError

__all__ = ["LEAST_SCALE", "QuantParams", "choose", "integer_range", "parameters_of"]

#: The smallest normal float32: the reciprocal of every scale is finite.
LEAST_SCALE = 2.0**-126


def integer_range(bits: int, symmetric: bool, narrow: bool) -> Tuple[int, int]:
    """The integers of a format, both ends included.

    Symmetric: signed, [-2^(bits-1), 2^(bits-1) - 1]; affine: unsigned, [0, 2^bits - 1]. A narrow
    range leaves the lowest out, which makes a symmetric one symmetric indeed.
    """
    if not 2 <= bits <= 8:
        raise BadValueError(f"{bits} bits", next_step="give 2 to 8 bits")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    return low + int(narrow), high


@dataclasses.dataclass(frozen=True, eq=False)
class QuantParams:
    """How a tensor is quantised. Per tensor `axis` is None and `scale` and `zero_point` have no
    dimension; per channel they have one entry per index of dimension `axis`.

    `scale` is float32, positive and normal; `zero_point` is int32.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor
    bits: int
    axis: Optional[int]
    symmetric: bool
    narrow: bool

    @property
    def quant_min(self) -> int:
        return integer_range(self.bits, self.symmetric, self.narrow)[0]

    @property
    def quant_max(self) -> int:
        return integer_range(self.bits, self.symmetric, self.narrow)[1]

    def to(self, device: torch.device) -> QuantParams:
        """The same parameters on another device."""
        return dataclasses.replace(
            self, scale=self.scale.to(device), zero_point=self.zero_point.to(device)
        )

    def quantize(self, x: torch.Tensor) -> torch.Tensor:
        """The integers of `x`, int32: ties to even, saturated at both ends. NaN is refused."""
        if bool(torch.isnan(x).any()):
            raise CalibrationError(
                "cannot quantise NaN",
                why="no integer stands for it",
                next_step="find out where the NaN comes from before quantising",
            )
        return self._shifted(x).clamp_(self.quant_min, self.quant_max).to(torch.int32)

    def codes(self, x: torch.Tensor) -> torch.Tensor:
        """`quantize` in a byte each, int8 where symmetric and else uint8, without a look at the
        values, which on a GPU would be waited for: NaN becomes any code."""
        code = torch.int8 if self.symmetric else torch.uint8
        return self._shifted(x).clamp_(self.quant_min, self.quant_max).to(code)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        """Where `x` does not saturate, bool; NaN does not."""
        shifted = self._shifted(x)
        return ~((shifted < self.quant_min) | (shifted > self.quant_max))

    def dequantize(self, q: torch.Tensor) -> torch.Tensor:
        """The float32 values of the integers `q`."""
        return (q - self._along(self.zero_point, q)).float() * self._along(self.scale, q)

    def _shifted(self, x: torch.Tensor) -> torch.Tensor:
        """The rounded integers before they saturate, float32 in memory of their own."""
        scaled = x.float() * (1.0 / self._along(self.scale, x))
        scaled.round_()
        return scaled if self.symmetric else scaled.add_(self._along(self.zero_point, x))

    def _along(self, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`values` shaped to broadcast along `axis` of `x`."""
        if self.axis is None:
            return values
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return values.reshape(shape)


def choose(
    extent: Tuple[torch.Tensor, torch.Tensor],
    bits: int = 8,
    symmetric: bool = True,
    narrow: bool = False,
    axis: Optional[int] = None,
) -> QuantParams:
    """The parameters for values in [low, high], the `range()` of an observer.

    The range is first widened to contain 0. Where nothing is left (all values were 0) the scale is
    1, so that zeros stay zeros. A range too short for a normal float32 scale gets the least one.
    Raises CalibrationError where an end is not finite, BadValueError where low is above high.
    """
    low, high = (end.detach() for end in extent)
    if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
        raise CalibrationError(
            "a range to quantise has an end that is not finite",
            why="an infinite range has no step, and NaN is no range",
            next_step="calibrate with finite data",
        )
    if bool((low > high).any()):
        raise BadValueError("a range to quantise ends before it begins")
    return parameters_of((low, high), bits, symmetric, narrow, axis)


def parameters_of(
    extent: Tuple[torch.Tensor, torch.Tensor],
    bits: int = 8,
    symmetric: bool = True,
    narrow: bool = False,
    axis: Optional[int] = None,
) -> QuantParams:
    """`choose` without a look at the range, which on a GPU would be waited for: where an end is not
    finite, the scale is NaN and the zero point the least integer or 0."""
    low, high = (end.detach().double() for end in extent)
    quant_min, quant_max = integer_range(bits, symmetric, narrow)
    finite = torch.isfinite(low) & torch.isfinite(high)
    nothing = torch.zeros_like(low)
    low = torch.where(finite, low, nothing).clamp(max=0.0)
    high = torch.where(finite, high, nothing).clamp(min=0.0)
    span = torch.max(-low, high) if symmetric else high - low
    steps = quant_max if symmetric else quant_max - quant_min
    scale = torch.where(span > 0, (span / steps).clamp(min=LEAST_SCALE), torch.ones_like(span))
    zero_point = torch.zeros_like(scale)
    if not symmetric:
        shift = torch.round(low / scale.float().double())
        zero_point = (quant_min - shift).clamp(quant_min, quant_max)
    scale = torch.where(finite, scale, torch.full_like(scale, float("nan"))).float()
    return QuantParams(scale, zero_point.to(torch.int32), bits, axis, symmetric, narrow)
