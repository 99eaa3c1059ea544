"""Random deadlines: how often one is missed, by how much, and what answers come before it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import os
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.collector import without_collector
from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.deadline import StageTimes, Timely, deadline, measure_stages
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.replayed import replayed_or_why
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.state import steadily

from .nets import Subject

__all__ = ["Kept", "Result", "deadlines", "kept", "spans"]

_SOURCE = "monotonic"
#: Deadlines are drawn from the first answer to so many times the last one's, both as planned.
_BEYOND = 1.2
#: So many at once are measured again where the device was held back, and kept where the row is
#: killed: a hundred thousand take minutes.
_WINDOW = 4000
_HIGHEST = -20  # of Linux, as niceness


class Result(NamedTuple):
    """What is kept of an answer: its exit, the seconds until it was returned, and its deadline."""

    exit: int
    seconds: float
    limit: float


@dataclasses.dataclass(frozen=True)
class Kept:
    """What so many deadlines came to. `misses`: share that returned after theirs. `overshoot`: by
    how much each did, over the typical time of the longest stage. `answered`: exit reached over the
    one that typical times would have reached, both counted from 1."""

    misses: float
    overshoot: List[float]
    answered: float

    def within(self, share: float) -> float:
        """The overshoot that this share of the deadlines does not exceed."""
        return sorted(self.overshoot)[math.ceil(share * len(self.overshoot)) - 1]


def deadlines(ctx: RowContext, subject: Subject) -> None:
    """Record `deadline_misses` (a share), `deadline_overshoot` (the largest, over the typical time
    of the longest stage) and `deadline_overshoot_p999`, which 99.9 % do not exceed,
    `deadline_answered`, and the facts `deadline_stages`, how a stage runs, `deadline_late`, whether
    a deadline of 0 was marked late as it has to be, `deadline_missed`, how many of each window were
    missed, and `deadline_nice`, the priority. A row that is resumed goes on after its last window,
    with the stage times that it began with; where stages ran another way then, from the first."""
    net, way = replayed_or_why(subject.net, subject.images)
    ctx.fact("deadline_stages", way)
    with _first_of_all() as nice:
        ctx.fact("deadline_nice", nice)
        _deadlines(ctx, net, subject.images, way)


@contextlib.contextmanager
def _first_of_all() -> Iterator[int]:
    """At the system's highest priority where it may be had; gives the niceness. Not a real-time
    one: Linux stops these for 50 ms of each second."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _HIGHEST)
    try:
        yield os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def _deadlines(ctx: RowContext, net: AnytimeNetwork, images: torch.Tensor, way: str) -> None:
    count = ctx.parameters["deadlines"]
    times, results, reasons = _resumed(ctx.checkpoints.load(), way)
    noted = _Noted(ctx)
    for reason in reasons:
        noted.invalid(reason)
    # A row that is resumed has its times, but what is first about stages is over then for it too.
    passes = ctx.parameters["profile_passes"] if times is None else 1
    with without_collector():
        measured = measure_stages(net, images, passes, quantile=ctx.parameters["quantile"])
    times = measured if times is None else times
    wanted = spans(times, count, ctx.seed)
    ctx.fact("deadlines_resumed", len(results))
    while len(results) < count:
        window = wanted[len(results) : len(results) + _WINDOW]
        name = f"window{len(results) // _WINDOW}_"
        results += _window(noted, functools.partial(deadline, net, images), times, window, name)
        ctx.checkpoints.save(_state(way, times, results, noted.reasons))
        ctx.progress(len(results), count, "deadlines")
    found = kept(results, times)
    late = [each > 0 for each in found.overshoot]
    ctx.fact("deadline_missed", [sum(late[at : at + _WINDOW]) for at in range(0, count, _WINDOW)])
    ctx.fact("stage_seconds", list(times.typical))
    ctx.fact("stage_seconds_safe", list(times.safe))
    ctx.fact("deadlines", count)
    ctx.fact("deadline_late", deadline(net, images, 0.0, times).late)
    ctx.metric("deadline_misses", found.misses, unit="1", source=_SOURCE)
    ctx.metric("deadline_overshoot", max(found.overshoot), unit="1", source=_SOURCE)
    ctx.metric("deadline_overshoot_p999", found.within(0.999), unit="1", source=_SOURCE)
    ctx.metric("deadline_answered", found.answered, unit="1", source=_SOURCE)


class _Noted:
    """A row as `steadily` sees it, which keeps the reasons why it is INVALID: a window that was
    spoilt is spoilt still when the row is resumed after it."""

    def __init__(self, ctx: RowContext) -> None:
        self.device, self.fact, self.log = ctx.device, ctx.fact, ctx.log
        self._invalid = ctx.invalid
        self.reasons: List[str] = []

    def invalid(self, reason: str) -> None:
        """See RowContext."""
        self.reasons.append(reason)
        self._invalid(reason)


def _window(
    ctx: _Noted,
    answer: Callable[[float, StageTimes], Timely],
    times: StageTimes,
    wanted: Sequence[float],
    name: str,
) -> List[Result]:
    def measured() -> List[Result]:
        found = []
        gc.collect()
        with without_collector():  # it would come within an answer, and be longer than all stages
            for seconds in wanted:
                got = answer(seconds * 1e3, times)
                found.append(Result(got.exit, got.seconds, got.deadline_s))
        return found

    results: List[Result] = steadily(ctx, measured, ctx.device, prefix=name)
    return results


def _state(
    way: str, times: StageTimes, results: Sequence[Result], reasons: Sequence[str]
) -> Dict[str, Any]:
    return {
        "way": way,
        "reasons": list(reasons),
        "times": dataclasses.asdict(times),
        "results": torch.tensor(results, dtype=torch.float64).reshape(-1, 3),
    }


def _resumed(
    state: Optional[Dict[str, Any]], way: str
) -> Tuple[Optional[StageTimes], List[Result], List[str]]:
    """What `_state` made, which belongs to this row (its folder is the row's own), where stages ran
    this way."""
    if state is None or state.get("way") != way:
        return None, [], []
    held = state["times"]
    times = StageTimes(held["batch"], tuple(held["typical"]), tuple(held["safe"]))
    rows = state["results"].tolist()
    results = [Result(int(exit), seconds, limit) for exit, seconds, limit in rows]
    return times, results, list(state["reasons"])


def spans(times: StageTimes, count: int, seed: int) -> List[float]:
    """Seconds, evenly from what the first answer is planned with to more than all are: a range that
    ends by typical times leaves nothing to decide where plans are far longer than these."""
    generator = torch_compat.generator_for(torch.device("cpu"), seed)
    first, last = times.safe[0], sum(times.safe) * _BEYOND
    drawn: List[float] = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    return [first + (last - first) * each for each in drawn]


def kept(results: Sequence[Result], times: StageTimes) -> Kept:
    """What the results came to."""
    overshoot = [max(0.0, each.seconds - each.limit) / times.longest for each in results]
    reached = [
        (result.exit + 1) / max(1, sum(until <= result.limit for until in times.until))
        for result in results
    ]
    return Kept(
        misses=sum(each > 0 for each in overshoot) / len(overshoot),
        overshoot=overshoot,
        answered=sum(reached) / len(reached),
    )
