"""Tables of a run, from its record alone: CSV for programs, Markdown for people."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from narrowgauge import statistics
from narrowgauge.baseline import Baseline, baseline_of
from narrowgauge.noise import EXPERIMENT, MEANING, Floors, percent, workloads_of
from narrowgauge.statistics import Configuration
from narrowgauge.units import Scale, scale_of
from narrowgauge.view import metric_names, unit_of
from narrowgauge_contract.figures import median
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import headline_of

__all__ = [
    "headed",
    "markdown_line",
    "markdown_table",
    "measured_on",
    "noise_floor_markdown",
    "noise_floor_table",
    "rows_table",
    "spread",
    "summary_table",
    "write_tables",
]

Table = tuple[list[str], list[list[Any]]]
#: Processes on either side of a comparison, for which the least detectable effect is written down;
#: that of any other size follows from the same record.
_SIDES = (1, 3, 6, 10, 20)


def write_tables(record: Record, folder: Path, floors: Floors) -> list[Path]:
    """Write rows.csv, summary.csv and summary.md, and of a run of noise-floor what it says of
    comparisons: noise-floor.csv and noise-floor.md. Returns the files made."""
    rows, summary = rows_table(record), summary_table(record, floors)
    contents = {
        "rows.csv": _csv(rows),
        "summary.csv": _csv(summary),
        "summary.md": f"# {record.run_id}\n\n{markdown_table(record, floors)}",
    }
    if record.experiment == EXPERIMENT and workloads_of(record):
        contents["noise-floor.csv"] = _csv(noise_floor_table(record))
        contents["noise-floor.md"] = f"# {record.run_id}\n\n{noise_floor_markdown(record)}"
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in contents]


def rows_table(record: Record) -> Table:
    """A line per row: what it was, whether it counts, and one figure per metric."""
    parameters = list(dict.fromkeys(name for row in record.rows for name in row.parameters))
    metrics = metric_names(record)
    head = ["row", "repeat", "seed", *parameters, "status", "valid", "reasons", "seconds"]
    head += [headed(name, unit_of(record, name)) for name in metrics]
    lines = []
    for row in record.rows:
        figures: list[Any] = []
        for name in metrics:
            metric = row.metric(name)
            has = metric is not None and bool(metric.values)
            figures.append(statistics.figure(metric).value if metric is not None and has else "")
        values = [_cell(row.parameters.get(name, "")) for name in parameters]
        valid = "yes" if row.validity.valid else "no"
        reasons = "; ".join(row.validity.reasons)
        seconds = "" if row.seconds is None else row.seconds
        lines.append([row.index, row.repeat, row.seed, *values, row.status.value, valid, reasons,
                      seconds, *figures])  # fmt: skip
    return head, lines


def summary_table(record: Record, floors: Floors) -> Table:
    """A line per configuration and metric, over its valid rows.

    Where the experiment names a baseline, with the ratio to it, in which above 1 is better.
    """
    found = statistics.configurations(record.rows)
    names = statistics.varying(found)
    head = [*names, "metric", "unit", "of", "valid", "repeats", "median", "mean", "least", "most"]
    head += ["low95", "high95"]
    baseline = baseline_of(record, floors)
    if baseline is not None:
        head += [baseline.heading, "ratio_low95", "ratio_high95", "detectable", "within_detectable"]
    lines = []
    for each in found:
        for metric in metric_names(record):
            first = next((m for row in each.valid if (m := row.metric(metric)) and m.values), None)
            summary = statistics.summarize(each.figures(metric))
            if first is None or summary is None:
                continue
            interval = summary.interval
            bounds = [interval.low, interval.high] if interval else ["", ""]
            lines.append([
                *(_cell(each.parameters[name]) for name in names), metric, first.unit,
                statistics.figure(first).how, summary.n, len(each.rows), summary.median,
                summary.mean, summary.low, summary.high, *bounds,
                *(_ratio_cells(baseline, each, metric) if baseline is not None else ()),
            ])  # fmt: skip
    return head, lines


def _ratio_cells(baseline: Baseline, found: Configuration, metric: str) -> list[Any]:
    if metric != baseline.metric:
        return [""] * 5
    ratio, detectable = baseline.ratio(found)
    interval = ratio.ratio_interval
    bounds = [interval.low, interval.high] if interval else ["", ""]
    known = detectable.least is not None
    within = {True: "yes", False: "no", None: ""}[detectable.within]
    value = "" if ratio.value is None else ratio.ratio
    return [value, *bounds, detectable.least if known else "", within]


def noise_floor_table(record: Record) -> Table:
    """Of a run of noise-floor: a line per workload and size of a comparison.

    `threshold` and `least_detectable` are shares, 0.02 for a ratio of 1.02, and empty where `note`
    says why.
    """
    head = ["workload", "processes", "above", "below", "threshold", "least_detectable", "note"]
    lines: list[list[Any]] = []
    for label, figures in workloads_of(record):
        for side in _SIDES:
            effect = statistics.least_detectable_effect(figures, side, side)
            known = ["", ""] if effect.least is None else [effect.threshold, effect.least]
            lines.append([label, len(figures), side, side, *known, effect.reason])
    return head, lines


def noise_floor_markdown(record: Record) -> str:
    """The same for people: a line per workload, a column per size."""
    sizes = [f"{side} and {side}" for side in _SIDES]
    head = ["workload", "processes", *sizes]
    lines = [markdown_line(head), markdown_line(["---"] * len(head))]
    notes: list[str] = []
    for label, figures in workloads_of(record):
        effects = [statistics.least_detectable_effect(figures, side, side) for side in _SIDES]
        cells = ["–" if each.least is None else percent(each.least) for each in effects]
        lines.append(markdown_line([label, str(len(figures)), *cells]))
        reasons = dict.fromkeys(each.reason for each in effects if each.reason)
        notes += [f"{label}: {reason}" for reason in reasons]
    about = f"{MEANING}, between so many and so many processes"
    return "\n".join([*lines, "", *(f"{line}  " for line in [*notes, about])]) + "\n"


def markdown_table(record: Record, floors: Floors, metrics: Sequence[str] = ()) -> str:
    """A line per configuration, a column per metric: median of the valid repeats, their range.

    Where the experiment names a baseline and its metric is shown, the ratio to it as well, with its
    95 % interval and the least effect that this comparison would find.
    """
    named = metrics or headline_of(record.spec) or metric_names(record)
    chosen = [n for n in named if n in metric_names(record)]
    found = statistics.configurations(record.rows)
    names = statistics.varying(found)
    scales = {name: _scale(found, name, unit_of(record, name)) for name in chosen}
    head = [*names, *(headed(name, scale.unit) for name, scale in scales.items())]
    baseline = baseline_of(record, floors)
    if baseline is not None and baseline.metric not in chosen:
        baseline = None
    head += [f"{baseline.heading} (95 %)", "detectable"] if baseline is not None else []
    head += ["valid repeats"]
    lines = [markdown_line(head), markdown_line(["---"] * len(head))]
    for each in found:
        cells = [str(_cell(each.parameters[name])) for name in names]
        cells += [spread(each.figures(name), scale) for name, scale in scales.items()]
        if baseline is not None:
            ratio, detectable = baseline.ratio(each)
            interval = ratio.ratio_interval
            bounds = f" ({interval.low:.4g} to {interval.high:.4g})" if interval else ""
            known = ratio.value is not None
            cells += [f"{ratio.ratio:.4g}{bounds}" if known else "–", detectable.text or "–"]
        lines.append(markdown_line([*cells, f"{len(each.valid)}/{len(each.rows)}"]))
    note = baseline.note() if baseline is not None else ""
    return "\n".join([*lines, *(["", note] if note else [])]) + "\n"


def _scale(found: Iterable[Configuration], name: str, unit: str) -> Scale:
    """One for the whole column: that of the configuration in the middle."""
    summaries = (statistics.summarize(each.figures(name)) for each in found)
    return scale_of(median([each.median for each in summaries if each is not None] or [0.0]), unit)


def spread(figures: Sequence[float], scale: Scale) -> str:
    """The median with least and most; a dash where there is no figure."""
    summary = statistics.summarize(figures)
    if summary is None:
        return "–"
    middle = scale.number(summary.median)
    if summary.n == 1:
        return middle
    return f"{middle} ({scale.number(summary.low)} to {scale.number(summary.high)})"


def headed(name: str, unit: str) -> str:
    """A column's heading: the name, and the unit where there is one."""
    return f"{name} ({unit})" if unit and unit != "1" else name


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else value


def _csv(table: Table) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerows([table[0], *table[1]])
    return stream.getvalue()


def markdown_line(cells: Iterable[str]) -> str:
    """One line of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def measured_on(record: Record) -> str:
    """`NVIDIA H200, torch 2.11.0`: the device and the torch of a record."""
    inside = record.inside
    device = (inside.accelerator or inside.cpu) if inside is not None else "unknown device"
    torch = f", torch {inside.torch}" if inside is not None and inside.torch else ""
    return f"{device}{torch}"
