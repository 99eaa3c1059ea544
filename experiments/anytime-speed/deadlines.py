"""Random deadlines: how often one is missed, by how much, and what answers come before it."""

from __future__ import annotations

import dataclasses
from typing import List, Sequence

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.deadline import StageTimes, Timely, deadline, measure_stages
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.state import steadily

from .nets import Subject

__all__ = ["Kept", "deadlines", "kept", "spans"]

_SOURCE = "monotonic"
#: Deadlines are drawn from the first answer to so many times the last one's time.
_BEYOND = 1.2
_WITHIN = 0.999


@dataclasses.dataclass(frozen=True)
class Kept:
    """What so many deadlines came to. `misses`: share that returned after theirs. `overshoot`: by
    how much each did, in longest stages. `answered`: exit reached over the one that typical times
    would have reached, both counted from 1."""

    misses: float
    overshoot: List[float]
    answered: float


def deadlines(ctx: RowContext, subject: Subject) -> None:
    """Record `deadline_misses` (a share), `deadline_overshoot` (the largest, in longest stages) and
    `deadline_overshoot_p999`, `deadline_answered`, and `deadline_late`, whether deadlines of 0
    were marked late as they have to be."""
    net, images, count = subject.net, subject.images, ctx.parameters["deadlines"]
    times = measure_stages(net, images, ctx.parameters["profile_passes"])
    wanted = spans(times, count, ctx.seed)

    def measured() -> List[Timely]:
        found = []
        for number, seconds in enumerate(wanted):
            found.append(deadline(net, images, seconds * 1e3, times))
            if number % 1000 == 999:
                ctx.progress(number + 1, count, "deadlines")
        return found

    results: List[Timely] = steadily(ctx, measured, ctx.device)
    found = kept(results, times)
    ctx.fact("stage_seconds", list(times.typical))
    ctx.fact("stage_seconds_safe", list(times.safe))
    ctx.fact("deadlines", count)
    ctx.fact("deadline_late", deadline(net, images, 0.0, times).late)
    ctx.metric("deadline_misses", found.misses, unit="1", source=_SOURCE)
    ctx.metric("deadline_overshoot", max(found.overshoot), unit="1", source=_SOURCE)
    within = sorted(found.overshoot)[int(_WITHIN * (len(found.overshoot) - 1))]
    ctx.metric("deadline_overshoot_p999", within, unit="1", source=_SOURCE)
    ctx.metric("deadline_answered", found.answered, unit="1", source=_SOURCE)


def spans(times: StageTimes, count: int, seed: int) -> List[float]:
    """Seconds, evenly from what the first answer takes at most."""
    generator = torch_compat.generator_for(torch.device("cpu"), seed)
    first, last = times.safe[0], max(times.until[-1], times.safe[0]) * _BEYOND
    drawn: List[float] = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    return [first + (last - first) * each for each in drawn]


def kept(results: Sequence[Timely], times: StageTimes) -> Kept:
    """What the results came to."""
    overshoot = [result.overshoot_s / times.longest for result in results]
    reached = [
        (result.exit + 1) / max(1, sum(until <= result.deadline_s for until in times.until))
        for result in results
    ]
    return Kept(
        misses=sum(each > 0 for each in overshoot) / len(overshoot),
        overshoot=overshoot,
        answered=sum(reached) / len(reached),
    )
