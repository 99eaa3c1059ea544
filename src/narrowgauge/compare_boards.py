"""`narrowgauge compare RUN RUN RUN …`: one experiment on several boards, in one table and one plot.

A column is a run, named by its board. Nothing is pooled: other boards are other measurements.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge import statistics
from narrowgauge.errors import UsageError
from narrowgauge.statistics import Configuration, Summary
from narrowgauge.units import scale_of
from narrowgauge.view import metric_names, unit_of, widen
from narrowgauge_contract.codec import encode
from narrowgauge_contract.record import Record

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Column",
    "Line",
    "SideBySide",
    "draw_boards",
    "print_boards",
    "side_by_side",
    "side_by_side_json",
]

_WIDTH_IN, _HEIGHT_IN = 6.4, 2.2


@dataclass(frozen=True)
class Column:
    """One run. `name` is its board's, or what it ran on; unique among the columns."""

    name: str
    run_id: str
    device: str
    dropped: int


@dataclass(frozen=True)
class Line:
    """One metric of one configuration; a summary for each column, None where it has none."""

    label: str
    metric: str
    unit: str
    cells: tuple[Summary | None, ...]


@dataclass(frozen=True)
class SideBySide:
    """One experiment on several boards. `notes`: what a reader must know before comparing."""

    experiment: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()


def side_by_side(records: Sequence[Record]) -> SideBySide:
    """Pair the configurations of records by their parameters. Raises UsageError where they are of
    several experiments, or one is named twice."""
    experiments = sorted({record.experiment for record in records})
    if len(experiments) > 1:
        raise UsageError(f"runs of {', '.join(experiments)} cannot be compared")
    if len({record.run_id for record in records}) < len(records):
        raise UsageError("a run cannot be compared with itself", next_step="name each run once")
    found = [
        {_key(each): each for each in statistics.configurations(record.rows)} for record in records
    ]
    every = [each for configurations in found for each in configurations.values()]
    names = statistics.varying(every)
    keys = dict.fromkeys(key for configurations in found for key in configurations)
    units = {
        metric: unit_of(record, metric) for record in records for metric in metric_names(record)
    }
    lines = []
    for key in keys:
        group = [configurations.get(key) for configurations in found]
        label = next(each.label(names) for each in group if each is not None)
        for metric, unit in units.items():
            cells = tuple(
                statistics.summarize(each.figures(metric))
                if each is not None and unit_of(record, metric) == unit
                else None
                for each, record in zip(group, records, strict=True)
            )
            if any(cell is not None for cell in cells):
                lines.append(Line(label, metric, unit, cells))
    columns = _columns(records)
    return SideBySide(experiments[0], columns, tuple(lines), _notes(records, columns))


def side_by_side_json(found: SideBySide) -> Any:
    """For scripts."""
    return encode(found)


