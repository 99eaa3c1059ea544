"""The trace file: what Perfetto reads, what our pictures read, and what neither must be given."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Dict, List

import pytest

from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.traces import Trace, TraceEvent, read_trace, write_trace


def _event(start: float, seconds: float, lane: str = "CPU ops", kind: str = "cpu-op") -> TraceEvent:
    return TraceEvent(kind, lane, f"at {start:g}", start, seconds)


def _written(tmp_path: Path, *events: TraceEvent) -> Path:
    path = tmp_path / "spans.json.gz"
    write_trace(path, Trace(100.0, 10.0, events, {"gpu_drift_ppm": 1.5}, "cut short"))
    return path


def _lanes(path: Path) -> Dict[str, List[str]]:
    found: Dict[str, List[str]] = {}
    for event in read_trace(path).events:
        found.setdefault(event.lane, []).append(event.name)
    return found


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    copy = TraceEvent("copy", "copies H2D", "Memcpy HtoD", 100.5, 0.25, {"bytes": 4096})

    read = read_trace(_written(tmp_path, copy))

    assert (read.start, read.seconds, read.cut) == (0.0, 10.0, "cut short")
    assert read.clock == {"gpu_drift_ppm": 1.5}
    (event,) = read.events
    assert (event.kind, event.lane, event.name) == ("copy", "copies H2D", "Memcpy HtoD")
    assert (event.start, event.seconds, event.args) == (0.5, 0.25, {"bytes": 4096})


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    first = _written(tmp_path, _event(100.0, 1.0)).read_bytes()

    assert _written(tmp_path, _event(100.0, 1.0)).read_bytes() == first


def test_lanes_stand_in_a_fixed_order(tmp_path: Path) -> None:
    path = _written(
        tmp_path,
        _event(101, 1, "copies D2H", "copy"),
        _event(101, 1, "GPU stream 20", "kernel"),
        _event(101, 1, "GPU stream 7", "kernel"),
        _event(101, 1, "host launch", "launch"),
        _event(101, 1, "CPU ops, thread 2"),
        _event(101, 1, "CPU ops"),
        _event(101, 1, "spans, GPU stream 0", "gpu-span"),
        _event(101, 1, "spans", "span"),
    )
    document: Dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    heads = [e for e in document["traceEvents"] if e["ph"] == "M"]

    assert [e["args"]["name"] for e in heads if e["name"] == "thread_name"] == [
        "spans", "spans, GPU stream 0", "CPU ops", "CPU ops, thread 2", "host launch",
        "GPU stream 7", "GPU stream 20", "copies D2H",
    ]  # fmt: skip
    orders = [e["args"]["sort_index"] for e in heads if e["name"] == "thread_sort_index"]
    assert orders == list(range(1, 9))


def test_what_overlaps_without_nesting_gets_a_lane_of_its_own(tmp_path: Path) -> None:
    """Perfetto closes the inner of two events first; a lane with others would be shown wrong."""
    inside, after, across = _event(100.2, 0.3), _event(101.0, 1.0), _event(100.9, 0.5)

    path = _written(tmp_path, _event(100.0, 1.0), inside, after, across)

    assert _lanes(path) == {
        "CPU ops": ["at 100", "at 100.2", "at 101"],
        "CPU ops (2)": ["at 100.9"],
    }


def test_a_child_that_ends_a_tick_late_ends_with_its_parent(tmp_path: Path) -> None:
    path = _written(tmp_path, _event(100.0, 1.0), _event(100.5, 0.5000008))
    parent, child = read_trace(path).events

    assert parent.lane == child.lane
    assert child.end == pytest.approx(parent.end, abs=1e-9)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b"no json"),
        gzip.compress(b"[]"),
        gzip.compress(b'{"traceEvents": [], "otherData": {"narrowgauge_trace": 2}}'),
        gzip.compress(b'{"traceEvents": [], "otherData": {}}'),
        gzip.compress(b'{"traceEvents": [{"ph": "X"}], "otherData": {"narrowgauge_trace": 1}}'),
        gzip.compress(b'{"traceEvents": []}')[:-9],
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "spans.json.gz"
    path.write_bytes(content)

    with pytest.raises(DamagedRecordError):
        read_trace(path)
