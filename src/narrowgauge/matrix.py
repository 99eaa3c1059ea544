"""One table over several reference records: a line for each value of one parameter, a column for
each value of another.

    <!-- matrix: DEVICE METRIC DOWN ACROSS of=VALUE NAME=VALUE … -->

`of` is the column that is held against the others; NAME=VALUE choose rows. Ratios are of one
record's rows alone, because only these were measured side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median

from narrowgauge import statistics
from narrowgauge.errors import UsageError
from narrowgauge.statistics import Configuration, LogRatio
from narrowgauge.statistics.configurations import word
from narrowgauge.tables import headed, markdown_line, measured_on
from narrowgauge.units import Scale, scale_of
from narrowgauge.view import unit_of
from narrowgauge_contract.record import Record, load_record
from narrowgauge_contract.spec import parse_spec
from narrowgauge_contract.summary import Summary

__all__ = ["matrix_markdown"]

_FORM = "matrix: DEVICE METRIC DOWN ACROSS of=VALUE NAME=VALUE …"


@dataclass(frozen=True)
class _Wanted:
    """What a marker asks for."""

    device: str
    metric: str
    down: str
    across: str
    subject: str
    fixed: Mapping[str, str]


@dataclass(frozen=True)
class _Line:
    """The columns of one line, all of one record."""

    record: Record
    columns: Mapping[str, Configuration]


def matrix_markdown(folder: Path, said: str) -> str:
    """The table that a marker asks for, from `folder`/reference. Of records that measured the same
    line, the newest of those with most columns counts: without the others there is no ratio.

    Raises UsageError for a marker that is none, for one that chooses no row, and where more than
    one configuration of a record would stand in one cell.
    """
    wanted = _parse(said)
    paths = sorted((folder / "reference" / wanted.device).glob("*.json.gz"))
    lines: dict[str, _Line] = {}
    for record in map(load_record, paths):
        for label, columns in _lines_of(record, wanted):
            if label not in lines or len(columns) >= len(lines[label].columns):
                lines[label] = _Line(record, columns)
    if not lines:
        raise UsageError(f"the matrix '{said}' chooses no row of {len(paths)} records")
    return _table({label: lines[label] for label in _in_order(lines, wanted)}, wanted)


def _in_order(lines: Mapping[str, _Line], wanted: _Wanted) -> list[str]:
    """The labels as the experiment lists its choices; others after them, as they were found."""
    newest = max((line.record for line in lines.values()), key=lambda record: record.run_id)
    parameters = parse_spec(newest.spec, where=f"the record of {newest.run_id}").parameters
    order = [word(choice) for choice in parameters[wanted.down].choices]
    return sorted(lines, key=lambda label: [*order, label].index(label))


def _parse(said: str) -> _Wanted:
    words = said.split()
    plain = [each for each in words if "=" not in each]
    named = dict(each.split("=", 1) for each in words if "=" in each)
    if len(plain) != 4 or "of" not in named:
        raise UsageError(f"'{said}' asks for no matrix", next_step=f"write <!-- {_FORM} -->")
    device, metric, down, across = plain
    return _Wanted(device, metric, down, across, named.pop("of"), named)


def _lines_of(record: Record, wanted: _Wanted) -> Iterable[tuple[str, dict[str, Configuration]]]:
    chosen = [
        row
        for row in record.rows
        if all(word(row.parameters.get(name)) == value for name, value in wanted.fixed.items())
    ]
    lines: dict[str, dict[str, Configuration]] = {}
    for each in statistics.configurations(chosen):
        line = lines.setdefault(word(each.parameters[wanted.down]), {})
        column = word(each.parameters[wanted.across])
        if column in line:
            differ = statistics.varying([line[column], each])
            label = word(each.parameters[wanted.down])
            raise UsageError(
                f"{record.run_id} has more than one {column} of {label}",
                why=f"they differ in {', '.join(differ)}",
                next_step=f"choose by {differ[0]}=VALUE",
            )
        line[column] = each
    return lines.items()


def _table(lines: Mapping[str, _Line], wanted: _Wanted) -> str:
    closing = _closing(next(iter(lines.values())).record)
    columns = _ordered({name for line in lines.values() for name in line.columns}, closing)
    others = [name for name in columns if name != wanted.subject]
    baseline = word(closing.baseline) if closing and closing.baseline is not None else None
    scale = _scale(lines.values(), wanted)
    head = [wanted.down, *(headed(name, scale.unit) for name in columns)]
    head += [f"{wanted.subject} × {baseline} (95 %)"] if baseline else []
    head += [f"{wanted.subject} × best other"]
    body: list[list[str]] = []
    to_baseline: list[float] = []
    to_best: list[float] = []
    less = closing is None or closing.better_less
    for label, line in lines.items():
        cells = [label, *(_cell(line, name, wanted, scale) for name in columns)]
        if baseline:
            cells.append(_ratio(line, baseline, wanted, less, to_baseline))
        cells.append(_ratio(line, _best(line, others, wanted, less), wanted, less, to_best))
        body.append(cells)
    means = [_mean(each) for each in ([to_baseline] if baseline else []) + [to_best]]
    body.append([f"geometric mean of {len(to_best)}", *[""] * len(columns), *means])
    marks = [markdown_line(head), markdown_line(["---"] * len(head)), *map(markdown_line, body)]
    return "\n".join([*marks, "", _sources(lines.values())]) + "\n"


def _closing(record: Record) -> Summary | None:
    return parse_spec(record.spec, where=f"the record of {record.run_id}").closing


def _ordered(names: set[str], closing: Summary | None) -> list[str]:
    order = [word(value) for value in closing.order] if closing is not None else []
    return sorted(
        names, key=lambda name: (order.index(name) if name in order else len(order), name)
    )


def _scale(lines: Iterable[_Line], wanted: _Wanted) -> Scale:
    unit, figures = "", list[float]()
    for line in lines:
        unit = unit or unit_of(line.record, wanted.metric)
        figures += [
            value for each in line.columns.values() for value in each.figures(wanted.metric)
        ]
    return scale_of(median(figures or [0.0]), unit)


def _cell(line: _Line, name: str, wanted: _Wanted, scale: Scale) -> str:
    found = line.columns.get(name)
    summary = statistics.summarize(found.figures(wanted.metric)) if found is not None else None
    return scale.number(summary.median) if summary is not None else "–"


def _best(line: _Line, names: Iterable[str], wanted: _Wanted, less: bool) -> str | None:
    found = {
        name: summary.median
        for name in names
        if name in line.columns
        and (summary := statistics.summarize(line.columns[name].figures(wanted.metric)))
    }
    if not found:
        return None
    return (min if less else max)(found, key=lambda name: found[name])


def _ratio(line: _Line, other: str | None, wanted: _Wanted, less: bool, into: list[float]) -> str:
    """How many times as good the subject is; the figure goes into `into` as well."""
    if other is None or not {other, wanted.subject} <= set(line.columns):
        return "–"
    subject, beside = line.columns[wanted.subject], line.columns[other]
    above, below = (beside, subject) if less else (subject, beside)
    found: LogRatio = statistics.ratio_of(above, below, wanted.metric)
    if found.value is None:
        return "–"
    into.append(found.ratio)
    interval = found.ratio_interval
    bounds = f" ({interval.low:.4g} to {interval.high:.4g})" if interval else ""
    return f"{found.ratio:.4g}{bounds}"


def _mean(ratios: list[float]) -> str:
    return f"{geometric_mean(ratios):.4g}" if ratios else "–"


def _sources(lines: Iterable[_Line]) -> str:
    records = {line.record.run_id: line.record for line in lines}
    about = dict.fromkeys(map(measured_on, records.values()))
    return (
        f"{'; '.join(about)}. Medians over the valid repeats; each ratio from one run's rows "
        f"alone. Records: {', '.join(f'`{name}`' for name in sorted(records))}."
    )
