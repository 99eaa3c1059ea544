"""Numbers of 8 bits with a scale per channel.

A channel's scale is its largest magnitude over the largest of the format; one of a channel of zeros
is 1. A gradient has the largest scale in all its channels: the product by the input sums over them,
so that scales of their own would go into the weight, and small ones be lost in its rounding. A
channel that holds NaN or an infinity has that for its scale, and whatever is made of it is NaN.
int8 is that of the wire: half to even, or stochastically where a seed is given, by a hash of the
seed and of the element's place. fp8 is rounded to nearest and saturates.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Dict, Optional, Tuple

import torch

from narrowgauge_kernels.library import has_kernels
from narrowgauge_kernels.wire import pack_int8, pack_int8_ref
from narrowgauge_lab.layers.passes.problem import Operand, Quantised
from narrowgauge_lab.layers.passes.seeds import Seed, SeedAt

__all__ = ["FORMATS", "LEAST_SCALE", "Format", "folded", "quantise", "recast"]

#: The reciprocal of a scale has to be a float32.
LEAST_SCALE = 2.0**-126


@dataclasses.dataclass(frozen=True)
class Format:
    """`limit`: the largest magnitude in use; int8 is symmetric and leaves -128 out."""

    name: str
    dtype: torch.dtype
    limit: float


def _formats() -> Dict[str, Format]:
    found = [Format("int8", torch.int8, 127.0)]
    if hasattr(torch, "float8_e4m3fn"):
        found += [
            Format("e4m3", torch.float8_e4m3fn, 448.0),
            Format("e5m2", torch.float8_e5m2, 57344.0),
        ]
    return {each.name: each for each in found}


#: By name; the two of float8 where this torch has them.
FORMATS = _formats()


def quantise(
    x: Operand, form: Format, seed: Optional[Seed] = None, *, whole: bool = False
) -> Quantised:
    """`x` in the format; `whole`: by one scale for all channels. What came quantised keeps its
    scales, and its values are rounded where they are int8 and fp8 is asked for. Waits for a seed
    that is on the device."""
    if isinstance(x, Quantised):
        return recast(x, form)
    wide = x.detach()
    if form.dtype == torch.int8:
        wide = wide if wide.dtype in _PACKED else wide.float()
        pack = pack_int8 if _packs(wide.device.type) else pack_int8_ref
        number = seed.value() if isinstance(seed, SeedAt) else seed
        if not whole or not wide.numel():
            return Quantised(*pack(wide, number))
        values, scale = pack(wide.reshape(wide.shape[0], 1, -1), number)
        return Quantised(values.reshape(wide.shape), scale.expand(wide.shape[1]).contiguous())
    wide = wide.float()
    largest = wide.abs().amax(dim=[at for at in range(x.dim()) if at != 1])
    if whole and largest.numel():
        largest = largest.amax().expand_as(largest)
    scale = _scale_of(largest, form)
    steps = wide * scale.reciprocal().view(1, -1, *(1,) * (x.dim() - 2))
    return Quantised(_rounded(steps, form), scale)


#: What the wire's kernels read.
_PACKED = (torch.float32, torch.float16, torch.bfloat16)


@functools.lru_cache(maxsize=None)
def _packs(kind: str) -> bool:
    """Whether the wire's compiled kernels are at hand; they give the bits of their reference."""
    return has_kernels(kind)


def recast(x: Quantised, form: Format) -> Quantised:
    """The same scales, and values in the format: int8 is whole numbers, which fp8 rounds."""
    if x.values.dtype == form.dtype:
        return x
    return Quantised(x.values.float().to(form.dtype), x.scale)


def _scale_of(largest: torch.Tensor, form: Format) -> torch.Tensor:
    # By a tensor: CUDA multiplies by the reciprocal of a number, which rounds differently.
    scale = largest / torch.full_like(largest, form.limit)
    # Comparisons keep NaN; clamp of torch 1.8 does not everywhere.
    scale = torch.where(scale < LEAST_SCALE, torch.full_like(scale, LEAST_SCALE), scale)
    return torch.where(largest == 0, torch.ones_like(scale), scale)


def _rounded(steps: torch.Tensor, form: Format) -> torch.Tensor:
    # Of a channel with NaN the scale tells; its values are of no account, but fp8 could be NaN too.
    known = torch.where(steps == steps, steps, torch.zeros_like(steps))
    kept = known.clamp(-form.limit, form.limit)
    return (kept.round() if form.dtype == torch.int8 else kept).to(form.dtype)


def folded(
    weight: torch.Tensor, scale: torch.Tensor, groups: int, form: Format, *, transposed: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The weight [K, C / G, R, S] (or [K, C]), float32, with its partner's scales in it, quantised
    per channel of the result.

    Gives [G, K / G, C / G, R · S] in the format with scales [K], where `scale` is the input's [C];
    or, transposed, [G, C / G, K / G, R · S] with scales [C], where it is the gradient's [K].
    """
    count, channels = weight.shape[:2]
    parts = weight.reshape(groups, count // groups, channels, -1)
    if transposed:
        parts = parts.transpose(1, 2)
    parts = parts * scale.view(groups, 1, -1, 1)
    own = _scale_of(parts.abs().amax(dim=(2, 3)), form)
    return _rounded(parts * own.reciprocal()[:, :, None, None], form), own.reshape(-1)
