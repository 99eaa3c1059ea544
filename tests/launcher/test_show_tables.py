"""The tables of a run: what counts, what was skipped, and all of it on eighty columns."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from result_cases import host, job, record_of, recorded
from rich.console import Console, RenderableType

from narrowgauge.noise import Floors
from narrowgauge.show import print_results, show_run
from narrowgauge.show_tables import folded, remarks_of
from narrowgauge.store import RunFolder, Store, read_entry
from narrowgauge_contract.outcome import ErrorInfo, Status, Validity

WHY = "this host has no bf16: " + "it would need another processor, " * 5
LACKING = ErrorInfo("SkippedError", "this host has no bf16")


def _print(*parts: RenderableType, width: int = 80) -> str:
    stream = io.StringIO()
    # A terminal, so that it is not widened, without colours.
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    for part in parts:
        console.print(part)
    return stream.getvalue()


def _screen(folder: RunFolder, width: int = 80) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    show_run(folder, console, Floors.none())
    return stream.getvalue()


@pytest.fixture
def skipped(tmp_path: Path) -> RunFolder:
    """A run whose rows at bf16 were all skipped."""
    folder = Store(tmp_path).new_run(job())
    record = record_of(folder, facts=host(log_tail="the log's last line"))
    lacking = {
        "status": Status.SKIPPED,
        "validity": Validity(False, (f"skipped: {WHY}",)),
        "metrics": (),
        "error": LACKING,
    }
    rows = [
        dataclasses.replace(row, **lacking) if row.parameters["precision"] == "bf16" else row
        for row in record.rows
    ]
    folder.write_record(dataclasses.replace(record, rows=tuple(rows)))
    return folder


def test_rows_that_were_skipped_are_neither_invalid_nor_wrong(skipped: RunFolder) -> None:
    screen = _screen(skipped)

    assert "INVALID" not in screen
    assert "went wrong" not in screen
    assert "the log's last line" not in screen
    assert screen.count("skipped: this host has no bf16") == 1
    assert "0/3" in screen


def test_the_list_counts_what_was_skipped_apart(skipped: RunFolder) -> None:
    stream = io.StringIO()
    print_results([read_entry(skipped)], Console(file=stream, width=120))

    assert "3/3, 3 skipped" in stream.getvalue()


def test_what_the_engines_cache_had_to_say_is_on_the_screen(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job())
    record = record_of(folder)
    notes = ("rebuilt: damaged", "", "rebuilt: damaged", "b", "c", "d")
    rows = [
        dataclasses.replace(row, facts={"engine_cache": {"from_cache": False, "note": note}})
        for row, note in zip(record.rows, notes, strict=True)
    ]
    folder.write_record(dataclasses.replace(record, rows=tuple(rows)))

    screen = _screen(folder)

    assert screen.count("⚠ engine cache: rebuilt: damaged") == 1
    assert "engine cache: and 1 more" in screen


def test_a_long_reason_takes_no_room_from_the_figures(skipped: RunFolder) -> None:
    lines = _screen(skipped).splitlines()

    (head,) = [line for line in lines if line.startswith("precision") and "figure" in line]
    assert head.split() == ["precision", "metric", "figure", "range", "n", "curve"]
    assert any("8 102 images/s" in line and line.startswith("  ") for line in lines)


def test_whether_a_row_counts_is_on_a_narrow_screen_too(tmp_path: Path) -> None:
    lines = _screen(recorded(tmp_path), width=60).splitlines()

    (head,) = [line for line in lines if line.startswith("row")]
    assert head.split() == ["row", "repeat", "precision", "accuracy", "seconds", "validity"]
    assert sum(line.rstrip().endswith("valid") for line in lines) == 6


def test_parameters_stand_below_one_another_where_there_is_no_room(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job(epochs=[3], precision=["fp32", "bf16"]))
    record = record_of(folder)
    rows = [
        dataclasses.replace(row, parameters={**row.parameters, "epochs": 3 + row.index % 2})
        for row in record.rows
    ]
    folder.write_record(dataclasses.replace(record, rows=tuple(rows)))

    lines = _screen(folder, width=72).splitlines()

    place = next(n for n, line in enumerate(lines) if line.startswith("epochs=3"))
    assert lines[place + 1].startswith("precision=")
    assert all(len(line.rstrip()) <= 72 for line in lines)


TABLE = (
    "| Network | Type | Engine | Largest Error | Throughput eager (img/s) | × eager |\n|---|---|",
    "| resnet18 | fp32 | compile | 1.98E-06 | 75.5 | 3.54 |",
    "| resnet18 | fp32 | openvino | – | 75.5 | – | no valid row (skipped: no | here)",
    "| resnet18 | fp32 | xla | – | 75.5 | – | no valid row (skipped: no | here)",
    "| resnet18 | fp32 | narrowgauge | 2.17E-06 | 75.5 | 1.01 |  [within the noise floor]",
)


def _remarks(lines: Sequence[str], width: int) -> list[str]:
    console = Console(width=width)
    text = _print(*remarks_of(lines, console), width=width)
    return [line.rstrip() for line in text.splitlines()]


def test_a_markdown_table_is_a_table_with_its_reasons_once_each() -> None:
    found = _remarks(("before", *TABLE, "after"), 120)

    assert (found[0], found[-1]) == ("before", "after")
    assert found[1].split("  ")[0] == "Network"
    assert [line.split()[-1] for line in found[3:7]] == ["3.54", "[1]", "[1]", "[2]"]
    assert found[7:9] == ["[1] no valid row (skipped: no | here)", "[2] within the noise floor"]


def test_on_a_narrow_screen_what_is_the_same_in_all_lines_is_said_once() -> None:
    found = _remarks(TABLE, 40)

    said = "Network: resnet18 · Type: fp32 · Throughput eager (img/s): 75.5"
    assert " ".join(found[:2]).replace("  ", " ") == said
    assert "narrowgauge 2.17E-06  1.01 [2]" in found
    assert all(len(line) <= 40 for line in found)


def test_a_line_alone_is_not_taken_apart() -> None:
    found = _remarks(TABLE[:2], 60)

    assert found[-1].split() == ["resnet18", "fp32", "compile", "1.98E-06", "75.5", "3.54"]
    assert "Network" in " ".join(found[:-1])


def test_a_table_without_lines_has_its_heading() -> None:
    assert _remarks(TABLE[:1], 120)[0].startswith("Network")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["exit0_a", "b", "exit2_a", "exit1_a"], ["exit0…2_a", "b"]),
        (["exit9_a", "exit10_a", "exit11_a"], ["exit9…11_a"]),
        (["ece_exit0", "ece_exit1", "ece_exit2"], ["ece_exit0…2"]),
        (["exit0_a", "exit1_a"], ["exit0_a", "exit1_a"]),  # two are no longer than both
        (["at_10", "at_25", "at_50"], ["at_10", "at_25", "at_50"]),
        (["at_01", "at_02", "at_03"], ["at_01", "at_02", "at_03"]),
        (["cosine_0_1", "cosine_0_2", "cosine_0_3"], ["cosine_0_1", "cosine_0_2", "cosine_0_3"]),
        ([], []),
    ],
)
def test_names_that_count_on_are_one(names: list[str], shown: list[str]) -> None:
    assert folded(names) == shown
