"""The figures of a trained network with several exits, as metrics of its row."""

from __future__ import annotations

from typing import Optional, Union

import numpy as np
import torch

from narrowgauge_lab.context import RowContext
from narrowgauge_scores.scalars import range_of, scalars_of
from narrowgauge_scores.side_file import RunLogits

__all__ = ["record"]


def record(
    ctx: RowContext, run: RunLogits, taken: Optional[Union[np.ndarray, torch.Tensor]] = None
) -> None:
    """Record every scalar of a run's answers, by the names of `narrowgauge_scores.scalars`.

    `run` is what `side_file.read_logits` gives of the row's side file, so that the metrics are of
    the very answers that are kept. `taken`: int64 [images], the exit at which the row's own policy
    lets each test image leave. Raises BadValueError for exits that there are not.
    """
    exits = taken.cpu().numpy() if isinstance(taken, torch.Tensor) else taken
    for each in scalars_of(run, exits):
        ctx.metric(each.name, each.values, unit=each.unit, source=each.source, index=each.index)
    within = range_of(run)
    ctx.fact("area_range", within.why if within else "none: this data set has no range of its own")
    ctx.fact("scored_images", run.test.images)
