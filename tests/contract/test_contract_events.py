"""The event log: lines never mix, and a bad line costs itself only."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
from contract_cases import metric, row_start
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge_contract.codec import encode
from narrowgauge_contract.events import EventKind, EventLog, EventTail, read_events


def _line(value: object) -> bytes:
    return json.dumps(encode(value)).encode() + b"\n"


def _emit_many(path: Path, row: int, count: int) -> None:
    with EventLog(path) as log:
        for number in range(count):
            log.emit(EventKind.LOG, row, text=f"{number}:" + "x" * (number % 700))


def test_what_was_emitted_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        sent = [log.emit(EventKind.PROGRESS, 3, done=i, total=9, unit="step") for i in range(9)]

    assert list(read_events(path)) == sent


def test_two_processes_never_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_emit_many, args=(path, row, 800)) for row in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    tail = EventTail(path)
    events = list(tail.poll())

    assert (tail.damaged, tail.unfinished) == (0, False)
    for row in (0, 1):
        texts = [event.data["text"] for event in events if event.row == row]
        assert [int(text.partition(":")[0]) for text in texts] == list(range(800))


def test_a_line_that_is_cut_is_left_for_the_next_poll(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = _line(row_start(0, 1.0))
    path.write_bytes(line + line[:25])
    tail = EventTail(path)

    assert len(list(tail.poll())) == 1
    assert tail.unfinished
    with open(path, "ab") as stream:
        stream.write(line[25:])
    assert list(tail.poll()) == [row_start(0, 1.0)]
    assert not tail.unfinished


@pytest.mark.parametrize(
    "bad",
    [
        b"{]\n",
        b"\n",
        b"\x00\x00\x00\n",
        b"\xff\xfe\n",
        b"[1, 2]\n",
        b'{"kind": "metrics", "t": 1.0, "utc": 1.0}\n',
        b'{"kind": "log", "t": "soon", "utc": 1.0}\n',
        b'{"kind": "log", "t": 1.0, "utc": 1.0, "rows": 1}\n',
    ],
)
def test_a_damaged_line_costs_itself_only(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(_line(row_start(0, 1.0)) + bad + _line(metric(0, 2.0, [1.0])))
    tail = EventTail(path)

    assert [event.kind for event in tail.poll()] == [EventKind.ROW_START, EventKind.METRIC]
    assert tail.damaged == 1


@given(st.integers(0, 400))
def test_cut_anywhere_the_whole_lines_before_are_read(cut: int) -> None:
    content = b"".join(_line(row_start(i, float(i))) for i in range(4))
    cut = min(cut, len(content))
    path = Path(f"/tmp/narrowgauge-cut-{os.getpid()}.jsonl")
    try:
        path.write_bytes(content[:cut])
        tail = EventTail(path)
        assert len(list(tail.poll())) == content[:cut].count(b"\n")
        assert tail.damaged == 0
    finally:
        path.unlink()


def test_no_file_is_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none")) == []


def test_a_full_disk_is_told_and_not_swallowed() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with EventLog(Path("/dev/full")) as log, pytest.raises(OSError, match="No space left"):
        log.emit(EventKind.LOG, text="x")


def test_a_loss_that_is_not_finite_is_still_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit(EventKind.METRIC, 0, values=[float("nan"), float("inf")])

    [event] = read_events(path)

    assert event.data["values"] == ["NaN", "Infinity"]
