"""A quick time, to tell which of several ways is the fastest. It is no figure: what is chosen is
measured again, in turns with ours."""

from __future__ import annotations

import statistics
from typing import Callable

import torch

from narrowgauge_lab.measure import TimingPlan, measure_time, with_hidden_launches

__all__ = ["Call", "glance"]

Call = Callable[[], torch.Tensor]

_SAMPLES = 5


def glance(call: Call, device: torch.device, limit_s: float = 0.05) -> float:
    """The median seconds of a few calls; on a GPU without their launches, where those can be
    hidden. It takes about twice `limit_s`."""
    plan = TimingPlan(least_samples=_SAMPLES, limit_s=limit_s, warm_up_limit_s=limit_s)
    taken = with_hidden_launches(lambda how: measure_time(call, device, how), device, plan)
    return statistics.median(taken.seconds)
