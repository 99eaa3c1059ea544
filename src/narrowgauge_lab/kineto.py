"""torch's profiler over a part of a row, and its export read into events on the host's clock.

The export is Kineto's own JSON, whose names for categories and base of time stamps changed between
torch 1.8 and today; here is the one place that knows both. Its clock is mapped to
`time.perf_counter` by marks that the profiler sees and the host brackets, at start and end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import torch
from torch.autograd.profiler import record_function

from narrowgauge_contract.collector import without_collector
from narrowgauge_contract.errors import NarrowgaugeError
from narrowgauge_contract.traces import TraceEvent
from narrowgauge_lab import torch_compat

__all__ = ["KinetoProfiler", "read_export"]

# unverified: torch 1.8 on CUDA | no card that it supports | tests/lab/test_profiling_cuda.py there
_MARK = "narrowgauge.clock."
_MARKS = 10
#: Kineto's categories, of torch 1.8 and of today; all others (flows, Python frames, summaries) are
#: not needed.
_CATEGORIES = {
    "cpu_op": "cpu-op",
    "operator": "cpu-op",
    "user_annotation": "cpu-op",
    "cuda_driver": "launch",
    "cuda_runtime": "launch",
    "runtime": "launch",
    "gpu_memset": "kernel",
    "kernel": "kernel",
    "memset": "kernel",
    "gpu_memcpy": "copy",
    "memcpy": "copy",
}
_DIRECTIONS = {"HtoD": "H2D", "DtoH": "D2H", "DtoD": "D2D", "PtoP": "P2P"}
#: What of Kineto's arguments is worth keeping, by kind.
_ARGUMENTS = {"copy": ("bytes",), "kernel": ("grid", "block"), "launch": (), "cpu-op": ()}


class KinetoProfiler:
    """Watches this thread, its backward passes and the GPU from `start` to `stop`.

    After `stop`, `events` gives what was seen from `began` to `ended` (`time.perf_counter`), and
    `clock` how well the clocks agree. Operators of other threads are not seen; what they put on the
    GPU is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile = torch_compat.make_profiler(cuda=device.type == "cuda")
        self._marks: List[Tuple[float, float]] = []
        self.began = 0.0
        self.ended = 0.0
        self.clock: Dict[str, float] = {}

    def start(self) -> None:
        """Begin. Changes the environment of this process, which is the row's own."""
        # Tearing CUPTI down while CUDA graphs captured under it are still replayed crashes.
        os.environ["DISABLE_CUPTI_LAZY_REINIT"] = "1"
        os.environ["TEARDOWN_CUPTI"] = "0"
        self._profile.__enter__()
        self._mark()
        self.began = time.perf_counter()

    def stop(self) -> None:
        """Synchronises the device, so that what was launched before is seen whole."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.ended = time.perf_counter()
        self._mark()
        self._profile.__exit__(None, None, None)

    def events(self, folder: Path) -> List[TraceEvent]:
        """Everything seen, in no order. Kineto's own file lies in `folder` for the time being.

        Raises NarrowgaugeError where it cannot be read.
        """
        with tempfile.TemporaryDirectory(dir=str(folder), prefix="kineto-") as scratch:
            path = Path(scratch, "export.json")
            self._profile.export_chrome_trace(str(path))
            # A million new objects, all kept: looking for garbage would take half of the time.
            with without_collector():
                events = self._read(path)
        # Before and after: what marking itself ran.
        return [each for each in events if self.began <= each.start <= self.ended]

    def _read(self, path: Path) -> List[TraceEvent]:
        raw = list(read_export(path))
        marks = {int(each["name"][len(_MARK) :]): each for each in raw if _is_mark(each)}
        to_host = self._align(marks)
        # Launches have threads of their own numbering: torch 1.8 calls them otherwise there.
        threads: Dict[str, Dict[Any, int]] = {"cpu-op": {marks[0]["tid"]: 0}, "launch": {}}
        return [_event(each, to_host, threads) for each in raw if not _is_mark(each)]

    def _mark(self) -> None:
        for _ in range(_MARKS):
            before = time.perf_counter()
            with record_function(f"{_MARK}{len(self._marks)}"):
                self._marks.append((before, time.perf_counter()))

    def _align(self, marks: Dict[int, Dict[str, Any]]) -> _Line:
        """The line from Kineto's time to the host's, through the best mark at either end."""
        if not {0, _MARKS} <= set(marks):
            raise NarrowgaugeError(
                "torch's profiler did not see the marks that align its clock",
                why=f"its export holds {len(marks)} of {2 * _MARKS}",
                next_step="-p profile=cprofile needs no profiler of torch",
            )
        base = float(marks[0]["ts"])
        first, last = (
            min((self._point(n, each, base) for n, each in marks.items() if n // _MARKS == half),
                key=lambda point: point.doubt)
            for half in (0, 1)
        )  # fmt: skip
        drift = (last.host - last.kineto) - (first.host - first.kineto)
        self.clock = {
            "profiler_drift_us": drift * 1e6,
            "profiler_uncertainty_us": max(first.doubt, last.doubt) * 1e6,
        }
        span = last.kineto - first.kineto
        return _Line(base, first, 1.0 + (drift / span if span > 0 else 0.0))

    def _point(self, number: int, mark: Dict[str, Any], base: float) -> _Point:
        before, after = self._marks[number]
        return _Point((float(mark["ts"]) - base) / 1e6, (before + after) / 2, (after - before) / 2)


@dataclasses.dataclass(frozen=True)
class _Point:
    """One moment by two clocks, in seconds. `doubt`: how far the host's may be off."""

    kineto: float
    host: float
    doubt: float


