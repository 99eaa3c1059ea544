"""What a convolution or a linear layer is, apart from its tensors."""

from __future__ import annotations

import dataclasses
from typing import Sequence, Tuple, Union

import torch

from narrowgauge_contract.errors import UnknownNameError, UsageError

__all__ = ["KINDS", "Operand", "Problem", "Quantised"]

KINDS = ("conv2d", "linear")
Pair = Tuple[int, int]
Shape = Tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A convolution over [B, C, H, W], or a linear layer over [B, C]. Padding is of zeros; a linear
    layer has ones, no padding and one group."""

    kind: str
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("kind of layer", self.kind, KINDS)
        plain = ((1, 1), (0, 0), (1, 1), 1)
        if self.kind == "linear" and dataclasses.astuple(self)[1:] != plain:
            raise UsageError(f"a linear layer has no stride, padding, dilation or groups: {self}")

    def output_shape(self, input_shape: Sequence[int], weight_shape: Sequence[int]) -> Shape:
        """Of the forward pass; raises UsageError where the window is larger than the image."""
        if self.kind == "linear":
            return (*input_shape[:-1], weight_shape[0])
        sides = tuple(
            (size + 2 * pad - step * (window - 1) - 1) // stride + 1
            for size, pad, step, window, stride in zip(
                input_shape[2:], self.padding, self.dilation, weight_shape[2:], self.stride
            )
        )
        if min(sides) < 1:
            raise UsageError(
                f"a window of {tuple(weight_shape[2:])} does not fit into an image of "
                f"{tuple(input_shape[2:])}",
                why=f"{self}",
            )
        return (input_shape[0], weight_shape[0], *sides)

    def macs(self, input_shape: Sequence[int], weight_shape: Sequence[int]) -> int:
        """Products that are summed, of any one of the three passes; padding counts."""
        total = 1
        for size in (*self.output_shape(input_shape, weight_shape), *weight_shape[1:]):
            total *= size
        return total


@dataclasses.dataclass(frozen=True)
class Quantised:
    """`values` (int8, [B, C, …]) times `scale` (float32, [C]), which stands for dimension 1. A
    channel whose scale is NaN or infinite had such a value and stands for NaN."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The values that it stands for, with the strides of `values`."""
        ones = (1,) * (self.values.dim() - 2)
        return (self.values.float() * self.scale.view(1, -1, *ones)).to(dtype)


#: What a pass takes: a tensor of any float type, or one that was quantised before it was sent.
Operand = Union[torch.Tensor, Quantised]
