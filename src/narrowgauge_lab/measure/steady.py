"""The steady-window rule: of workers that run at the same time, only the time counts in which all
of them do.

Before the last one has started and warmed up, and after the first one has ended, the others have
the machine more to themselves than what is to be measured. So the window is [latest start +
warm-up, earliest end], and the rate is the sum over workers of batch / latency, the latency being
the mean of a worker's calls that lie within the window. NVIDIA's jetson_benchmarks judge GPU and
deep-learning accelerators together like this (`utils/read_write_data.py`).
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import List, Sequence, Tuple

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError

__all__ = ["Counted", "NotSteadyError", "Span", "Steady", "Worked", "steady_window"]

#: Begin and end of a call, in seconds of a clock that all workers share.
Span = Tuple[float, float]


class NotSteadyError(NarrowgaugeError):
    """There is no window in which all workers ran, so there is no rate of all together."""

    exit_code = ExitCode.RUN_FAILED


@dataclasses.dataclass(frozen=True)
class Worked:
    """What one worker did: its calls in order, each of `batch` images. `error`: why it died."""

    name: str
    batch: int
    spans: Tuple[Span, ...]
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Counted:
    """The part of a worker's work that counts: `seconds` of its calls that lie within the window
    whole, `images` of those that ended in it."""

    name: str
    batch: int
    seconds: Tuple[float, ...]
    images: int

    @property
    def images_per_second(self) -> float:
        """batch / latency, which is batch · 1000 / (latency in ms)."""
        return self.batch / statistics.fmean(self.seconds)


@dataclasses.dataclass(frozen=True)
class Steady:
    """The window, and what each worker did in it."""

    begin: float
    end: float
    workers: Tuple[Counted, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def images_per_second(self) -> float:
        """By the rule: sum of batch / latency."""
        return sum(each.images_per_second for each in self.workers)

    @property
    def images_counted_per_second(self) -> float:
        """All images that came out in the window, over its length. What workers do between two
        calls is in this figure and not in the other."""
        return sum(each.images for each in self.workers) / self.seconds


def steady_window(workers: Sequence[Worked], warm_up_s: float) -> Steady:
    """Apply the rule. Raises NotSteadyError where a worker died, did nothing, or was not at work
    together with all others, naming it."""
    if not workers:
        raise NotSteadyError("nobody worked")
    for each in workers:
        if each.error:
            raise NotSteadyError(f"the worker {each.name} died", why=each.error)
    idle = [each.name for each in workers if not each.spans]
    if idle:
        raise NotSteadyError(f"ended without a call: {', '.join(idle)}")
    last = max(workers, key=lambda each: each.spans[0][0])
    first = min(workers, key=lambda each: each.spans[-1][1])
    begin, end = last.spans[0][0] + warm_up_s, first.spans[-1][1]
    if end <= begin:
        raise NotSteadyError(
            "there was no moment in which all workers ran, warmed up",
            why=f"{first.name} ended {begin - end:.3g} s before {last.name}, which began last, "
            f"had warmed up for {warm_up_s:g} s",
            next_step="measure for longer: -p seconds=…",
        )
    return Steady(begin, end, tuple(_counted(each, begin, end) for each in workers))


def _counted(worker: Worked, begin: float, end: float) -> Counted:
    inside: List[float] = [b - a for a, b in worker.spans if begin <= a and b <= end]
    if not inside:
        raise NotSteadyError(
            f"no call of {worker.name} lies within the {end - begin:.3g} s in which all ran",
            next_step="measure for longer: -p seconds=…",
        )
    ended = sum(begin < b <= end for _, b in worker.spans)
    return Counted(worker.name, worker.batch, tuple(inside), ended * worker.batch)
