"""One row of `anytime-speed`: a network's heads, its compaction, its decisions or its deadlines."""

from __future__ import annotations

from typing import Callable, Dict, Tuple

import torch

from narrowgauge_lab import precision
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.algorithms import best_algorithms

from .deadlines import deadlines
from .decision import decision
from .nets import Subject, subject
from .shares import compaction, heads

#: By the value of `measure`: what does it, and the images of a batch where the row says none.
_MEASURES: Dict[str, Tuple[Callable[[RowContext, Subject], None], int]] = {
    "heads": (heads, 256),
    "compaction": (compaction, 256),
    "decision": (decision, 1),
    "deadlines": (deadlines, 1),
}


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say. What the device has not is skipped."""
    parameters = ctx.parameters
    if parameters["threads"]:
        # First of all: torch 1.8 crashes where a convolution ran with another number before.
        torch.set_num_threads(parameters["threads"])
    precision.enter(parameters["precision"], ctx.device)
    measure, batch = _MEASURES[parameters["measure"]]
    with best_algorithms(ctx.device):
        found = subject(parameters, ctx.device, ctx.seed, parameters["batch"] or batch)
        ctx.fact("images", int(found.images.shape[0]))
        ctx.fact("exits", found.net.exits)
        ctx.fact("cumulative_macs", list(found.costs.cumulative))
        ctx.fact("weights", "random")
        ctx.fact("synthetic", True)
        measure(ctx, found)
