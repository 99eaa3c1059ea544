"""Tables of what a row measured once for each block, step or size: a line for each of these, a
column for each metric.

    <!-- series: DEVICE/RUN metric,metric,… -->
    <!-- series: DEVICE/RUN by=NAME from=0 called=WORD repeats=each NAME=VALUE metric,… -->

A metric is either one that counts its samples (`index`), or a family of metrics whose names differ
in one place: `size*_accuracy`, a line for each of what stands in place of the star.
`by` takes the lines' names from a fact or a parameter that lists them; without it they are counted,
from 1 or from what `from` says. `called` is the heading over them. NAME=VALUE choose rows by their
parameters. `repeats=each` shows the figure of every repeat in place of median, least and most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from narrowgauge import statistics
from narrowgauge.errors import UsageError
from narrowgauge.statistics import Configuration
from narrowgauge.statistics.configurations import word
from narrowgauge.tables import headed, markdown_line, spread
from narrowgauge.units import Scale, scale_of
from narrowgauge.view import metric_names, unit_of
from narrowgauge_contract.figures import figure, median
from narrowgauge_contract.outcome import Metric, Row
from narrowgauge_contract.record import Record

__all__ = ["series_markdown"]

_FORM = "series: DEVICE/RUN [by=NAME] [from=N] [called=WORD] [repeats=each] [NAME=VALUE …] metric,…"

#: Figures of one metric by the line that they stand in, one for each valid repeat that has it.
_Lines = dict[str, list[float]]


@dataclass(frozen=True)
class _Wanted:
    """What a marker asks for."""

    metrics: tuple[str, ...]
    by: str
    first: int
    called: str
    each: bool
    fixed: Mapping[str, str]


def series_markdown(record: Record, said: str) -> str:
    """The table that the words of a marker ask for.

    Raises UsageError for words that ask for none, for a metric that counts nothing or that no
    chosen row has, and where the names that `by` promises are not there.
    """
    wanted = _parse(said)
    rows = [
        row
        for row in record.rows
        if all(word(row.parameters.get(name)) == value for name, value in wanted.fixed.items())
    ]
    found = statistics.configurations(rows)
    names = statistics.varying(found)
    columns = {name: [_lines(each, name, wanted) for each in found] for name in wanted.metrics}
    for name, all_lines in columns.items():
        if not any(all_lines):
            raise UsageError(f"no row of {record.run_id} has '{name}' for the series '{said}'")
    scales = {name: _scale(columns[name], _unit(record, name)) for name in wanted.metrics}
    counted = wanted.called or _counted(record, wanted.metrics[0])
    head = [*names, counted, *(headed(name, scale.unit) for name, scale in scales.items())]
    head += ["valid repeats"]
    lines = [markdown_line(head), markdown_line(["---"] * len(head))]
    for place, each in enumerate(found):
        own = [word(each.parameters[name]) for name in names]
        last = f"{len(each.valid)}/{len(each.rows)}"
        here = {name: columns[name][place] for name in columns}
        lines += [markdown_line([*own, *cells, last]) for cells in _body(here, scales, wanted)]
    return "\n".join(lines) + "\n"


def _parse(said: str) -> _Wanted:
    words = said.split()
    named = dict(each.split("=", 1) for each in words if "=" in each)
    listed = "".join(each for each in words if "=" not in each)
    metrics = tuple(name for name in listed.split(",") if name)
    first, repeats = named.pop("from", "1"), named.pop("repeats", "")
    if not metrics or not first.isdigit() or repeats not in ("", "each"):
        raise UsageError(f"'{said}' asks for no series", next_step=f"write <!-- {_FORM} -->")
    by, called = named.pop("by", ""), named.pop("called", "")
    return _Wanted(metrics, by, int(first), called, repeats == "each", named)


def _body(
    columns: Mapping[str, _Lines], scales: Mapping[str, Scale], wanted: _Wanted
) -> Iterable[list[str]]:
    labels = dict.fromkeys(label for lines in columns.values() for label in lines)
    for label in labels:
        cells = (_cell(columns[name].get(label, ()), scales[name], wanted) for name in columns)
        yield [label, *cells]


def _cell(figures: Sequence[float], scale: Scale, wanted: _Wanted) -> str:
    if wanted.each and figures:
        return ", ".join(map(scale.number, figures))
    if len(set(figures)) == 1:  # counts; how many repeats there were has a column of its own
        return scale.number(figures[0])
    return spread(figures, scale)


def _lines(found: Configuration, name: str, wanted: _Wanted) -> _Lines:
    """Of each valid row, in the order of repeats, so that the same place is the same network."""
    lines: _Lines = {}
    for row in sorted(found.valid, key=lambda row: row.repeat):
        for label, value in _family(row, name) if "*" in name else _series(row, name, wanted):
            lines.setdefault(label, []).append(value)
    return lines


def _family(row: Row, name: str) -> Iterable[tuple[str, float]]:
    pattern = _pattern(name)
    for metric in row.metrics:
        match = pattern.fullmatch(metric.name)
        if match and metric.values:
            yield match.group(1), figure(metric).value


def _pattern(name: str) -> re.Pattern[str]:
    before, _, after = name.partition("*")
    return re.compile(f"{re.escape(before)}([0-9][0-9_]*){re.escape(after)}")


def _series(row: Row, name: str, wanted: _Wanted) -> Iterable[tuple[str, float]]:
    metric = row.metric(name)
    if metric is None:
        return ()
    if not metric.index or "samples" in metric.conditions:
        raise UsageError(
            f"'{name}' is no series",
            why="its samples were thinned" if metric.index else "nothing counts its samples",
            next_step="show it in a table",
        )
    return zip(_labels(row, metric, wanted), metric.values, strict=True)


def _labels(row: Row, metric: Metric, wanted: _Wanted) -> Sequence[str]:
    count = len(metric.values)
    if not wanted.by:
        return [str(wanted.first + place) for place in range(count)]
    said = row.facts.get(wanted.by, row.parameters.get(wanted.by, ()))
    names = said.split(",") if isinstance(said, str) else [str(each) for each in said]
    if len(names) != count:
        raise UsageError(
            f"'{wanted.by}' does not name what '{metric.name}' counts",
            why=f"it lists {len(names)}, and there are {count}",
        )
    return names


def _unit(record: Record, name: str) -> str:
    if "*" not in name:
        return unit_of(record, name)
    pattern = _pattern(name)
    return unit_of(record, next(n for n in metric_names(record) if pattern.fullmatch(n)))


def _scale(found: Iterable[_Lines], unit: str) -> Scale:
    """One for the whole column: that of the value in the middle."""
    values = [value for lines in found for figures in lines.values() for value in figures]
    return scale_of(median(values), unit)


def _counted(record: Record, name: str) -> str:
    """What the lines are: the index of a metric, or what stands before a family's star."""
    if "*" in name:
        return name.partition("*")[0].strip("_")
    return next(metric.index for row in record.rows if (metric := row.metric(name)) is not None)
