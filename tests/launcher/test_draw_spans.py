"""The picture of a trace: its lanes, its shares, and what it must not be drawn from."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from PIL import Image
from result_cases import job, record_of
from rich.console import Console

from narrowgauge import reference
from narrowgauge.draw import draw_run
from narrowgauge.draw_spans import _bars, _levels, _short, gap_share, lanes_of
from narrowgauge.noise import Floors
from narrowgauge.show import show_run
from narrowgauge.store import RunFolder, Store
from narrowgauge.view import load_view, warnings_of
from narrowgauge_contract.errors import DamagedRecordError, UsageError
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.outcome import SideFile, Validity
from narrowgauge_contract.traces import TRACE_FILE, Trace, TraceEvent, write_trace

#: No noise floor is known; these tests are of no ratio.
NO_FLOORS = Floors(())


def _event(kind: str, lane: str, name: str, start: float, seconds: float) -> TraceEvent:
    return TraceEvent(kind, lane, name, start, seconds)


KERNEL = "void at::native::vectorized_elementwise_kernel<4, Add>(int, Add)"
TRACE = Trace(
    0.0,
    1.0,
    (
        _event("span", "spans", "step", 0.0, 0.9),
        _event("cpu-op", "CPU ops", "aten::conv2d", 0.1, 0.2),
        _event("cpu-op", "CPU ops", "aten::_convolution", 0.12, 0.1),
        _event("kernel", "GPU stream 7", KERNEL, 0.2, 0.3),
        _event("kernel", "GPU stream 20", "other", 0.4, 0.2),
        _event("copy", "copies H2D", "Memcpy HtoD (Pageable -> Device)", 0.5, 0.3),
    ),
    {},
    "only the first 1.0 s of the row are in it",
)


def _recorded(
    tmp_path: Path, trace: Trace, rows: tuple[int, ...] = (0,), *, draws: bool = False
) -> RunFolder:
    """A recorded run of which some rows left the trace; it `draws` nothing else unless asked."""
    folder = Store(tmp_path).new_run(job())
    record = record_of(folder)
    changed = list(record.rows)
    for index in rows:
        path = folder.out / f"row-{index}" / TRACE_FILE
        write_trace(path, trace)
        side = SideFile(f"row-{index}/{TRACE_FILE}", sha256_file(path), path.stat().st_size)
        row = changed[index]
        facts = {**row.facts, "profiled": "torch"}
        files = (*row.side_files, side)
        changed[index] = dataclasses.replace(row, facts=facts, side_files=files)
    files = tuple(side for row in changed for side in row.side_files)
    spec = {**record.spec, "draw": record.spec["draw"] if draws else []}
    folder.write_record(
        dataclasses.replace(record, rows=tuple(changed), side_files=files, spec=spec)
    )
    return folder


def test_lanes_know_how_busy_they_were() -> None:
    lanes = lanes_of(TRACE)

    assert [(lane.name, round(lane.busy, 3)) for lane in lanes] == [
        ("spans", 0.9), ("CPU ops", 0.2), ("GPU stream 7", 0.3), ("GPU stream 20", 0.2),
        ("copies H2D", 0.3),
    ]  # fmt: skip


def test_the_gap_is_where_no_stream_and_no_copy_had_work() -> None:
    assert gap_share(TRACE) == ("GPU", pytest.approx(1.0 - 0.6))
    host = dataclasses.replace(TRACE, events=TRACE.events[:3])
    assert gap_share(host) == ("CPU", pytest.approx(0.8))
    spans = dataclasses.replace(TRACE, events=TRACE.events[:1])
    assert gap_share(spans) == ("CPU", pytest.approx(0.1))


def test_what_lies_outside_the_window_counts_for_nothing() -> None:
    events = (_event("kernel", "k", "a", -0.5, 1.0), _event("kernel", "k", "b", 0.9, 5.0))
    trace = Trace(0.0, 1.0, events, {})

    assert gap_share(trace)[1] == pytest.approx(0.4)
    assert [lane.busy for lane in lanes_of(trace)] == [pytest.approx(0.6)]


def test_nested_events_go_below_and_hairs_are_drawn_as_one() -> None:
    outer = _event("cpu-op", "CPU ops", "outer", 0.0, 0.5)
    inner = _event("cpu-op", "CPU ops", "inner", 0.1, 0.1)
    assert _levels([inner, outer]) == [[outer], [inner]]

    hairs = [_event("kernel", "k", "hair", i * 1e-4, 5e-5) for i in range(100)]
    long = _event("kernel", "k", "long", 0.5, 0.1)
    bars = _bars([*hairs, long], 1.0)
    assert [(bar.name, bar.dearest) for bar in bars] == [("", "hair"), ("long", "long")]
    assert (bars[0].start, bars[0].end) == (0.0, pytest.approx(0.00995))


@pytest.mark.parametrize(
    ("name", "room", "short"),
    [
        (KERNEL, 60, "vectorized_elementwise_kernel"),
        (KERNEL, 10, "vectorize…"),
        ("aten::conv2d", 60, "aten::conv2d"),
        ("aten::conv2d", 8, "conv2d"),
        ("Memcpy HtoD (Pageable -> Device)", 60, "Memcpy HtoD "),
        ("<lambda>", 60, "<lambda>"),
    ],
)
def test_names_are_cut_to_what_tells_them_apart(name: str, room: int, short: str) -> None:
    assert _short(name, room) == short


def test_a_trace_is_drawn_once_per_configuration_and_the_same_again(tmp_path: Path) -> None:
    folder = _recorded(tmp_path, TRACE, rows=(0, 1, 2))

    made = {path.name: path.read_bytes() for path in draw_run(folder, NO_FLOORS)}

    drawn = {name for name in made if name.startswith("spans")}
    assert drawn == {f"spans-row-{i}.{s}" for i in (0, 1) for s in ("svg", "png")}
    with Image.open(folder.derived / "spans-row-0.png") as picture:
        assert picture.width > 1200
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20
    assert {path.name: path.read_bytes() for path in draw_run(folder, NO_FLOORS)} == made


def test_an_invalid_row_is_drawn_too(tmp_path: Path) -> None:
    """What ran when is not one of the numbers that must not be used; often it says why."""
    folder = _recorded(tmp_path, TRACE)
    record = folder.record()
    rows = tuple(dataclasses.replace(r, validity=Validity(False, ("no",))) for r in record.rows)
    folder.record_path.chmod(0o644)
    folder.record_path.unlink()
    folder.write_record(dataclasses.replace(record, rows=rows))

    assert "spans.png" in {path.name for path in draw_run(folder, NO_FLOORS)}


def test_a_changed_trace_is_not_drawn_and_everything_else_is(tmp_path: Path) -> None:
    folder = _recorded(tmp_path, TRACE, draws=True)
    (folder.out / "row-0" / TRACE_FILE).write_bytes(b"changed")

    with pytest.raises(DamagedRecordError, match="was changed"):
        draw_run(folder, NO_FLOORS)

    names = {path.name for path in folder.derived.iterdir()}
    assert "loss.png" in names
    assert "spans.png" not in names


def test_a_profiled_run_says_so_and_where_its_trace_is(tmp_path: Path) -> None:
    folder = _recorded(tmp_path, TRACE)

    assert "profiled (torch): timings include the profiler" in warnings_of(load_view(folder))
    console = Console(width=200, record=True, file=io.StringIO())
    show_run(folder, console, NO_FLOORS)
    assert f"{folder.out}/row-0/{TRACE_FILE}; ui.perfetto.dev opens it" in console.export_text()


def test_what_a_profiler_was_in_is_no_reference(tmp_path: Path) -> None:
    record = dataclasses.replace(_recorded(tmp_path, TRACE).record(), synthetic=False)
    assert record.host is not None
    assert record.host.image is not None
    image = dataclasses.replace(record.host.image, stand_in=False)
    record = dataclasses.replace(record, host=dataclasses.replace(record.host, image=image))

    with pytest.raises(UsageError, match="cannot be a reference") as raised:
        reference.export(record, tmp_path)
    assert raised.value.why == "its timings include a profiler"
