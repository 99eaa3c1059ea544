"""What each pass of each layer took, stage by stage, and what it moved over the bus.

| mode       | what is kept                                                                        |
|------------|-------------------------------------------------------------------------------------|
| off        | nothing; a stage costs two empty calls                                              |
| bytes      | how many bytes moved                                                                |
| serial     | also each stage by the host's clock, the device being synchronised at its end       |
| overlapped | also each stage as its stream worked it off, by CUDA events on the host's clock     |

Serial: within a call of a layer a stage begins where the one before it ended, so Python between two
stages is the later one's (`between` says how much that was in all), and what a call does after its
last stage is nobody's. The sum over its stages against the call's own wall time is thus a finding.

Overlapped: stages of several streams overlap. `coverage.coverage` sets their union and the idle
time in a window against the window; a stage that the clocks put outside makes the two disagree.

Bytes are what the copy was told to move, values and scales, counted where the copy is queued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any, ContextManager, Dict, List, Optional, Tuple

import torch

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_contract.traces import TraceEvent
from narrowgauge_lab.spans import GpuClock

__all__ = ["ALL_LAYERS", "HOST", "IDLE", "MODES", "STAGES", "Call", "Interval", "Ledger"]

MODES = ("off", "bytes", "serial", "overlapped")
#: `reshape` is whatever only changes layout or dtype on the host.
STAGES = ("quantise", "to_device", "refit", "compute", "from_device", "reshape", "wait")
#: The layer of what moves for several at once: weights that share a tensor, late gradients.
ALL_LAYERS = "(all layers)"
#: The lane of what the host itself does.
HOST = "host"
#: A context that does nothing; it may be entered any number of times, also inside itself.
IDLE: ContextManager[None] = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Interval:
    """One stage. `start` is in seconds of `time.perf_counter`; bytes by our own count."""

    layer: str
    pass_: str
    stage: str
    lane: str
    start: float
    seconds: float
    to_device: int
    from_device: int

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclasses.dataclass(frozen=True)
class Call:
    """A layer's forward or backward, from its first line to its last; serial mode only."""

    layer: str
    direction: str
    start: float
    seconds: float


@dataclasses.dataclass
class _Taken:
    layer: str
    pass_: str
    stage: str
    lane: str
    to_device: int
    from_device: int
    began: float
    ended: float
    marks: Optional[Tuple[Any, Any]] = None


