"""The two 8-bit number formats of the GPU network, and weights packed in them."""

from __future__ import annotations

import dataclasses
from typing import Optional, Tuple

import torch
from torch import nn

__all__ = [
    "CHANNEL_STEP",
    "FORMATS",
    "STEM_PIXEL",
    "NumberFormat",
    "PackedWeight",
    "decode",
    "encode",
    "pack_conv",
    "pack_linear",
]

#: Channels are padded to whole blocks of the matrix product; what is added is zero.
CHANNEL_STEP = 64
#: The first layer has 3 channels: its window's rows are read as runs of pixels of 4 bytes.
STEM_PIXEL = 4
#: Bytes of such a run: a multiple of what one matrix instruction sums over.
_STEM_RUN = 32


@dataclasses.dataclass(frozen=True)
class NumberFormat:
    """`limit` is the largest magnitude used: symmetric, so int8 leaves -128 unused."""

    name: str
    limit: float
    dtype: torch.dtype


def _formats() -> Tuple[NumberFormat, ...]:
    found = [NumberFormat("int8", 127.0, torch.int8)]
    if hasattr(torch, "float8_e4m3fn"):
        found.append(NumberFormat("fp8", 448.0, torch.float8_e4m3fn))
    return tuple(found)


#: By name; fp8 (e4m3) where this torch has the type.
FORMATS = {each.name: each for each in _formats()}


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """`values` [K, R·S·C] with C contiguous, in the format; `scale` and `bias` [K], float32.

    `rows`, `columns`: the window (R, S) as the kernel walks it; `channels` is C, padded. The stem's
    window is R × 1 with C = S padded × 4: a run of whole pixels.
    """

    values: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor
    rows: int
    columns: int
    channels: int
    stride: int
    padding: int
    stem: bool


def encode(x: torch.Tensor, scale: torch.Tensor, form: NumberFormat) -> torch.Tensor:
    """x / scale in the format: half to even, saturating. `scale` broadcasts against x."""
    scaled = (x.float() / scale).clamp(-form.limit, form.limit)
    return (scaled.round() if form.dtype == torch.int8 else scaled).to(form.dtype)


def decode(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of what `encode` gave."""
    return q.float() * scale


def pack_conv(module: nn.Conv2d, form: NumberFormat) -> PackedWeight:
    """Weights of a convolution for the implicit matrix product, on the CPU."""
    weight = module.weight.detach().float().cpu()
    count, channels, rows, columns = weight.shape
    walked = weight.permute(0, 2, 3, 1)  # [K, R, S, C]
    stem = channels < STEM_PIXEL
    if stem:
        run = _whole(columns * STEM_PIXEL, _STEM_RUN)
        wide = torch.zeros(count, rows, run // STEM_PIXEL, STEM_PIXEL)
        wide[:, :, :columns, :channels] = walked
        walked, columns, depth = wide.reshape(count, rows, 1, run), 1, run
    else:
        depth = _whole(channels, CHANNEL_STEP)
        walked = nn.functional.pad(walked, (0, depth - channels))
    made = _whole(count, CHANNEL_STEP)
    values, scale, bias = _packed(walked.reshape(count, -1), module.bias, made, form)
    stride, padding = int(module.stride[0]), int(module.padding[0])
    return PackedWeight(values, scale, bias, rows, columns, depth, stride, padding, stem)


def pack_linear(module: nn.Linear, form: NumberFormat) -> PackedWeight:
    """A linear layer is a 1 × 1 convolution of one pixel; its outputs are not padded."""
    weight = module.weight.detach().float().cpu()
    depth = _whole(weight.shape[1], CHANNEL_STEP)
    rows = nn.functional.pad(weight, (0, depth - weight.shape[1]))
    values, scale, bias = _packed(rows, module.bias, weight.shape[0], form)
    return PackedWeight(values, scale, bias, 1, 1, depth, 1, 0, False)


def _packed(
    rows: torch.Tensor, bias: Optional[torch.Tensor], made: int, form: NumberFormat
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales and biases of `made` output channels; a channel of zeros has scale 1."""
    extra = made - rows.shape[0]
    rows = nn.functional.pad(rows, (0, 0, 0, extra))
    largest = rows.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / form.limit, torch.ones_like(largest))
    own = torch.zeros(made - extra) if bias is None else bias.detach().float().cpu()
    values = encode(rows, scale.view(-1, 1), form).contiguous()
    return values, scale, nn.functional.pad(own, (0, extra))


def _whole(size: int, step: int) -> int:
    """`size` rounded up to a multiple of `step`."""
    return -(-size // step) * step
