"""Times without their launches, where those can be hidden."""

from __future__ import annotations

import dataclasses
from typing import Callable, TypeVar

import torch

from narrowgauge_lab.errors import HeldTooLongError
from narrowgauge_lab.measure.timing import TimingPlan

__all__ = ["with_hidden_launches"]

_Taken = TypeVar("_Taken")


def with_hidden_launches(
    take: Callable[[TimingPlan], _Taken], device: torch.device, plan: TimingPlan
) -> _Taken:
    """What `take` gives by the plan with launches hidden (on CUDA alone there are any).

    Where they are too many for that, or the work waits for the device, by the plan with launches
    in the times, which the samples say. Raises what `take` raises.
    """
    hidden = dataclasses.replace(plan, hide_launches=device.type == "cuda")
    try:
        return take(hidden)
    except HeldTooLongError:
        return take(dataclasses.replace(plan, hide_launches=False))
