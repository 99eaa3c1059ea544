"""Weights in the order and format in which the kernels read them."""

from __future__ import annotations

import dataclasses
from typing import Optional, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_lab.engines.own.gpu.formats import NumberFormat, encode, for_products

__all__ = [
    "CHANNEL_STEP",
    "STEM_PIXEL",
    "PackedWeight",
    "pack_conv",
    "pack_depthwise",
    "pack_linear",
]

#: Weights' channels are padded to whole blocks of the matrix product; what is added is zero.
CHANNEL_STEP = 64
#: A first layer has 1 to 3 channels: its window's rows are read as runs of pixels of 4 elements.
STEM_PIXEL = 4


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """`values` [K, R·S·depth] in the format, depth contiguous (depthwise: [R·S, K]); `scale` and
    `bias` [K], float32.

    `channels`: how many of a position's `depth` elements are real. `rows`, `columns`: the window
    (R, S) as the kernel walks it; a stem's is R × 1 with a run of whole pixels as its depth, and
    `window_width` is what its S was.
    """

    values: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor
    rows: int
    columns: int
    channels: int
    depth: int
    stride: int
    padding: int
    window_width: int
    stem: bool = False

    def to(self, device: torch.device) -> PackedWeight:
        values, scale, bias = (each.to(device) for each in (self.values, self.scale, self.bias))
        return dataclasses.replace(self, values=values, scale=scale, bias=bias)


def pack_conv(module: nn.Conv2d, form: NumberFormat, *, stem: bool) -> PackedWeight:
    """Weights of a convolution for the implicit matrix product, on the module's device."""
    weight = for_products(module.weight.detach().float(), form)
    count, channels, rows, columns = weight.shape
    width = columns
    walked = weight.permute(0, 2, 3, 1)  # [K, R, S, C]
    if stem:
        run = max(_power(columns * STEM_PIXEL), form.least_depth)
        wide = weight.new_zeros(count, rows, run // STEM_PIXEL, STEM_PIXEL)
        wide[:, :, :columns, :channels] = walked
        walked, columns, channels, depth = wide.reshape(count, rows, 1, run), 1, run, run
    else:
        depth = _whole(channels, CHANNEL_STEP)
        walked = nn.functional.pad(walked, (0, depth - channels))
    values, scale, bias = _packed(walked.reshape(count, -1), module.bias, form)
    stride, padding = int(module.stride[0]), int(module.padding[0])
    return PackedWeight(
        values, scale, bias, rows, columns, channels, depth, stride, padding, width, stem
    )


def pack_depthwise(module: nn.Conv2d, form: NumberFormat) -> PackedWeight:
    """Weights of a convolution with one channel a group: [R·S, C]."""
    weight = module.weight.detach().float()
    count, _, rows, columns = weight.shape
    values, scale, bias = _packed(weight.reshape(count, -1), module.bias, form)
    stride, padding = int(module.stride[0]), int(module.padding[0])
    return PackedWeight(
        values.t().contiguous(), scale, bias, rows, columns, count, 1, stride, padding, columns
    )


def pack_linear(module: nn.Linear, form: NumberFormat, source: Sequence[int]) -> PackedWeight:
    """A linear layer as a 1 × 1 convolution of one pixel.

    `source`: (C, H, W) of what was flattened before it. Its columns are in that order; activations
    lie pixel by pixel, so they are put into the order (H, W, C).
    """
    weight = for_products(module.weight.detach().float(), form)
    channels, height, width = source
    ordered = weight.view(-1, channels, height, width).permute(0, 2, 3, 1)
    rows = ordered.reshape(weight.shape[0], -1)
    depth = _whole(rows.shape[1], CHANNEL_STEP)
    values, scale, bias = _packed(
        nn.functional.pad(rows, (0, depth - rows.shape[1])), module.bias, form
    )
    return PackedWeight(values, scale, bias, 1, 1, rows.shape[1], depth, 1, 0, 1)


def _packed(
    rows: torch.Tensor, bias: Optional[torch.Tensor], form: NumberFormat
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales and biases, a row per output channel; a channel of zeros has scale 1."""
    own = rows.new_zeros(rows.shape[0]) if bias is None else bias.detach().float()
    scale = torch.ones_like(rows[:, 0])
    if form.scaled:
        largest = rows.abs().amax(dim=1)
        scale = torch.where(largest > 0, largest / form.limit, scale)
    return encode(rows, scale.view(-1, 1), form).contiguous(), scale, own.clone()


def _whole(size: int, step: int) -> int:
    """`size` rounded up to a multiple of `step`."""
    return -(-size // step) * step


def _power(size: int) -> int:
    """`size` rounded up to a power of two."""
    return 1 << (size - 1).bit_length()
