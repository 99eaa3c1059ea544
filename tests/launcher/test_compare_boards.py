"""One experiment on several boards: one table, one plot."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from result_cases import job, record_of
from rich.console import Console

from narrowgauge.compare_boards import (
    draw_boards,
    print_boards,
    side_by_side,
    side_by_side_json,
)
from narrowgauge.errors import UsageError
from narrowgauge.store import Store
from narrowgauge_contract.record import (
    BoardFacts,
    Record,
    SchedulerFacts,
    load_record,
    write_record,
)


def _record(root: Path, suffix: str, board: str | None, scale: float = 1.0) -> Record:
    folder = Store(root).new_run(job(f"20261121T100000Z-toy-{suffix}"))
    record = record_of(folder, scale=scale, device="EPYC")
    assert record.host is not None
    facts = BoardFacts(board, f"{board}.lab", "all", 0.01, 0.02) if board else None
    return dataclasses.replace(record, host=dataclasses.replace(record.host, board=facts))


def test_each_board_is_a_column(tmp_path: Path) -> None:
    records = [
        _record(tmp_path, "aaaaaa", "orin"),
        _record(tmp_path, "bbbbbb", "xavier", 2.0),
        _record(tmp_path, "cccccc", None, 4.0),
    ]

    found = side_by_side(records)
    stream = io.StringIO()
    print_boards(found, Console(file=stream, width=120))

    assert [column.name for column in found.columns][:2] == ["orin", "xavier"]
    speeds = [line for line in found.lines if line.metric == "images_per_second"]
    assert [line.label for line in speeds] == ["precision=fp32", "precision=bf16"]
    for line in speeds:
        medians = [cell.median for cell in line.cells if cell is not None]
        assert medians == pytest.approx([medians[0], 2 * medians[0], 4 * medians[0]])
    assert "orin" in stream.getvalue()
    assert "20261121T100000Z-toy-bbbbbb" in stream.getvalue()
    assert side_by_side_json(found)["columns"][1]["name"] == "xavier"


def test_two_runs_of_one_board_keep_their_names_apart(tmp_path: Path) -> None:
    found = side_by_side([_record(tmp_path, "aaaaaa", "orin"), _record(tmp_path, "bbbbbb", "orin")])

    assert [column.name for column in found.columns] == ["orin", "orin (bbbbbb)"]


def test_one_plot_and_its_table_are_written(tmp_path: Path) -> None:
    records = [_record(tmp_path, "aaaaaa", "orin"), _record(tmp_path, "bbbbbb", "xavier", 2.0)]

    path = draw_boards(side_by_side(records), tmp_path / "plots" / "boards.svg")

    assert "<svg" in path.read_text()
    with open(path.with_suffix(".csv"), newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["board"] for row in rows} == {"orin", "xavier"}
    assert {row["metric"] for row in rows} >= {"images_per_second", "accuracy"}


def test_an_axis_of_plain_numbers_names_no_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = side_by_side([_record(tmp_path, "aaaaaa", "orin"), _record(tmp_path, "bbbbbb", "tx2")])
    plain = [
        dataclasses.replace(line, unit="1") if line.metric == "accuracy" else line
        for line in found.lines
    ]
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))

    draw_boards(dataclasses.replace(found, lines=tuple(plain)), tmp_path / "boards.svg")

    (figure,) = drawn
    labels = {panel.get_ylabel() for panel in figure.axes}
    assert labels == {"loss\nnat", "accuracy", "images_per_second\nimages/s"}


def test_what_cannot_be_compared_or_drawn_is_said(tmp_path: Path) -> None:
    one = _record(tmp_path, "aaaaaa", "orin")

    with pytest.raises(UsageError, match="with itself"):
        side_by_side([one, one])
    with pytest.raises(UsageError, match="cannot be compared"):
        side_by_side([one, dataclasses.replace(one, run_id="x", experiment="other")])
    with pytest.raises(UsageError, match="cannot draw"):
        draw_boards(side_by_side([one]), tmp_path / "boards.nonsense")
    empty = dataclasses.replace(one, rows=())
    with pytest.raises(UsageError, match="nothing to draw"):
        draw_boards(side_by_side([empty]), tmp_path / "boards.svg")


def test_the_board_is_kept_in_a_record_and_left_out_of_others(tmp_path: Path) -> None:
    with_board = _record(tmp_path, "aaaaaa", "orin")
    without = _record(tmp_path, "bbbbbb", None)
    for name, record in (("with", with_board), ("without", without)):
        write_record(tmp_path / name, record)
        assert load_record(tmp_path / name) == record

    assert '"board"' in (tmp_path / "with").read_text()
    assert '"board"' not in (tmp_path / "without").read_text()


def test_other_code_and_shared_nodes_are_said(tmp_path: Path) -> None:
    one = _record(tmp_path, "aaaaaa", "orin")
    two = _record(tmp_path, "bbbbbb", "xavier")
    assert side_by_side([one, two]).notes == ()
    assert two.host is not None
    facts = SchedulerFacts(
        **{
            field.name: "shared with others" if field.name == "indicative" else None
            for field in dataclasses.fields(SchedulerFacts)
        }
    )
    shared = dataclasses.replace(two.host, scheduler=facts)
    hashes = dataclasses.replace(two.hashes, source="f" * 64)
    two = dataclasses.replace(two, host=shared, hashes=hashes)

    found = side_by_side([one, two])
    stream = io.StringIO()
    print_boards(found, Console(file=stream, width=200))

    assert found.notes[0] == "xavier: indicative only: shared with others"
    assert found.notes[1].startswith("not the same code: lab and kernels: orin ")
    assert "xavier ffffffffffff" in found.notes[1]
    assert all(note in stream.getvalue() for note in found.notes)
