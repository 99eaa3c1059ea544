"""Layers for the tests of manual layers, and their results by definition."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from narrowgauge_kernels.mac import Mac, reference
from narrowgauge_lab.layers.manual.modules import ManualConv2d, ManualLinear

EXACT = ("exact_fp32", "truncated(23)")
FLOATS = ("exact_fp32", "axfpm", "axfpm_fixed", "axbf16", "truncated(5)", "mitchell")
#: Both signs, with and without structure, and one of four bits.
TABLES = ("exact_int8", "lut8x8:exact", "lut8x8:ama5", "lut8x8:ama5-signed", "lut8x8:mitchell",
          "lut8x8:drum-4-signed", "lut8x8:bam-2-4", "lut8x8:ama5-4x4")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """A convolution and its image [B, C, H, W]; `sizes`: stride, padding, dilation, groups."""

    name: str
    image: Tuple[int, int, int, int]
    outputs: int
    window: Tuple[int, int]
    sizes: Tuple[Any, Any, Any, int]
    mode: str = "zeros"

    def __str__(self) -> str:
        return self.name

    def layer(self, policy: str, **told: Any) -> ManualConv2d:
        """With weights of its own."""
        stride, padding, dilation, groups = self.sizes
        layer = ManualConv2d(
            self.image[1], self.outputs, self.window, stride, padding, dilation, groups, True,
            self.mode, policy=policy, **told,
        )  # fmt: skip
        layer.load_state_dict(self.plain().state_dict())
        return layer

    def plain(self) -> nn.Conv2d:
        stride, padding, dilation, groups = self.sizes
        torch.manual_seed(1)
        return nn.Conv2d(
            self.image[1], self.outputs, self.window, stride, padding, dilation, groups, True,
            self.mode,
        )  # fmt: skip

    def batch(self) -> torch.Tensor:
        return torch.randn(self.image, generator=torch.Generator().manual_seed(2))


SHAPES = (
    Shape("3x3", (2, 4, 6, 5), 3, (3, 3), (1, 1, 1, 1)),
    Shape("stride 2 and 3, not square", (2, 3, 9, 8), 4, (3, 2), ((2, 3), (2, 1), 1, 1)),
    Shape("dilation 2 and 3", (1, 2, 9, 10), 3, (3, 3), (1, (2, 0), (2, 3), 1)),
    Shape("groups", (2, 6, 5, 6), 4, (3, 3), (1, 1, 1, 2)),
    Shape("depthwise", (2, 4, 6, 6), 8, (3, 3), (2, 1, 1, 4)),
    Shape("1x1", (3, 5, 4, 3), 6, (1, 1), (1, 0, 1, 1)),
    Shape("padded around", (1, 2, 5, 5), 3, (3, 3), (1, 1, 1, 1), "circular"),
)


def linear(policy: str, inputs: int = 7, outputs: int = 5, **told: Any) -> ManualLinear:
    torch.manual_seed(1)
    return ManualLinear(inputs, outputs, policy=policy, **told)


def unfolded(x: np.ndarray, layer: nn.Conv2d, padding: float) -> np.ndarray:
    """[B, G, 1, taps, L] of an image that is padded with that value, where the layer pads."""
    down, right = (0, 0) if layer.padding_mode != "zeros" else layer.padding
    padded = np.pad(
        x, ((0, 0), (0, 0), (down, down), (right, right)), "constant", constant_values=padding
    )
    columns = nn.functional.unfold(
        torch.from_numpy(padded.astype(np.float32)), layer.kernel_size, layer.dilation, 0,
        layer.stride,
    )  # fmt: skip
    return columns.numpy().reshape(len(x), layer.groups, 1, -1, columns.shape[2])


def filters(weight: np.ndarray, groups: int) -> np.ndarray:
    """[1, G, outputs of a group, taps, 1]."""
    return weight.reshape(1, groups, len(weight) // groups, -1, 1)


def by_float_products(layer: ManualConv2d, x: torch.Tensor, mac: Mac) -> np.ndarray:
    """[B, O, L]: sums in float64 of the policy's products, without the bias."""
    columns = unfolded(x.numpy(), layer, 0.0)
    weight = filters(layer.weight.detach().numpy(), layer.groups)
    products = reference(mac, columns, weight).astype(np.float64)
    return products.sum(axis=3).reshape(len(x), layer.out_channels, -1)


def by_table(
    layer: ManualConv2d,
    x: np.ndarray,
    weight: np.ndarray,
    table: np.ndarray,
    offsets: Tuple[int, int],
    zero: int,
) -> np.ndarray:
    """[B, O, L]: sums of table products of integer codes."""
    columns = unfolded(x, layer, zero).astype(np.int64) + offsets[0]
    places = filters(weight, layer.groups).astype(np.int64) + offsets[1]
    products = table.astype(np.int64)[columns, places]
    return products.sum(axis=3).reshape(len(x), layer.out_channels, -1)


def differences(
    function: Any, x: torch.Tensor, grad: torch.Tensor, at: Sequence[int]
) -> torch.Tensor:
    """Central differences with a step of 1 of Σ grad · function(x), for these elements of x.
    `function`: of many x at a time, [N, ...]."""
    steps = torch.eye(x.numel())[at].reshape(-1, *x.shape)
    ends = [(function(x + sign * steps).double() * grad).flatten(1).sum(1) for sign in (1, -1)]
    return (ends[0] - ends[1]) / 2
