"""Many small measurements under the same conditions: all once in order, then all in reverse."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import Any, Callable, ContextManager, Dict, Hashable, List, Sequence, Tuple

import torch

from narrowgauge_kernels.library import has_kernels
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.errors import HeldTooLongError
from narrowgauge_lab.measure.samplers import Sample, Sampler, sampler

__all__ = ["CPU", "Instrument", "Part", "Timed", "hides_launches", "rounded"]

CPU = torch.device("cpu")
#: Samples per part and sweep; more would make the file larger and the planner no wiser.
_LEAST_SAMPLES, _MOST_SAMPLES = 3, 12
#: Calls of a sample on a GPU, so that its events show little; the host's clock needs no such thing.
_CALLS = 4
_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Part:
    """Something to time. `host`: by the host's clock, since `call` waits for the device itself;
    `tf32`: with the process's float32 products allowed to be TF32."""

    key: Hashable
    call: Callable[[], Any]
    device: torch.device
    host: bool = False
    tf32: bool = False


@dataclasses.dataclass
class Timed:
    """Seconds per call, of both sweeps."""

    seconds: Tuple[float, ...] = ()
    host_seconds: Tuple[float, ...] = ()


class Instrument:
    """`seconds`: how long a part is measured, and warmed up at most, in each sweep."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        #: Whether our kernels are there, and whether launches are hidden behind one of them.
        self.built = self.hidden = hides_launches(device)
        self._seconds = seconds

    def sweep(self, parts: Sequence[Part]) -> Dict[Any, Timed]:
        """Samples by key: there and back again, so that a drift meets all parts alike."""
        found: Dict[Any, Timed] = {part.key: Timed() for part in parts}
        assert len(found) == len(parts)
        for part in (*parts, *reversed(parts)):
            samples = self._measured(part)
            timed = found[part.key]
            timed.seconds += rounded([seconds for seconds, _ in samples])
            timed.host_seconds += rounded([host for _, host in samples])
        return found

    def _measured(self, part: Part) -> List[Sample]:
        with _float32(part.tf32):
            if part.host or part.device.type == "cpu":
                return self._taken(sampler(CPU, False, False, time.perf_counter), part.call, 1)
            with torch.cuda.device(part.device):
                if self.hidden:
                    try:
                        by = sampler(part.device, False, True, time.perf_counter)
                        return self._taken(by, part.call, _CALLS)
                    except HeldTooLongError:
                        pass  # it waits for the device itself: its launches are part of it
                by = sampler(part.device, False, False, time.perf_counter)
                return self._taken(by, part.call, _CALLS)

    def _taken(self, by: Sampler, call: Callable[[], Any], calls: int) -> List[Sample]:
        """Samples after a warm-up, each as long as it may be; a few, however long a call takes."""
        for _ in range(by.first_calls):
            call()
        (one,) = by.block(call, calls, 1, math.inf)
        wanted = int(self._seconds / (max(one) * calls))
        count = max(_LEAST_SAMPLES, min(_MOST_SAMPLES, wanted))
        ends = time.perf_counter() + self._seconds
        while time.perf_counter() < ends:
            by.block(call, calls, min(count, by.block_size(one, calls)), one[0])
        samples: List[Sample] = []
        while len(samples) < count:
            size = min(count - len(samples), by.block_size(one, calls))
            samples += by.block(call, calls, size, one[0])
        return samples


def hides_launches(device: torch.device) -> bool:
    """Whether a kernel of ours can hold a stream until all is queued."""
    return device.type == "cuda" and has_kernels(device.type)


def rounded(seconds: Sequence[float]) -> Tuple[float, ...]:
    """Samples to five digits, which is more than any clock here has."""
    return tuple(float(f"{each:.{_DIGITS}g}") for each in seconds)


def _float32(tf32: bool) -> ContextManager[Any]:
    return tf32_flags.tf32_set_to(True) if tf32 else contextlib.nullcontext()
