"""The lab's face of the compiled loop: no Python between the calls that it times.

For work of microseconds, where a loop in Python would be what is measured. The plan, the warm-up,
the stop rule and the checks of the clock are those of `measure_time`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Tuple, Union

import torch

from narrowgauge_contract.errors import BadValueError, UsageError
from narrowgauge_kernels import harness as compiled
from narrowgauge_lab.measure import caches
from narrowgauge_lab.measure.samplers import (
    HELD_QUEUE_S,
    HOLD_LIMIT_S,
    Sample,
    Sampler,
    check_claim,
    check_device,
    held_too_long,
    positive,
)
from narrowgauge_lab.measure.timing import Comparison, Samples, TimingPlan, compare_by, measure_by

__all__ = ["Graph", "Kernel", "Operator", "interleave_compiled", "measure_compiled"]

#: How the loop says that a hold ended by itself.
_HELD = "still not queued"


@dataclass(frozen=True)
class Operator:
    """An operator of the dispatcher with its arguments, positional: `aten::conv2d`, x, weight."""

    name: str
    arguments: Tuple[Any, ...]


@dataclass(frozen=True)
class Graph:
    """A CUDA graph, captured with keep_graph=True and instantiated for the loop."""

    instance: compiled.Graph


@dataclass(frozen=True)
class Kernel:
    """A calibration kernel; `repeats` sets its length. Kinds as narrowgauge_kernels.harness."""

    kind: str
    buffer: torch.Tensor
    repeats: int


Work = Union[Operator, Graph, Kernel]


class CompiledSampler(Sampler):
    """Blocks of samples by the compiled loop, which keeps its own queue short."""

    def __init__(
        self, device: torch.device, cold: bool, hide: bool, now: Callable[[], float]
    ) -> None:
        super().__init__(cold, now)
        check_device(device)
        self.source = "cuda-event" if device.type == "cuda" else "monotonic"
        # An event costs the device about 1 us, and 0.1 % of a sample is what one may cost.
        self.shortest_s = 2e-3 if device.type == "cuda" else 100e-6
        self.first_calls = 0  # the loop's own first call is untimed
        self._device = device
        self._hide = hide and device.type == "cuda"
        self._flush: Optional[torch.Tensor] = caches.flush_buffer(device) if cold else None

    def calls_for(self, sample: Sample) -> int:
        calls = super().calls_for(sample)
        if not self._hide:
            return calls
        return max(1, min(calls, compiled.HELD_CALLS, int(HELD_QUEUE_S / sample[1] + 1e-6)))

    def _measure(self, call: Work, calls: int, count: int, lead: bool) -> List[Sample]:
        del lead  # the loop has one
        if self._hide and calls > compiled.HELD_CALLS:
            raise BadValueError(
                f"the launches of {calls} calls per sample cannot be hidden",
                why=f"the compiled loop lets the stream go after {compiled.HELD_CALLS} of them",
                next_step="ask for fewer calls, or leave their number to the plan (calls=0)",
            )
        limit_s = HOLD_LIMIT_S if self._hide else 0.0
        began = self._now()
        try:
            result = self._time(call, calls, count, limit_s)
        except RuntimeError as error:
            if _HELD in str(error):
                raise held_too_long(limit_s) from error
            raise
        passed = self._now() - began
        seconds, host_seconds = result.tolist()
        for each in seconds:
            positive(each, self.source)
        check_claim(sum(seconds) * calls, passed)
        return list(zip(seconds, host_seconds))

    def _time(self, work: Work, calls: int, count: int, limit_s: float) -> torch.Tensor:
        if isinstance(work, Operator):
            return compiled.time_operator(
                work.name, work.arguments, self._device, count, calls, self._flush, limit_s
            )
        if isinstance(work, Graph):
            return work.instance.time(count, calls, self._flush, limit_s)
        return compiled.time_kernel(
            work.kind, work.buffer, work.repeats, count, calls, self._flush, limit_s
        )


def measure_compiled(
    work: Work,
    device: torch.device,
    plan: TimingPlan = TimingPlan(),  # noqa: B008 (frozen)
    now: Callable[[], float] = time.perf_counter,
) -> Samples:
    """What `measure_time` gives, of work that the compiled loop calls.

    Raises what `measure_time` raises, UsageError for work that needs CUDA on a CPU, and
    BadValueError for more calls per sample than launches can be hidden of.
    """
    return measure_by(_sampler(device, plan, now, work), work, plan, now)


def interleave_compiled(
    first: Work,
    second: Work,
    device: torch.device,
    plan: TimingPlan,
    pairs: int,
    now: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """What `interleave` gives, of work that the compiled loop calls."""
    return compare_by(_sampler(device, plan, now, first, second), first, second, plan, pairs, now)


def _sampler(
    device: torch.device, plan: TimingPlan, now: Callable[[], float], *works: Work
) -> CompiledSampler:
    if device.type != "cuda" and not all(isinstance(work, Operator) for work in works):
        raise UsageError(
            f"CUDA graphs and calibration kernels do not run on the device '{device}'",
            next_step="give an operator",
        )
    return CompiledSampler(device, plan.cache == "cold", plan.hide_launches, now)