class Ledger:
    """Keeps stages until `clear`. One thread at a time runs stages, as autograd does. `mode` may be
    set between steps; `clear` has to follow where it becomes "overlapped".

    `finish` is called before `intervals` in overlapped mode on CUDA: it synchronises, and maps the
    GPU's clock to the host's. On a CPU that stands in for an accelerator all stages are the host's.
    """

    def __init__(self, mode: str = "off", device: Optional[torch.device] = None) -> None:
        if mode not in MODES:
            raise UnknownNameError("ledger mode", mode, MODES)
        self.mode = mode
        self.device = device if device is not None else torch.device("cpu")
        self.cuda = self.device.type == "cuda"
        #: Seconds of Python between stages that the later stage was given; serial mode.
        self.between = 0.0
        self._names: Dict[int, str] = {}
        self._clock: Optional[GpuClock] = None
        self._opened: Optional[float] = None
        self.clear()

    def __reduce__(self) -> Tuple[Any, ...]:
        """A copy of a model keeps accounts of its own, and begins with none."""
        return Ledger, (self.mode, self.device)

    def clear(self) -> None:
        """Forget all, bytes too. In overlapped mode on CUDA this synchronises the device."""
        self._taken: List[_Taken] = []
        self._calls: List[Call] = []
        self._intervals: Optional[Tuple[Interval, ...]] = None
        self._to_device = self._from_device = 0
        self.between = 0.0
        self.clock: Dict[str, float] = {}
        self._clock = None
        if self.mode == "overlapped" and self.cuda:
            self._clock = GpuClock(self.device)

    def name_stream(self, stream: Any, name: str) -> None:
        """The lane of what runs on a CUDA stream; without one it is `stream <handle>`."""
        self._names[int(stream.cuda_stream)] = name

    def call(self, layer: str, direction: str) -> ContextManager[None]:
        """A layer's forward or backward, around its stages."""
        if self.mode != "serial":
            return IDLE
        return _SerialCall(self, layer, direction)  # type: ignore[return-value]

    def stage(
        self,
        layer: str,
        pass_: str,
        stage: str,
        *,
        stream: Any = None,
        to_device: int = 0,
        from_device: int = 0,
    ) -> ContextManager[None]:
        """One stage, for a `with` block; the bytes that are queued in it.

        `stream`: the CUDA stream that works it off, None for what the host does itself. A stage
        that an error ends is not kept.
        """
        if self.mode == "off":
            return IDLE
        if self.mode == "bytes":
            self._to_device += to_device
            self._from_device += from_device
            return IDLE
        taken = _Taken(layer, pass_, stage, HOST, to_device, from_device, 0.0, 0.0)
        if self.mode == "serial":
            return _SerialStage(self, taken)  # type: ignore[return-value]
        return _OverlappedStage(self, taken, stream)  # type: ignore[return-value]

    def finish(self) -> None:
        """Close the window of the GPU's clock: all stages are over. Synchronises the device."""
        if self._clock is not None and self._intervals is None:
            self._clock.close()
            self.clock = {
                "gpu_drift_ppm": self._clock.drift_ppm,
                "gpu_uncertainty_us": self._clock.uncertainty * 1e6,
            }
            self._intervals = tuple(self._interval(each) for each in self._taken)

    def intervals(self) -> Tuple[Interval, ...]:
        """All stages, in the order in which they were queued. Closes the window if need be."""
        self.finish()
        if self._intervals is not None:
            return self._intervals
        return tuple(self._interval(each) for each in self._taken)

    def calls(self) -> Tuple[Call, ...]:
        """The layers' calls, in serial mode."""
        return tuple(self._calls)

    def bytes_moved(self) -> Tuple[int, int]:
        """To the device and from it, since the last `clear`."""
        return self._to_device, self._from_device

    def trace_events(self) -> List[TraceEvent]:
        """The stages as events of a row's trace, in lanes of their own."""
        events = []
        for each in self.intervals():
            host = each.lane == HOST
            lane = "hetero" if host else f"hetero, GPU {each.lane}"
            args = {"layer": each.layer, "pass": each.pass_, "stage": each.stage}
            moved = {"to_device": each.to_device, "from_device": each.from_device}
            args.update({name: value for name, value in moved.items() if value})
            name = f"{each.layer} {each.pass_}: {each.stage}"
            kind = "span" if host else "gpu-span"
            events.append(TraceEvent(kind, lane, name, each.start, each.seconds, args))
        return events

    def keep(self, taken: _Taken) -> None:
        """A stage that has ended; its contexts call this."""
        self._to_device += taken.to_device
        self._from_device += taken.from_device
        self._taken.append(taken)

    def lane(self, stream: Any) -> str:
        handle = int(stream.cuda_stream)
        return self._names.get(handle, f"stream {handle}")

    def _interval(self, taken: _Taken) -> Interval:
        began, ended = taken.began, taken.ended
        if taken.marks is not None and self._clock is not None:
            began, ended = (self._clock.to_host(mark) for mark in taken.marks)
        return Interval(
            taken.layer, taken.pass_, taken.stage, taken.lane, began, ended - began,
            taken.to_device, taken.from_device,
        )  # fmt: skip


class _SerialCall:
    """From the device at rest to the call's last line."""

    __slots__ = ("_began", "_direction", "_layer", "_ledger")

    def __init__(self, ledger: Ledger, layer: str, direction: str) -> None:
        self._ledger, self._layer, self._direction = ledger, layer, direction

    def __enter__(self) -> None:
        if self._ledger.cuda:
            torch.cuda.synchronize(self._ledger.device)
        self._began = self._ledger._opened = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        seconds = time.perf_counter() - self._began
        self._ledger._opened = None
        if kind is None:
            self._ledger._calls.append(Call(self._layer, self._direction, self._began, seconds))


class _SerialStage:
    """By the host's clock; the device has done it all when it ends."""

    __slots__ = ("_ledger", "_taken")

    def __init__(self, ledger: Ledger, taken: _Taken) -> None:
        self._ledger, self._taken = ledger, taken

    def __enter__(self) -> None:
        ledger, now = self._ledger, time.perf_counter()
        self._taken.began = now
        if ledger._opened is not None:
            ledger.between += now - ledger._opened
            self._taken.began = ledger._opened

    def __exit__(self, kind: object, *_: object) -> None:
        ledger, taken = self._ledger, self._taken
        if kind is not None:
            return
        if ledger.cuda:
            torch.cuda.synchronize(ledger.device)
        taken.ended = time.perf_counter()
        if ledger._opened is not None:
            ledger._opened = taken.ended
        ledger.keep(taken)


class _OverlappedStage:
    """By two events of its stream, or by the host's clock where the host does the work."""

    __slots__ = ("_first", "_ledger", "_stream", "_taken")

    def __init__(self, ledger: Ledger, taken: _Taken, stream: Any) -> None:
        self._ledger, self._taken = ledger, taken
        self._stream = stream if ledger._clock is not None else None
        self._first: Any = None

    def __enter__(self) -> None:
        if self._stream is not None and self._ledger._clock is not None:
            self._first = self._ledger._clock.mark(self._stream)
        else:
            self._taken.began = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        ledger, taken = self._ledger, self._taken
        if kind is not None:
            return
        if self._first is not None and ledger._clock is not None:
            taken.lane = ledger.lane(self._stream)
            taken.marks = (self._first, ledger._clock.mark(self._stream))
        else:
            taken.ended = time.perf_counter()
        ledger.keep(taken)
