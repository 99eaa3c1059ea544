"""One block of samples by one clock: the monotonic clock on a CPU, events on CUDA.

A block is what is queued before anything is waited for. Both samplers answer with (seconds,
host_seconds) per call and sample, checked against each other.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch

from narrowgauge_contract.errors import UsageError
from narrowgauge_kernels import harness
from narrowgauge_lab.errors import ClockError, HeldTooLongError
from narrowgauge_lab.measure import caches

__all__ = [
    "HELD_QUEUE_S",
    "HOLD_LIMIT_S",
    "CudaSampler",
    "HostSampler",
    "Sample",
    "Sampler",
    "check_claim",
    "check_device",
    "held_too_long",
    "hold",
    "positive",
    "sampler",
]

#: Seconds per call: by the clock that is asked, and what the host spent to queue it.
Sample = Tuple[float, float]
#: What is timed; samplers of the compiled loop take what it knows instead.
Call = Any
Now = Callable[[], float]

#: Events may claim this much more than the host saw: two oscillators, and rounding to 0.5 us.
_CLAIM = 1.02
_CLAIM_S = 10e-6
#: A launch costs the host 1.5 us or more, and a stream queues some 1000 of them before it pushes
#: back. Blocks end before that, or host_seconds would be the device's.
_QUEUE_S = 1.5e-3
#: A held stream does not drain at all, so there the margin is wider.
HELD_QUEUE_S = 0.6e-3
#: Between two looks at the time limit.
_BLOCK_S = 0.05
_MOST_PER_BLOCK = 64
#: Longer samples need no untimed call first to bring their data back to the caches.
_CACHES_S = 0.05
#: How long a stream is held at most before the measurement is given up.
HOLD_LIMIT_S = 1.0


class Sampler:
    """What both have in common: how many calls make a sample, and how many samples a block."""

    #: `cuda-event` or `monotonic`.
    source = ""
    #: A sample lasts at least so long, that its clock's own cost does not show.
    shortest_s = 0.0
    #: How long the host may go on queueing.
    queue_s = math.inf
    #: Longer samples need no untimed call first to keep the device busy until they are queued.
    idle_s = 0.0
    #: Calls that come before all samples: they compile, allocate and load.
    first_calls = 1

    def __init__(self, cold: bool, now: Now) -> None:
        self._cold = cold
        self._now = now
        self._sample_wall_s = 0.0

    def calls_for(self, sample: Sample) -> int:
        """Calls per sample, where one takes so long; 1 for cold caches."""
        if self._cold:
            return 1
        wanted = math.ceil(self.shortest_s / sample[0] - 1e-6)  # not one more for a rounding
        return max(1, int(min(wanted, self.queue_s / sample[1] + 1e-6)))

    def block_size(self, sample: Sample, calls: int) -> int:
        """Samples per block, where one call takes so long."""
        seconds, host_seconds = sample
        queued = self.queue_s / (host_seconds * calls)
        # Emptying caches takes longer than most calls, and only the last block's length shows it.
        wall = max(seconds * calls, self._sample_wall_s)
        return max(1, int(min(_MOST_PER_BLOCK, queued, _BLOCK_S / wall)))

    def block(
        self, call: Call, calls: int, count: int, expected_s: float, among_others: bool = False
    ) -> List[Sample]:
        """`count` samples of `calls` calls, one call expected to take so long.

        Short ones have an untimed call before them, which finds the device idle or, `among_others`,
        other work's data in the caches, so that they do not. Raises ClockError, and
        HeldTooLongError where `call` waits for a device that is held.
        """
        lead_s = _CACHES_S if among_others else self.idle_s
        lead = not self._cold and expected_s * calls < lead_s
        began = self._now()
        samples = self._measure(call, calls, count, lead)
        self._sample_wall_s = (self._now() - began) / count
        return samples

    def _measure(self, call: Call, calls: int, count: int, lead: bool) -> List[Sample]:
        raise NotImplementedError


class HostSampler(Sampler):
    """Times calls on the CPU; `flush` empties its caches."""

    source = "monotonic"
    shortest_s = 100e-6

    def __init__(self, flush: Optional[Callable[[], Any]], now: Now) -> None:
        super().__init__(flush is not None, now)
        self._flush = flush

    def _measure(self, call: Call, calls: int, count: int, lead: bool) -> List[Sample]:
        samples = []
        if lead:
            call()
        for _ in range(count):
            if self._flush is not None:
                self._flush()
            began = self._now()
            for _ in range(calls):
                call()
            seconds = positive(self._now() - began, self.source) / calls
            samples.append((seconds, seconds))
        return samples


class CudaSampler(Sampler):
    """Times calls by events on the current stream of `device`; work on other streams is not seen.

    With `hide`, a kernel holds the stream until the block is queued.
    """

    source = "cuda-event"
    shortest_s = 200e-6  # an event costs the device about 1 us
    queue_s = _QUEUE_S
    idle_s = 5e-3  # a launch takes 10 us at most to arrive
    first_calls = 3  # `torch.compile` runs, captures and replays graphs in its first three

    def __init__(
        self,
        device: torch.device,
        flush: Optional[Callable[[], Any]],
        hide: bool,
        now: Now,
    ) -> None:
        super().__init__(flush is not None, now)
        self._flush = flush
        self._device = device
        self._hide = hide
        self._events: List[Tuple[Any, Any]] = []
        if hide:
            self.queue_s = HELD_QUEUE_S

    def _measure(self, call: Call, calls: int, count: int, lead: bool) -> List[Sample]:
        while len(self._events) < count:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events.append(pair)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            began = self._now()
            if self._hide:
                with hold(self._device):
                    hosts = self._queue(call, calls, count, lead)
            else:
                hosts = self._queue(call, calls, count, lead)
            torch.cuda.synchronize()
            passed = self._now() - began
        seconds = [one.elapsed_time(other) / 1e3 for one, other in self._events[:count]]
        for each in seconds:
            positive(each, self.source)
        check_claim(sum(seconds), passed)
        return [(device / calls, host / calls) for device, host in zip(seconds, hosts)]

    def _queue(self, call: Call, calls: int, count: int, lead: bool) -> List[float]:
        hosts = []
        if lead:
            call()
        for began, ended in self._events[:count]:
            if self._flush is not None:
                self._flush()
            began.record()
            start = self._now()
            for _ in range(calls):
                call()
            hosts.append(positive(self._now() - start, "monotonic"))
            ended.record()
        return hosts


def sampler(device: torch.device, cold: bool, hide: bool, now: Now) -> Sampler:
    """The sampler for a device; on a CPU there are no launches to hide.

    Raises UsageError for other devices, NotApplicableError where no cache can be emptied.
    """
    check_device(device)
    flush = caches.flusher(caches.flush_buffer(device)) if cold else None
    if device.type == "cpu":
        return HostSampler(flush, now)
    return CudaSampler(device, flush, hide, now)


def check_device(device: torch.device) -> None:
    """Raise UsageError for a device that no clock here times."""
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"no clock here times the device '{device}'", next_step="cpu or cuda")


@contextlib.contextmanager
def hold(device: torch.device, limit_s: float = HOLD_LIMIT_S) -> Iterator[None]:
    """Keep the current stream of `device` from running what is queued in the block, until its end.

    Raises HeldTooLongError where the block does not end within `limit_s`: the stream went on by
    itself then.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    harness.hold(index, limit_s)
    try:
        yield
    finally:
        in_time = harness.release(index)
    if not in_time:
        raise held_too_long(limit_s)


