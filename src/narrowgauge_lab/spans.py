"""Named spans of a row's own work: on the host's clock, and as the GPU worked them off.

`ctx.span` goes to one of these: `NoSpans` (nothing is kept, the usual case), `RecordedSpans` (into
the row's trace), `NvtxSpans` (ranges that Nsight Systems shows).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import Any, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.traces import TraceEvent
from narrowgauge_lab import torch_compat

__all__ = ["MOST_SPANS", "GpuClock", "NoSpans", "NvtxSpans", "RecordedSpans", "Spans"]

#: Each span on a GPU holds two CUDA events until the row ends.
MOST_SPANS = 50_000
#: Tries per reference point; the one that the host bracketed tightest counts.
_TRIES = 10


class Spans:
    """What `ctx.span` needs."""

    def span(self, name: str) -> ContextManager[None]:
        raise NotImplementedError


class NoSpans(Spans):
    """Nothing is kept, and a span costs a function call."""

    def span(self, name: str) -> ContextManager[None]:
        del name
        return contextlib.nullcontext()


class NvtxSpans(Spans):
    """NVTX ranges, for Nsight Systems."""

    def span(self, name: str) -> ContextManager[None]:
        return _nvtx_range(name)


@contextlib.contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


@dataclasses.dataclass(frozen=True)
class _Reference:
    """A CUDA event and when the host saw it: `host` seconds, give or take `uncertainty`."""

    event: Any
    host: float
    uncertainty: float


class GpuClock:
    """Maps CUDA events of one device to the host's clock, by a reference point at either end.

    Making one synchronises the device, and so does `close`. Between them the two clocks may drift;
    `drift_ppm` says how much they did, and `to_host` takes it out linearly.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._first = self._reference()
        self._rate = 1.0
        self.drift_ppm = 0.0
        self.uncertainty = self._first.uncertainty

    def mark(self, stream: Any) -> Any:
        """A CUDA event on the stream, now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def close(self) -> None:
        """Take the second reference point. All events must be recorded before."""
        last = self._reference()
        host = last.host - self._first.host
        gpu = self._first.event.elapsed_time(last.event) / 1e3
        self.uncertainty = max(self.uncertainty, last.uncertainty)
        if gpu > 0:
            self._rate = host / gpu
            self.drift_ppm = (gpu / host - 1.0) * 1e6

    def to_host(self, event: Any) -> float:
        """When the GPU came to the event, in seconds of the host's clock."""
        gpu = self._first.event.elapsed_time(event) / 1e3
        return float(self._first.host + gpu * self._rate)

    def _reference(self) -> _Reference:
        found = []
        stream = torch.cuda.current_stream(self.device)
        torch.cuda.synchronize(self.device)
        for _ in range(_TRIES):
            before = time.perf_counter()
            event = self.mark(stream)
            event.synchronize()
            after = time.perf_counter()
            found.append(_Reference(event, (before + after) / 2, (after - before) / 2))
        return min(found, key=lambda reference: reference.uncertainty)


#: The stream that a span began on, and its first CUDA event.
_Opened = Tuple[Any, Any]


@dataclasses.dataclass
class _Taken:
    """One span that has ended. `stream` is the handle of the CUDA stream it was recorded on."""

    name: str
    thread: int
    began: float
    ended: float
    marks: Optional[Tuple[Any, Any]] = None
    stream: int = 0


class _OneSpan:
    """The context manager of one span. Exceptions pass through, and end it."""

    __slots__ = ("_began", "_name", "_opened", "_owner")

    def __init__(self, owner: RecordedSpans, name: str) -> None:
        self._owner = owner
        self._name = name

    def __enter__(self) -> None:
        self._opened = self._owner.opened()
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter()
        self._owner.take(self._name, self._began, ended, self._opened)


class RecordedSpans(Spans):
    """Keeps spans, of any thread, until the row ends: `MOST_SPANS` of them, and counts the rest.

    On CUDA each span is two events as well; making the first synchronises the device. While a CUDA
    graph is captured only the host's side of a span is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = time.perf_counter()
        self.left_out = 0
        #: Whether spans that begin now are still kept.
        self.open = True
        self._taken: List[_Taken] = []
        self._added: List[TraceEvent] = []
        self._clock = GpuClock(device) if device.type == "cuda" else None
        self._main = threading.get_ident()

    def span(self, name: str) -> ContextManager[None]:
        if not self.open:
            return contextlib.nullcontext()
        return _OneSpan(self, name)  # type: ignore[return-value]

    def opened(self) -> Optional[_Opened]:
        """A point in the GPU's time; None where there is no GPU, or it is being recorded."""
        if self._clock is None or torch_compat.capturing():
            return None
        stream = torch.cuda.current_stream(self.device)
        return stream, self._clock.mark(stream)

    def take(self, name: str, began: float, ended: float, opened: Optional[_Opened]) -> None:
        """Keep a span that was `opened` and ends now, on the stream that it began on."""
        if len(self._taken) >= MOST_SPANS:
            self.left_out += 1
            return
        taken = _Taken(name, threading.get_ident(), began, ended)
        if self._clock is not None and opened is not None and not torch_compat.capturing():
            stream, first = opened
            taken.marks = (first, self._clock.mark(stream))
            taken.stream = int(stream.cuda_stream)
        self._taken.append(taken)

    def add(self, events: Sequence[TraceEvent]) -> None:
        """Keep what another clockwork saw meanwhile, by the host's clock; see `Ledger`."""
        if self.open:
            self._added += events

    def finish(self) -> Tuple[List[TraceEvent], Dict[str, float]]:
        """The spans as events, and how well the GPU's clock was known. Synchronises the device."""
        threads = _numbered([taken.thread for taken in self._taken], first=self._main)
        events = [_on_host(taken, threads[taken.thread]) for taken in self._taken] + self._added
        if self._clock is None:
            return events, {}
        self._clock.close()
        streams = _numbered([taken.stream for taken in self._taken if taken.marks], first=0)
        for taken in self._taken:
            if taken.marks is not None:
                began, ended = (self._clock.to_host(mark) for mark in taken.marks)
                lane = f"spans, GPU stream {streams[taken.stream]}"
                events.append(TraceEvent("gpu-span", lane, taken.name, began, ended - began))
        return events, {
            "gpu_drift_ppm": self._clock.drift_ppm,
            "gpu_uncertainty_us": self._clock.uncertainty * 1e6,
        }


def _on_host(taken: _Taken, thread: int) -> TraceEvent:
    lane = "spans" if thread == 0 else f"spans, thread {thread + 1}"
    return TraceEvent("span", lane, taken.name, taken.began, taken.ended - taken.began)


def _numbered(handles: List[int], first: int) -> Dict[int, int]:
    """Small numbers for handles, in the order of their occurrence; `first` is 0."""
    return {handle: number for number, handle in enumerate(dict.fromkeys([first, *handles]))}
