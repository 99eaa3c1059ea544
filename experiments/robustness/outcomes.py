"""What attacks did: who still answers right, what came across, how much was changed."""

from __future__ import annotations

import dataclasses
import math
from typing import Tuple

import torch
from torch import nn

from narrowgauge_lab.context import RowContext

__all__ = ["Change", "change", "predicted", "record_changes", "transfer_success"]


@dataclasses.dataclass(frozen=True)
class Change:
    """Means over images. `l2`, `linf`: norms of the difference, of pixels in [0, 1]; `psnr`: of
    those that were changed, in dB, NaN where none was; `unchanged`: the share, in percent, of those
    that were not."""

    l2: float
    linf: float
    psnr: float
    unchanged: float


def change(images: torch.Tensor, attacked: torch.Tensor) -> Change:
    """Between images and what an attack made of them, float32 [N, C, H, W]."""
    difference = (attacked.double() - images.double()).reshape(len(images), -1)
    squares = difference.square()
    mean = squares.mean(dim=1)
    changed = mean > 0
    # The greatest pixel is 1, so the peak adds nothing to the logarithm.
    decibels = -10.0 * torch.log10(mean[changed])
    return Change(
        l2=float(squares.sum(dim=1).sqrt().mean()),
        linf=float(difference.abs().max(dim=1).values.mean()),
        psnr=float(decibels.mean()) if bool(changed.any()) else math.nan,
        unchanged=100.0 * float((~changed).double().mean()),
    )


def predicted(model: nn.Module, images: torch.Tensor, batch: int) -> torch.Tensor:
    """The class that each image is taken for, int64 [N]."""
    with torch.no_grad():
        parts = [model(each).argmax(1) for each in images.split(batch)]
    return torch.cat(parts)


def transfer_success(
    right: Tuple[torch.Tensor, torch.Tensor], fooled: Tuple[torch.Tensor, torch.Tensor]
) -> Tuple[float, int]:
    """In percent: of the images that fooled the network they were made against, those that fool the
    other as well; and how many the former are. NaN and 0 where there are none.

    bool [N] each, source first: who is right before the attack, and wrong after it. Images that
    either had wrong before are left out: nothing transferred there.
    """
    both = right[0] & right[1]
    source = both & fooled[0]
    count = int(source.sum())
    if count == 0:
        return math.nan, 0
    return 100.0 * float((source & fooled[1]).sum()) / count, count


def record_changes(ctx: RowContext, exact: Change, approximate: Change) -> None:
    """Record `distortion_l2`, `distortion_linf`, `psnr` and `unchanged` of the white-box images of
    the approximate network, the same with `_exact` behind it of the exact one's, and `psnr_lost`,
    by how much the former are noisier."""
    for tail, found in (("_exact", exact), ("", approximate)):
        ctx.metric(f"distortion_l2{tail}", found.l2, unit="1", source="computed")
        ctx.metric(f"distortion_linf{tail}", found.linf, unit="1", source="computed")
        ctx.metric(f"unchanged{tail}", found.unchanged, unit="%", source="computed")
        if not math.isnan(found.psnr):
            ctx.metric(f"psnr{tail}", found.psnr, unit="dB", source="computed")
    lost = exact.psnr - approximate.psnr
    if not math.isnan(lost):
        ctx.metric("psnr_lost", lost, unit="dB", source="computed")
