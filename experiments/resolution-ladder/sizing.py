"""One network at several sizes: a rung each, with statistics of normalisation of its own or not."""

from __future__ import annotations

from typing import List, Sequence

import torch
from torch import nn

from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.anytime.ladder import Rung
from narrowgauge_lab.anytime.resolution import AtSize, sharing
from narrowgauge_lab.batch_statistics import reestimate
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.precision import Mode
from narrowgauge_scores.answers import accuracies
from narrowgauge_scores.side_file import RunLogits

__all__ = ["at", "record_sizes", "rungs_of"]

#: What the network is trained at where it is trained at one size, and costs are held against.
_WHOLE = 32


def rungs_of(
    ctx: RowContext, net: nn.Module, splits: Splits, mode: Mode, sizes: Sequence[int]
) -> List[Rung]:
    """The network at each size, its cost counted there."""
    example, _ = splits.test.batch(torch.zeros(1, dtype=torch.int64, device=ctx.device))
    found = []
    for size in sizes:
        sized = at(ctx, net, splits, mode, size)
        found.append(Rung(f"{size} pixels", count(sized, example).macs, sized))
    return found


def at(ctx: RowContext, net: nn.Module, splits: Splits, mode: Mode, size: int) -> AtSize:
    """The network at a size, in eval mode, its statistics taken anew there if the row says so."""
    sized = AtSize(sharing(net), size)
    if ctx.parameters["statistics"] == "anew":
        taken = reestimate(
            sized,
            splits.training,
            mode,
            images=ctx.parameters["recalibration"],
            batch_size=ctx.parameters["batch_size"],
            seed=ctx.seed,
        )
        ctx.fact("recalibration_images", taken)
    return sized.eval()


def record_sizes(ctx: RowContext, logits: RunLogits, sizes: Sequence[int]) -> None:
    """`size<pixels>_accuracy`, `size<pixels>_macs`, and what a size costs beside what it would by
    its area, `size<pixels>_over_area`, where 32 pixels are among the sizes."""
    heights, macs = accuracies(logits.test), logits.direct_macs.tolist()
    whole = dict(zip(sizes, macs)).get(_WHOLE)
    for size, height, cost in zip(sizes, heights, macs):
        ctx.metric(f"size{size}_accuracy", 100.0 * float(height), unit="%", source="computed")
        ctx.metric(f"size{size}_macs", cost, unit="MAC", source="computed")
        if whole is not None:
            over = cost / whole * (_WHOLE / size) ** 2
            ctx.metric(f"size{size}_over_area", over, unit="1", source="computed")
