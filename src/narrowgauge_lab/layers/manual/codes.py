"""A layer whose products are of 8-bit codes, forward and backward.

Of affine operands the sum of products T of their codes q is put right exactly, in integers:

    Σ (qa - za)·(qw - zw)  ~  T - za · Σ qw - zw · Σ (qa - za)

where the approximate multiplier forms T and nothing else. Padding pixels are the code of 0. The sum
is rounded to float32 once, times the product of the scales; then the bias is added.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Optional, Sequence, Tuple

import torch

from narrowgauge_kernels.codes import CodeMac
from narrowgauge_lab.layers.manual import gradients, kernels
from narrowgauge_lab.layers.manual.factors import Factor, exact, factored_sums
from narrowgauge_lab.layers.manual.gradients import Slopes
from narrowgauge_lab.layers.manual.quantise import (
    Coded,
    Format,
    Scales,
    coded_input,
    coded_weight,
)
from narrowgauge_lab.layers.passes import Problem

__all__ = ["CodeLayer"]

#: The greatest product of two codes of a byte.
_GREATEST = 255 * 255
#: Where a table has the code 0 of a signed operand.
_MIDDLE = 128
Saved = Sequence[Optional[torch.Tensor]]


@dataclasses.dataclass(frozen=True, eq=False)
class CodeLayer:
    """`largest`: magnitude of any product of the multiplier. `slopes`: gives those of the table for
    a local gradient, None for a straight-through one. `factors`: what to form products by, where it
    is not `mac` itself."""

    problem: Problem
    form: Format
    mac: CodeMac
    largest: int
    scales: Scales
    slopes: Optional[Callable[[], Slopes]] = None
    factors: Tuple[Factor, ...] = ()

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        wanted: Tuple[bool, bool],
    ) -> Tuple[torch.Tensor, Saved]:
        """The result, float32, and what `backward` needs for the gradients by input and weight that
        are `wanted`."""
        form, scales = self.form, self.scales
        image = coded_input(x, form, scales.input, differentiated=wanted[0])
        kernel = coded_weight(weight, form, scales.weight, differentiated=wanted[1])
        result = self._sums(image, kernel).float()
        result.mul_(self._along(image.scale * kernel.scale))
        if bias is not None:
            result.add_(self._along(bias))
        return result, (*image.tensors(), *kernel.tensors()) if any(wanted) else ()

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        wanted: Tuple[bool, bool],
        shapes: Tuple[Sequence[int], Sequence[int]],
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        """The gradients by input and weight that are wanted; zero where a value had saturated."""
        del shapes  # the codes have them
        image, kernel = _coded(saved[:4]), _coded(saved[4:])
        slopes = None if self.slopes is None else self.slopes()
        by_input = by_weight = None
        if wanted[0]:
            by_input = self._by_input(grad, image, kernel, slopes)
            if image.inside is not None:
                by_input = by_input * image.inside
        if wanted[1]:
            by_weight = self._by_weight(grad, image, kernel, slopes)
            if kernel.inside is not None:
                by_weight = by_weight * kernel.inside
        return by_input, by_weight

    def _sums(self, image: Coded, kernel: Coded) -> torch.Tensor:
        """What stands for the sums of products of centred codes, int32, or int64 where int32 might
        not hold it."""
        zero = self._padding_code(image)
        sums = self._products(image.codes, kernel.codes, zero)
        if image.signed and kernel.signed:
            return sums
        depth = kernel.codes[0].numel()
        if depth * (self.largest + 2 * _GREATEST) >= 2**31:
            sums = sums.long()
        if not image.signed:
            of_weights = kernel.codes.sum(dim=list(range(1, kernel.codes.dim())), dtype=sums.dtype)
            sums = sums - self._along(of_weights * image.zero)
        if not kernel.signed:
            sums = self._without_weights_zero(sums, image, kernel, zero)
        return sums

    def _products(self, x: torch.Tensor, weight: torch.Tensor, zero: int) -> torch.Tensor:
        if self.factors:
            return factored_sums(self.problem, x, weight, self.factors, zero)
        return kernels.code_sums(self.problem, x, weight, self.mac, zero)

    def _without_weights_zero(
        self, sums: torch.Tensor, image: Coded, kernel: Coded, zero: int
    ) -> torch.Tensor:
        """`sums` less zw · Σ (qa - za): the windows' own sums are a product with ones, one output
        channel for each group."""
        groups = self.problem.groups
        ones = torch.ones_like(kernel.codes[:groups])
        windows = kernels.code_sums(
            self.problem, image.codes, ones, exact(image.signed, False), zero
        )
        windows = windows.to(sums.dtype) - ones[0].numel() * image.zero
        # [B, G, outputs of a group, ...], and [B, G, 1, ...].
        apart = sums.reshape(sums.shape[0], groups, -1, *sums.shape[2:])
        shape = (1, groups, -1, *[1] * (sums.dim() - 2))
        zeros = kernel.zero.expand(sums.shape[1]).reshape(shape)
        return (apart - windows.unsqueeze(2) * zeros).reshape(sums.shape)

    def asks_for_zero(self) -> bool:
        """Whether `forward` reads back what the padding's code is: on a GPU, it waits for it."""
        affine = not self.form.input_signed and self.scales.input is None
        return affine and any(self.problem.padding)

    def _padding_code(self, image: Coded) -> int:
        if self.asks_for_zero():
            return int(image.zero)
        return self.scales.input_zero

    def _by_input(
        self, grad: torch.Tensor, image: Coded, kernel: Coded, slopes: Optional[Slopes]
    ) -> torch.Tensor:
        problem, shape = self.problem, image.codes.shape
        if slopes is None:
            return gradients.by_input(problem, grad, kernel.values(), shape)
        scaled = grad * self._along(kernel.scale)
        x, weight = _places(image), _places(kernel)
        result = gradients.split_by_input(slopes.by_input, problem, scaled, x, weight)
        if not kernel.signed:
            zeros = kernel.along(kernel.zero).float().expand(kernel.codes.shape)
            result = result - gradients.by_input(problem, scaled, zeros.contiguous(), shape)
        return result

    def _by_weight(
        self, grad: torch.Tensor, image: Coded, kernel: Coded, slopes: Optional[Slopes]
    ) -> torch.Tensor:
        problem, shape = self.problem, kernel.codes.shape
        if slopes is None:
            return gradients.by_weight(problem, grad, image.values(), shape)
        x, weight = _places(image), _places(kernel)
        padding = image.zero.long() + (_MIDDLE if image.signed else 0)
        result = gradients.split_by_weight(slopes.by_weight, problem, grad, x, weight, padding)
        if not image.signed:
            sums = gradients.over_channels(grad) * image.zero
            result = result - sums.reshape(-1, *[1] * (len(shape) - 1))
        return result * image.scale

    def _along(self, values: torch.Tensor) -> torch.Tensor:
        """One value, or one per output channel, shaped to meet dimension 1 of a result."""
        if values.dim() == 0 or self.problem.kind == "linear":
            return values
        return values.reshape(-1, 1, 1)


def _coded(saved: Saved) -> Coded:
    codes, scale, zero, inside = saved
    assert codes is not None
    assert scale is not None
    assert zero is not None
    return Coded(codes, scale, zero, inside)


def _places(operand: Coded) -> torch.Tensor:
    """Where codes are in a table's rows or columns."""
    places = operand.codes.long()
    return places.add_(_MIDDLE) if operand.signed else places