def print_boards(found: SideBySide, console: Console) -> None:
    """One table, a column for each board."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    widen(console)
    for column in found.columns:
        left_out = f", {column.dropped} INVALID rows left out" if column.dropped else ""
        text = f"  {column.run_id}, {column.device}{left_out}"
        console.print(Text.assemble((column.name, "bold"), text))
    for note in found.notes:
        console.print(Text(f"! {note}", style="yellow"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("metric")
    for column in found.columns:
        table.add_column(column.name, overflow="fold")
    label = ""
    for line in found.lines:
        if line.label and line.label != label:
            table.add_section()
            table.add_row(Text(line.label, style="bold"))
        label = line.label
        table.add_row(line.metric, *(_cell(cell, line.unit) for cell in line.cells))
    console.print(table if found.lines else Text("no configuration is in any run", style="red"))


def draw_boards(found: SideBySide, file: Path) -> Path:
    """One plot: a panel for each metric, a bar for each configuration and board, its range over the
    repeats. The table lies beside it as CSV. Raises UsageError for a format that is not known."""
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(line.metric for line in found.lines))
    if not metrics:
        raise UsageError("there is nothing to draw: no run has a figure")
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN * len(metrics) + 0.6), layout="constrained")
    panels = figure.subplots(len(metrics), 1, squeeze=False)[:, 0]
    width = 0.8 / len(found.columns)
    for panel, metric in zip(panels, metrics, strict=True):
        lines = [line for line in found.lines if line.metric == metric]
        medians = [cell.median for line in lines for cell in line.cells if cell is not None]
        scale = scale_of(max(medians, key=abs), lines[0].unit)
        for position, column in enumerate(found.columns):
            here = [(x, line.cells[position]) for x, line in enumerate(lines)]
            there = [(x, cell) for x, cell in here if cell is not None]
            panel.bar(
                [x + (position - (len(found.columns) - 1) / 2) * width for x, _ in there],
                [cell.median * scale.factor for _, cell in there],
                width * 0.9,
                yerr=[
                    [(cell.median - cell.low) * scale.factor for _, cell in there],
                    [(cell.high - cell.median) * scale.factor for _, cell in there],
                ],
                capsize=2,
                label=column.name,
            )
        panel.set_xticks(range(len(lines)), [line.label or found.experiment for line in lines])
        panel.set_ylabel(f"{metric}\n{scale.word}".rstrip())
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150)
        file.with_suffix(".csv").write_text(_csv(found), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot draw {file}", why=str(error), next_step="name a .png, .svg or .pdf"
        ) from error
    return file


def _csv(found: SideBySide) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    where = ("configuration", "metric", "unit", "board", "run")
    writer.writerow([*where, "median", "low", "high", "n"])
    for line in found.lines:
        for column, cell in zip(found.columns, line.cells, strict=True):
            if cell is not None:
                where = (line.label, line.metric, line.unit, column.name, column.run_id)
                writer.writerow([*where, cell.median, cell.low, cell.high, cell.n])
    return text.getvalue()


def _columns(records: Sequence[Record]) -> tuple[Column, ...]:
    columns: list[Column] = []
    for record in records:
        name = _name(record)
        taken = {column.name for column in columns}
        unique = name if name not in taken else f"{name} ({record.run_id[-6:]})"
        dropped = len(record.rows) - len(record.valid_rows())
        columns.append(Column(unique, record.run_id, _device(record), dropped))
    return tuple(columns)


def _notes(records: Sequence[Record], columns: Sequence[Column]) -> tuple[str, ...]:
    found = []
    for record, column in zip(records, columns, strict=True):
        scheduler = record.host.scheduler if record.host else None
        if scheduler is not None and scheduler.indicative:
            found.append(f"{column.name}: indicative only: {scheduler.indicative}")
    code = {
        "lab and kernels": [record.hashes.source for record in records],
        "the experiment's folder": [record.hashes.experiment for record in records],
    }
    for what, hashes in code.items():
        if len(set(hashes)) > 1:
            each = zip(columns, hashes, strict=True)
            said = ", ".join(f"{column.name} {digest[:12]}" for column, digest in each)
            found.append(f"not the same code: {what}: {said}")
    return tuple(found)


def _name(record: Record) -> str:
    """The board; a run that was no board's is named by its target."""
    board = record.host.board if record.host else None
    if board is None:
        return record.target
    return board.name if board.device == "all" else f"{board.name}/{board.device}"


def _device(record: Record) -> str:
    inside = record.inside
    known = (inside.accelerator or inside.cpu) if inside else None
    return known or (record.host.machine.cpu if record.host else "unknown")


def _key(each: Configuration) -> tuple[str, ...]:
    return tuple(f"{name}={value!r}" for name, value in sorted(each.parameters.items()))


def _cell(summary: Summary | None, unit: str) -> str:
    if summary is None:
        return "–"
    scale = scale_of(summary.median, unit)
    figure = scale.text(summary.median)
    if summary.n == 1:
        return figure
    return f"{figure}\n{scale.number(summary.low)}–{scale.number(summary.high)}, n={summary.n}"
