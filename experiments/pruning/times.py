"""The whole network and a pruned one in turns, in one process."""

from __future__ import annotations

import copy
from typing import Tuple

import torch
from torch import nn

from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.engines.base import DTYPES
from narrowgauge_lab.measure import TimingPlan, interleave
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.precision import Mode
from narrowgauge_lab.sparse_networks import Ready, make_ready

__all__ = ["Clock"]

#: A warm-up that does not become steady ends after so many times the limit of samples.
_WARM_UP_LIMITS = 2.0


class Clock:
    """Times networks beside the `whole` one, on the first `latency_batch` images of `test`. Copies
    run, as `way` says, whose zeros cost what other weights cost; close it in the end."""

    def __init__(self, ctx: RowContext, whole: nn.Module, test: Feed, mode: Mode) -> None:
        self._parameters = ctx.parameters
        self._device = mode.device
        count = min(self._parameters["latency_batch"], len(test))
        images, _ = test.batch(torch.arange(count, device=mode.device))
        # As they lie in memory is how training has them, which nothing that is timed depends on.
        self._images = images.to(DTYPES[self._parameters["precision"]]).contiguous()
        self._whole = self._ready(whole)

    def close(self) -> None:
        self._whole.runner.close()

    def record(self, ctx: RowContext, pruned: nn.Module) -> Tuple[float, ...]:
        """Record `latency_whole` and `latency`, taken in turns, and `speedup`, the first over the
        second, pair by pair; give it too."""
        limit = self._parameters["limit_s"]
        plan = TimingPlan(limit_s=limit, warm_up_limit_s=_WARM_UP_LIMITS * limit)
        other = self._ready(pruned)
        try:
            # What a comparison divides by is its first.
            compared = steadily(
                ctx,
                lambda: interleave(
                    lambda: other.runner(self._images),
                    lambda: self._whole.runner(self._images),
                    self._device,
                    plan,
                    self._parameters["pairs"],
                ),
                self._device,
            )
        finally:
            other.runner.close()
        record_samples(ctx, "latency", compared.first)
        record_samples(ctx, "latency_whole", compared.second)
        record_samples(ctx, "speedup", compared.second, compared.ratios, "1")
        ctx.fact("latency_images", len(self._images))
        return tuple(compared.ratios)

    def _ready(self, model: nn.Module) -> Ready:
        parameters, alone = self._parameters, copy.deepcopy(model).cpu().eval()
        return make_ready(parameters["way"], alone, self._images, parameters["precision"], 0.0)
