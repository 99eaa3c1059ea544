"""A row's trace file: spans of CPU, GPU and copies on one clock, for Perfetto and for pictures.

A gzip of Chrome's trace format (JSON object form), which ui.perfetto.dev opens as it is:

    displayTimeUnit   "ms"
    otherData         narrowgauge_trace: the format, 1; seconds: how long was watched;
                      cut: why the trace is not whole, or ""; clock: see `Trace`
    traceEvents       "M" events name the lanes (thread_name) and order them (thread_sort_index);
                      "X" events: ts and dur in microseconds from the start of the trace, pid 1,
                      tid the lane's number, cat the kind (KINDS), name, args

Lanes are, in this order and where anything is in them: `spans` and `spans, thread N` (of the
experiment, on the host), `spans, GPU stream N` (the same, as the GPU worked them off), `CPU ops`,
`host launch` (calls of CUDA), `GPU stream N` (kernels), `copies H2D`, `copies D2H`, `copies D2D`,
`copies P2P`. A GPU lane begins with `GPU D` for devices after the first. Within a lane events nest
or follow each other; what overlaps without nesting goes to a lane of the same name with ` (2)`.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from narrowgauge_contract.errors import DamagedRecordError

__all__ = [
    "KINDS",
    "TRACE_FILE",
    "TRACE_FORMAT",
    "Trace",
    "TraceEvent",
    "read_trace",
    "write_trace",
]

TRACE_FILE = "spans.json.gz"
#: 1: first.
TRACE_FORMAT = 1
#: What `cat` may be, in the order of the lanes.
KINDS = ("span", "gpu-span", "cpu-op", "launch", "kernel", "copy")
#: Clocks of 1 us tick let a child end that much after its parent.
_TICK_S = 1e-6


@dataclasses.dataclass(frozen=True)
class TraceEvent:
    """Something that took time. `start` is in seconds, by the clock of its trace's `start`."""

    kind: str
    lane: str
    name: str
    start: float
    seconds: float
    args: Dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclasses.dataclass(frozen=True)
class Trace:
    """What was seen from `start` for `seconds`: of `time.perf_counter` as it is written, 0 as read.

    `cut` says why it is not everything, or is empty. `clock` says how well the clocks agree:
    `profiler_drift_us` and `gpu_drift_ppm` from start to end, which are corrected linearly, and
    `profiler_uncertainty_us` and `gpu_uncertainty_us`, which remain.
    """

    start: float
    seconds: float
    events: Tuple[TraceEvent, ...]
    clock: Dict[str, float]
    cut: str = ""


def write_trace(path: Path, trace: Trace) -> None:
    """Write the file; the same bytes for the same trace."""
    body: List[Dict[str, Any]] = []
    for number, (lane, events) in enumerate(_lanes(trace.events), start=1):
        head = {"ph": "M", "pid": 1, "tid": number}
        body.append({**head, "name": "thread_name", "args": {"name": lane}})
        body.append({**head, "name": "thread_sort_index", "args": {"sort_index": number}})
        body += [_encode(event, number, trace.start) for event in events]
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "narrowgauge_trace": TRACE_FORMAT,
            "seconds": trace.seconds,
            "cut": trace.cut,
            "clock": trace.clock,
        },
        "traceEvents": body,
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    path.write_bytes(gzip.compress(text.encode("utf-8"), 6, mtime=0))


def read_trace(path: Path) -> Trace:
    """Read the file; lanes come in their order. Raises DamagedRecordError."""
    try:
        document = json.loads(gzip.decompress(path.read_bytes()))
        other = document["otherData"]
        if other["narrowgauge_trace"] != TRACE_FORMAT:
            raise DamagedRecordError(
                f"{path} has trace format {other['narrowgauge_trace']!r}, this program reads"
                f" {TRACE_FORMAT}"
            )
        names = {
            event["tid"]: event["args"]["name"]
            for event in document["traceEvents"]
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        events = tuple(
            TraceEvent(
                str(event["cat"]), str(names[event["tid"]]), str(event["name"]),
                float(event["ts"]) / 1e6, float(event["dur"]) / 1e6, event.get("args", {}),
            )
            for event in document["traceEvents"]
            if event["ph"] == "X"
        )  # fmt: skip
        return Trace(0.0, float(other["seconds"]), events, other["clock"], str(other["cut"]))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise DamagedRecordError(f"{path} is no trace of ours", why=str(error)) from error


def _lanes(events: Iterable[TraceEvent]) -> Iterable[Tuple[str, Sequence[TraceEvent]]]:
    """The lanes in their order, each with events that nest or follow each other."""
    by_lane: Dict[Tuple[int, str], List[TraceEvent]] = {}
    for event in events:
        by_lane.setdefault((KINDS.index(event.kind), event.lane), []).append(event)
    for key in sorted(by_lane, key=lambda key: (key[0], _natural(key[1]))):
        lane = key[1]
        ordered = sorted(by_lane[key], key=lambda event: (event.start, -event.seconds))
        for number, nested in enumerate(_nested(ordered), start=1):
            yield (lane if number == 1 else f"{lane} ({number})"), nested


def _natural(lane: str) -> Tuple[Tuple[bool, int, str], ...]:
    """`GPU stream 7` before `GPU stream 20`."""
    words = lane.replace(",", "").split()
    return tuple((word.isdigit(), int(word) if word.isdigit() else 0, word) for word in words)


def _nested(ordered: Sequence[TraceEvent]) -> List[List[TraceEvent]]:
    """Deal events out, first fit; a child that ends a tick after its parent ends with it."""
    dealt: List[List[TraceEvent]] = []
    open_ends: List[List[float]] = []
    for event in ordered:
        for number, ends in enumerate(open_ends):
            while ends and ends[-1] <= event.start:
                ends.pop()
            if not ends or event.end <= ends[-1] + _TICK_S:
                chosen = number
                break
        else:
            chosen, ends = len(dealt), []
            dealt.append([])
            open_ends.append(ends)
        end = min(event.end, ends[-1]) if ends else event.end
        clipped = (
            event if end == event.end else dataclasses.replace(event, seconds=end - event.start)
        )
        dealt[chosen].append(clipped)
        ends.append(end)
    return dealt


def _encode(event: TraceEvent, lane: int, zero: float) -> Dict[str, Any]:
    encoded = {
        "ph": "X", "pid": 1, "tid": lane, "cat": event.kind, "name": event.name,
        "ts": round((event.start - zero) * 1e6, 3), "dur": round(event.seconds * 1e6, 3),
    }  # fmt: skip
    if event.args:
        encoded["args"] = event.args
    return encoded