def held_too_long(limit_s: float) -> HeldTooLongError:
    """The error of work that cannot be queued behind a held stream."""
    return HeldTooLongError(
        f"the stream was held for {limit_s:g} s, and its work was still not queued",
        why="the work waits for the device itself (.item(), .cpu(), a synchronisation), or is more "
        "than the 1000 launches that a stream queues",
        next_step="measure it without hiding launches, or as a CUDA graph",
    )


def positive(seconds: float, source: str) -> float:
    """`seconds` themselves. Raises ClockError where time went back, stood still or is no number."""
    if not (seconds > 0.0 and math.isfinite(seconds)):
        raise ClockError(
            f"the clock ({source}) says that work took {seconds:g} s",
            why="a clock that steps or stands still cannot time anything",
            next_step="see what sets the clock of this machine (a hypervisor, a suspended laptop), "
            "then measure again",
        )
    return seconds


def check_claim(claimed_s: float, passed_s: float) -> None:
    """Raise ClockError where events say that more time went by than the host's clock saw."""
    if not claimed_s <= _CLAIM * passed_s + _CLAIM_S:
        raise ClockError(
            f"events claim {claimed_s:.6g} s of {passed_s:.6g} s that the host's clock saw",
            why="one of the two clocks stepped or runs wrong, and nobody can say which",
            next_step="measure again; if it stays, the device or its driver is at fault",
        )
