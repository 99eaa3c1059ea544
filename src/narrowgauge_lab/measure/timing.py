"""How long a call takes: raw samples, warmed up until steady, until their median is known.

Samples are per call and in order; statistics are computed where records are read.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Tuple

import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import turns
from narrowgauge_lab.errors import ClockError
from narrowgauge_lab.measure.samplers import Sample, Sampler, sampler
from narrowgauge_lab.measure.stop_rule import StopRule

__all__ = [
    "ClockError",
    "Comparison",
    "Samples",
    "TimingPlan",
    "compare_by",
    "interleave",
    "measure_by",
    "measure_time",
]

Call = Callable[[], Any]

#: A warm-up window has so many samples or lasts so long, whichever is more; so many in a row agree.
_WINDOW_SAMPLES = 3
_WINDOW_S = 0.025
_STEADY_WINDOWS = 3
#: A warm-up that other work slowed down leaves too few calls per sample. So many first blocks may
#: find calls faster than it said, by more than this, and are part of the warm-up then.
_SECOND_LOOKS = 3
_FASTER = 2.0
#: Two sides get the same number of calls per sample unless one is slower by more than this.
_ALIKE = 2.0


@dataclass(frozen=True)
class TimingPlan:
    """How to measure, and when it is enough. Raises BadValueError for what cannot be."""

    #: `hot`, or `cold`: the last cache is emptied before every sample, outside the clock.
    cache: str = "hot"
    #: Stop when the 95 % interval of the median, end to end, is narrower than this share of it.
    interval: float = 0.01
    least_samples: int = 30
    most_samples: int = 10000
    #: Seconds of measuring, without the warm-up.
    limit_s: float = 10.0
    #: Calls per sample; 0: enough that the clock's own cost does not show. Cold: always 1.
    calls: int = 0
    #: CUDA: a kernel holds the stream until all launches of a block of samples are queued. Such a
    #: call may not wait for the device. Needs the compiled kernels. No difference on a CPU.
    hide_launches: bool = False
    #: Warm-up ends when the last windows' medians are within this share of each other.
    warm_up_tolerance: float = 0.02
    warm_up_limit_s: float = 5.0

    def __post_init__(self) -> None:
        wrong = [
            text
            for holds, text in (
                (self.cache in ("hot", "cold"), f"cache='{self.cache}' is neither hot nor cold"),
                (self.calls >= 0, f"calls={self.calls} is negative"),
                (
                    self.cache == "hot" or self.calls <= 1,
                    f"calls={self.calls} with a cold cache: only the first would find it cold",
                ),
                (
                    1 <= self.least_samples <= self.most_samples,
                    f"least_samples={self.least_samples}, most_samples={self.most_samples}",
                ),
                (self.interval >= 0, f"interval={self.interval} is negative"),
                (self.limit_s > 0, f"limit_s={self.limit_s} leaves no time"),
                (self.warm_up_tolerance >= 0, f"warm_up_tolerance={self.warm_up_tolerance}"),
                (self.warm_up_limit_s >= 0, f"warm_up_limit_s={self.warm_up_limit_s}"),
            )
            if not holds
        ]
        if wrong:
            raise BadValueError("nothing can be measured like this", why="; ".join(wrong))


@dataclass(frozen=True)
class Samples:
    """Raw samples of one call, and how they were taken."""

    #: Per call, in order.
    seconds: Tuple[float, ...]
    #: `cuda-event` or `monotonic`.
    source: str
    #: Calls per sample.
    calls: int
    #: Per call: what the host spent to queue it. On a CPU the same as `seconds`.
    host_seconds: Tuple[float, ...]
    warm_up_calls: int
    #: Whether the warm-up became steady within its limit.
    steady: bool
    #: `interval`, `time limit` or `sample limit`.
    stopped: str
    cache: str = "hot"
    launches_hidden: bool = False
    interleaved: bool = False

    def conditions(self) -> Dict[str, Any]:
        """What the samples were taken under, for `ctx.metric(conditions=)`."""
        return {
            "cache": self.cache,
            "calls_per_sample": self.calls,
            "interleaved": self.interleaved,
            "launches_hidden": self.launches_hidden,
            "steady": self.steady,
            "stopped": self.stopped,
            "warm_up_calls": self.warm_up_calls,
        }


@dataclass(frozen=True)
class Comparison:
    """Two calls measured in turns (A B B A …), so that drift meets both alike."""

    first: Samples
    second: Samples

    @property
    def ratios(self) -> Tuple[float, ...]:
        """second / first, one per pair: above 1 where the second is slower."""
        pairs = zip(self.first.seconds, self.second.seconds)
        return tuple(other / one for one, other in pairs)


@dataclass(frozen=True)
class _Warm:
    """A call after its warm-up: what it takes about, and the calls per sample that follow."""

    call: Any
    expected: Sample
    calls: int
    spent_calls: int
    steady: bool


def measure_time(
    call: Call,
    device: torch.device,
    plan: TimingPlan = TimingPlan(),
    now: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Samples of `call` on `device`; `now` is the host's monotonic clock, in seconds.

    On CUDA a sample is the time between two events on the current stream, with calls queued back to
    back, so it is the device's time where that is the longer one and the host's where launches are.
    Raises ClockError for a clock that steps, HeldTooLongError where launches cannot be hidden.
    """
    by = sampler(device, plan.cache == "cold", plan.hide_launches, now)
    return measure_by(by, call, plan, now)


def measure_by(by: Sampler, call: Any, plan: TimingPlan, now: Callable[[], float]) -> Samples:
    """`measure_time` by a given sampler, of whatever that sampler calls."""
    with turns.alone():
        return _measured(by, call, plan, now)