@dataclasses.dataclass(frozen=True)
class _Line:
    """Kineto's time stamps, microseconds from `base` on, in seconds of the host's clock."""

    base: float
    first: _Point
    rate: float

    def host(self, stamp: float) -> float:
        return self.first.host + self.rate * ((stamp - self.base) / 1e6 - self.first.kineto)


def _is_mark(event: Dict[str, Any]) -> bool:
    return str(event["name"]).startswith(_MARK)


def read_export(path: Path) -> Iterator[Dict[str, Any]]:
    """The complete events of one of our kinds, one at a time: the whole would take much memory.

    Each has `kind`, `name`, `ts` and `dur` in Kineto's microseconds, `pid`, `tid` and `args`.
    Raises NarrowgaugeError where the file is no such export.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    begin = re.search(r'"traceEvents"\s*:\s*\[', text)
    if begin is None:
        raise NarrowgaugeError(f"{path.name} of torch's profiler has no events in it")
    decoder = json.JSONDecoder(strict=False)
    separator = re.compile(r"[\s,]*")
    position = begin.end()
    while True:
        gap = separator.match(text, position)
        position = gap.end() if gap is not None else position
        if text.startswith("]", position):
            return
        try:
            event, position = decoder.raw_decode(text, position)
        except ValueError as error:
            raise NarrowgaugeError(
                "the export of torch's profiler cannot be read", why=str(error)
            ) from error
        kind = _CATEGORIES.get(str(event.get("cat", "")).lower())
        if event.get("ph") == "X" and kind is not None:
            yield {**event, "kind": kind}


def _event(raw: Dict[str, Any], to_host: _Line, threads: Dict[str, Dict[Any, int]]) -> TraceEvent:
    kind, arguments = raw["kind"], raw.get("args", {})
    return TraceEvent(
        kind=kind,
        lane=_lane(raw, threads),
        name=str(raw["name"]),
        start=to_host.host(float(raw["ts"])),
        seconds=float(raw["dur"]) / 1e6,
        args={name: arguments[name] for name in _ARGUMENTS[kind] if name in arguments},
    )


def _lane(raw: Dict[str, Any], threads: Dict[str, Dict[Any, int]]) -> str:
    kind, arguments = raw["kind"], raw.get("args", {})
    if kind in threads:
        number = threads[kind].setdefault(raw["tid"], len(threads[kind]))
        name = "CPU ops" if kind == "cpu-op" else "host launch"
        return name if number == 0 else f"{name}, thread {number + 1}"
    device = int(arguments.get("device", 0))
    before = "" if device == 0 else f"GPU {device} "
    if kind == "copy":
        said = [short for long, short in _DIRECTIONS.items() if long in str(raw["name"])]
        return f"{before}copies {said[0] if said else 'other'}"
    return f"{before or 'GPU '}stream {arguments.get('stream', raw['tid'])}"
