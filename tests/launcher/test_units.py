"""Seconds on the screen and in tables for people: in the unit that fits, and one for a range."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

from ratio_cases import bench_run
from rich.console import Console

from narrowgauge.noise import Floors
from narrowgauge.show import show_run
from narrowgauge.store import RunFolder
from narrowgauge.tables import markdown_table, summary_table
from narrowgauge_contract.outcome import Metric
from narrowgauge_contract.record import Record


def _quick(folder: RunFolder) -> Record:
    """The same run, a thousand times as fast: fp32 takes some 80 µs, int8 some 10."""
    record = folder.record()
    rows = []
    for row in record.rows:
        latency = row.metric("latency")
        assert latency is not None
        values = tuple(value / 1000 for value in latency.values)
        rows.append(
            dataclasses.replace(
                row, metrics=(Metric("latency", "s", latency.source, values),), facts={}
            )
        )
    quick = dataclasses.replace(record, rows=tuple(rows))
    folder.record_path.chmod(0o644)
    folder.record_path.unlink()
    folder.write_record(quick)
    return quick


def test_the_screen_has_figures_and_ranges_in_one_unit(tmp_path: Path) -> None:
    folder = bench_run(tmp_path)
    _quick(folder)
    screen = io.StringIO()
    show_run(folder, Console(file=screen, width=200), Floors.none())
    text = screen.getvalue()

    (line,) = [each for each in text.splitlines() if re.match(r"\s*int8\s+latency", each)]
    assert re.search(r"latency\s+\d{1,2}(\.\d+)? µs\s+\d{1,2}(\.\d+)?–\d{1,2}(\.\d+)? ", line)
    rows = text[text.index("Rows") :].splitlines()
    assert any(re.search(r"int8 +\d{1,2}(\.\d+)? µs", each) for each in rows)
    assert not re.search(r"\b0\.000\d+", text[: text.index("Results summary")])


def test_a_column_for_people_has_one_unit_and_one_for_programs_the_record_s(
    tmp_path: Path,
) -> None:
    record = _quick(bench_run(tmp_path))

    head, *lines = markdown_table(record, Floors.none()).splitlines()
    assert "latency (µs)" in head
    assert re.search(r"\| [78]\d(\.\d+)? \(", next(line for line in lines if "strict" in line))
    heads, rows = summary_table(record, Floors.none())
    assert {row[heads.index("unit")] for row in rows} == {"s"}
    assert all(float(row[heads.index("median")]) < 1e-3 for row in rows)