def _measured(by: Sampler, call: Any, plan: TimingPlan, now: Callable[[], float]) -> Samples:
    warm = _look_again(by, _warm_up(by, call, plan, now), plan)
    rule = StopRule(plan.interval, plan.least_samples)
    taken: List[Sample] = []
    stopped = ""
    began = now()
    while not stopped:
        size = by.block_size(warm.expected, warm.calls)
        count = min(size, plan.most_samples - len(taken))
        block = by.block(call, warm.calls, count, warm.expected[0])
        taken += block
        rule.add(seconds for seconds, _ in block)
        if rule.is_met():
            stopped = "interval"
        elif len(taken) >= plan.most_samples:
            stopped = "sample limit"
        elif now() - began >= plan.limit_s:
            stopped = "time limit"
    return _samples(taken, warm, by, plan, stopped, interleaved=False)


def interleave(
    first: Call,
    second: Call,
    device: torch.device,
    plan: TimingPlan,
    pairs: int,
    now: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """`pairs` samples of each, in the order A B B A …; fewer where `plan.limit_s` ends it.

    The plan's interval and numbers of samples do not apply. Raises what `measure_time` raises.
    """
    by = sampler(device, plan.cache == "cold", plan.hide_launches, now)
    return compare_by(by, first, second, plan, pairs, now)


def compare_by(
    by: Sampler, first: Any, second: Any, plan: TimingPlan, pairs: int, now: Callable[[], float]
) -> Comparison:
    """`interleave` by a given sampler, of whatever that sampler calls."""
    if pairs < 1:
        raise BadValueError(f"{pairs} pairs compare nothing")
    with turns.alone():
        return _compared(by, first, second, plan, pairs, now)


def _compared(
    by: Sampler, first: Any, second: Any, plan: TimingPlan, pairs: int, now: Callable[[], float]
) -> Comparison:
    one_warm, other_warm = (
        _look_again(by, _warm_up(by, call, plan, now), plan) for call in (first, second)
    )
    sides = _alike(one_warm, other_warm)
    taken: Tuple[List[Sample], List[Sample]] = ([], [])
    began = now()
    stopped = "sample limit"
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            warm = sides[side]
            taken[side].extend(by.block(warm.call, warm.calls, 1, warm.expected[0], True))
        if pair + 1 < pairs and now() - began >= plan.limit_s:
            stopped = "time limit"
            break
    one, other = (
        _samples(samples, warm, by, plan, stopped, interleaved=True)
        for samples, warm in zip(taken, sides)
    )
    return Comparison(one, other)


def _warm_up(by: Sampler, call: Any, plan: TimingPlan, now: Callable[[], float]) -> _Warm:
    """Run windows of samples until the last ones agree, or the limit."""
    began = now()
    for _ in range(by.first_calls):
        call()
    expected = _middle(by.block(call, 1, 1, math.inf))
    spent = by.first_calls + 1
    medians: List[float] = []
    while True:
        calls = plan.calls or by.calls_for(expected)
        steady = _agree(medians, plan.warm_up_tolerance)
        if steady or (medians and now() - began >= plan.warm_up_limit_s):
            return _Warm(call, expected, calls, spent, steady)
        window: List[Sample] = []
        opened = now()
        while len(window) < _WINDOW_SAMPLES or now() - opened < _WINDOW_S:
            size = by.block_size(expected, calls)
            window += by.block(call, calls, size, expected[0])
            spent += calls * size
            if now() - began >= plan.warm_up_limit_s:
                break
        expected = _middle(window)
        medians.append(expected[0])


def _look_again(by: Sampler, warm: _Warm, plan: TimingPlan) -> _Warm:
    """`warm`, with the calls per sample of calls as fast as they are once it is over.

    A steady warm-up is believed.
    """
    for _ in range(_SECOND_LOOKS):
        if warm.steady or plan.calls:
            break
        size = by.block_size(warm.expected, warm.calls)
        seen = _middle(by.block(warm.call, warm.calls, size, warm.expected[0]))
        calls, spent = by.calls_for(seen), warm.spent_calls + warm.calls * size
        believed = calls <= _FASTER * warm.calls
        warm = replace(warm, expected=seen, calls=calls, spent_calls=spent)
        if believed:
            break
    return warm


def _middle(samples: List[Sample]) -> Sample:
    seconds, host_seconds = zip(*samples)
    return statistics.median(seconds), statistics.median(host_seconds)


def _agree(medians: List[float], tolerance: float) -> bool:
    last = medians[-_STEADY_WINDOWS:]
    return len(last) == _STEADY_WINDOWS and max(last) <= min(last) * (1.0 + tolerance)


def _alike(one: _Warm, other: _Warm) -> Tuple[_Warm, _Warm]:
    """The same calls per sample for two that take about as long: what a sample costs beside its
    calls then falls on both alike."""
    if max(one.expected[0], other.expected[0]) > _ALIKE * min(one.expected[0], other.expected[0]):
        return one, other
    calls = max(one.calls, other.calls)
    return tuple(  # type: ignore[return-value]
        _Warm(each.call, each.expected, calls, each.spent_calls, each.steady)
        for each in (one, other)
    )


def _samples(
    taken: List[Sample], warm: _Warm, by: Sampler, plan: TimingPlan, stopped: str, interleaved: bool
) -> Samples:
    seconds, host_seconds = zip(*taken)
    return Samples(
        seconds=seconds,
        source=by.source,
        calls=warm.calls,
        host_seconds=host_seconds,
        warm_up_calls=warm.spent_calls,
        steady=warm.steady,
        stopped=stopped,
        cache=plan.cache,
        launches_hidden=plan.hide_launches and by.source == "cuda-event",
        interleaved=interleaved,
    )
