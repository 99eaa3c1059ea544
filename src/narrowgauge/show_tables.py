"""The tables of `narrowgauge show`, each in the widest form that fits the console."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from narrowgauge import statistics
from narrowgauge.statistics import Configuration, word
from narrowgauge.store import RunState
from narrowgauge.units import Scale, format_value, number, scale_of
from narrowgauge.view import RunView, metric_names, spark, unit_of
from narrowgauge_contract.outcome import Row, Status

if TYPE_CHECKING:
    from narrowgauge_contract.record import Record

__all__ = ["folded", "plain_table", "remarks_of", "results_of", "rows_of"]

#: More rows than these would push the summary off the screen.
_ROWS = 12
_CURVE = 16
#: So wide that every table fits: what it needs is asked for, not what it could be pressed into.
_ANY_WIDTH = 10_000
_RIGHT = ("row", "repeat", "seed", "seconds", "figure")
_WRAPPED = ("metric", "validity", "headline", "")

_Cells = Sequence[RenderableType]


def plain_table(title: str, *columns: str, headers: bool = True) -> Table:
    """A table without lines; only text that may break is broken. Where a screen is too narrow for
    the rest, an ellipsis says so: a number without its last digits is another number."""
    table = _frame(title, headers=headers)
    for name in columns:
        breaks = name in _WRAPPED
        table.add_column(
            name,
            justify="right" if name in _RIGHT else "left",
            overflow="fold" if breaks else "ellipsis",
            no_wrap=not breaks,
        )
    return table


def _frame(title: str, *, headers: bool = True) -> Table:
    return Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if headers else None,
        padding=(0, 1, 0, 0),
        show_header=headers,
        pad_edge=False,
        show_edge=False,
    )


def _first_that_fits(tables: Iterable[Table], console: Console) -> Table:
    """The first whose text stands unbroken, else the last."""
    table = plain_table("")
    for table in tables:
        if _fits(table, console):
            break
    return table


def _fits(table: Table, console: Console) -> bool:
    options = console.options.update(width=_ANY_WIDTH)
    return Measurement.get(console, options, table).maximum <= console.width


def results_of(view: RunView, record: Record, console: Console) -> RenderableType:
    """A line per configuration and metric: the figure over the valid repeats, and their spread."""
    forms = (_results(view, record, stacked=stacked) for stacked in (False, True))
    return Group(_first_that_fits(forms, console), *_notes(view, record))


def _results(view: RunView, record: Record, *, stacked: bool) -> Table:
    """`stacked`: parameters stand below one another, in one column. Without anything to put into
    them, there are no columns for range and curve."""
    found = view.configurations
    names = statistics.varying(found)
    figures = {id(each): _figures_of(view, each, record) for each in found}
    used = [any(line[place] for lines in figures.values() for line in lines) for place in range(5)]
    heads = [
        head
        for head, kept in zip(("metric", "figure", "range", "n", "curve"), used, strict=True)
        if kept
    ]
    stacked = stacked and len(names) > 1
    lead = [""] if stacked else names
    table = plain_table("Results", *lead, *heads)
    for each in found:
        values = [word(each.parameters[name]) for name in names]
        if stacked:
            values = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        lines = [
            [cell for cell, kept in zip(line, used, strict=True) if kept]
            for line in figures[id(each)]
        ]
        for place, cells in enumerate(_beside(values, lines, stacked=stacked)):
            table.add_row(*cells, end_section=place == max(len(lines), len(values)) - 1)
        table.add_section()
    return table


def _beside(
    values: Sequence[str], lines: Sequence[_Cells], *, stacked: bool
) -> Iterator[list[RenderableType]]:
    """The parameters' values, in the first line or one a line, beside the lines of figures."""
    if not stacked:
        for place, line in enumerate(lines):
            yield [*(values if place == 0 else [""] * len(values)), *line]
        return
    for place in range(max(len(values), len(lines))):
        value = values[place] if place < len(values) else ""
        yield [value, *(lines[place] if place < len(lines) else [""] * len(lines[0]))]


def _figures_of(
    view: RunView, found: Configuration, record: Record
) -> list[tuple[RenderableType, ...]]:
    """The lines of a configuration; one alone where it has no valid row, of how that came."""
    if found.valid:
        return [(metric, *_metric_cells(view, found, metric, record)) for metric in view.headline]
    return [(_ended(view, found.rows), "–", "", _counted(view, 0, found.rows), "")]


def _metric_cells(
    view: RunView, found: Configuration, metric: str, record: Record
) -> tuple[RenderableType, ...]:
    unit = unit_of(record, metric)
    summary = statistics.summarize(found.figures(metric))
    if summary is None:
        return Text("–"), "", _counted(view, 0, found.rows), ""
    first = next(m for row in found.valid if (m := row.metric(metric)) and m.values)
    scale = scale_of(summary.median, unit)
    figure = Text(scale.text(summary.median), style="bold")
    curve = spark(first.values, _CURVE) if len(first.values) > 1 and first.index else ""
    return figure, _spread(summary, scale), _counted(view, summary.n, found.rows), curve


def _counted(view: RunView, count: int, rows: Sequence[Row]) -> Text:
    """`2/3`, marked where rows are missing that will not come."""
    lost = len(rows) - count > sum(view.not_ended(row) for row in rows)
    return Text(f"{count}/{len(rows)}", style="red" if lost else "")


def _spread(summary: statistics.Summary, scale: Scale) -> str:
    """The interval of the median where there is one, else plainly the least and the most."""
    if summary.n == 1:
        return ""
    if summary.low == summary.high:
        return "all equal"
    if summary.interval is not None:
        low, high = summary.interval.low, summary.interval.high
        return f"{scale.number(low)}–{scale.number(high)} (95 %)"
    return f"{scale.number(summary.low)}–{scale.number(summary.high)}"


def _ended(view: RunView, rows: Sequence[Row]) -> Text:
    without = [row for row in rows if not row.validity.valid]
    if not without:
        return Text("valid", style="green")
    wrong = [row for row in without if row.status is not Status.SKIPPED]
    if not wrong:
        return Text("skipped", style="yellow")
    if all(view.not_ended(row) for row in wrong):
        return Text("running" if view.going else "unfinished", style="yellow")
    return Text("INVALID", style="bold red")


def _notes(view: RunView, record: Record) -> Iterable[Text]:
    """What each figure is of its row, and what else there is. `n` is valid repeats of all."""
    for metric in view.headline:
        series = (m for row in record.valid_rows() if (m := row.metric(metric)) and m.values)
        found = next(series, None)
        if found is not None:
            yield Text(f"{metric}: {statistics.figure(found).how}")
    rest = [name for name in metric_names(record) if name not in view.headline]
    if rest:
        yield Text("also recorded: " + ", ".join(folded(rest)))


def folded(names: Sequence[str]) -> list[str]:
    """Names that differ in one number alone, which counts on, as one: `exit0…7_accuracy`; each at
    the place of its first. A network of ten exits has more than a hundred."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        before, *rest = re.split(r"(\d+)", name)
        shape = (before, rest[1]) if len(rest) == 2 else (name,)
        alike.setdefault(shape, []).append(rest[0] if len(rest) == 2 else "")
    return [each.join(shape) for shape, numbers in alike.items() for each in _folded(numbers)]


def _folded(numbers: Sequence[str]) -> Sequence[str]:
    """`0…7` for at least three that count on in some order."""
    if len(numbers) < 3:
        return numbers
    least, *_, most = sorted(map(int, numbers))
    counted = [str(number) for number in range(least, most + 1)]
    return [f"{least}…{most}"] if sorted(counted) == sorted(numbers) else numbers


def rows_of(view: RunView, record: Record, console: Console) -> RenderableType:
    """A line per row. On a narrow console figures go, which are above; whether it counts stays."""
    shown = view.headline
    forms = [_rows(view, record, shown, seed=True)]
    forms += [_rows(view, record, shown[:n], seed=False) for n in range(len(shown), -1, -1)]
    return Group(_first_that_fits(forms, console), *_row_notes(view, record))


def _rows(view: RunView, record: Record, shown: Sequence[str], *, seed: bool) -> Table:
    names = statistics.varying(view.configurations)
    heads = ["row", "repeat", *(["seed"] if seed else []), *names, *shown, "seconds", "validity"]
    table = plain_table("Rows", *heads)
    for row in record.rows[:_ROWS]:
        table.add_row(
            str(row.index), str(row.repeat), *([str(row.seed)] if seed else []),
            *(word(row.parameters[name]) for name in names),
            *(_row_figure(row, name) for name in shown),
            f"{row.seconds:.1f}" if row.seconds is not None else "–",
            _ended(view, [row]),
        )  # fmt: skip
    return table


def _row_notes(view: RunView, record: Record) -> Iterable[Text]:
    """Why rows do not count, once per reason, and how many rows are not on the screen."""
    reasons: dict[str, list[Row]] = {}
    for row in (each for each in record.rows if not view.not_ended(each)):
        for reason in row.validity.reasons:
            reasons.setdefault(reason, []).append(row)
    for reason, rows in reasons.items():
        skipped = all(row.status is Status.SKIPPED for row in rows)
        which = ", ".join(str(row.index) for row in rows[:_ROWS])
        more = f" and {len(rows) - _ROWS} more" if len(rows) > _ROWS else ""
        words = f"{'rows' if len(rows) > 1 else 'row'} {which}{more}: {reason}"
        yield Text(words, style="yellow" if skipped else "red")
    if len(record.rows) > _ROWS:
        yield Text(f"and {len(record.rows) - _ROWS} more rows: derived/rows.csv has all")
    to_come = view.planned - len(record.rows)
    if view.state is RunState.OPEN and to_come > 0:
        yield Text(f"{to_come} of {view.planned} rows have not begun", style="yellow")


def _row_figure(row: Row, name: str) -> str:
    metric = row.metric(name)
    if metric is None or not metric.values:
        return "–"
    # The column's head has no unit: it is the metric's, but for times.
    shown = format_value if metric.unit == "s" else number
    return shown(statistics.figure(metric).value, metric.unit)


def remarks_of(lines: Iterable[str], console: Console) -> Iterator[RenderableType]:
    """Remarks as they are, but lines of a Markdown table together as a table."""
    block: list[str] = []
    for line in (part for text in lines for part in (text.splitlines() or [""])):
        if line.startswith("|"):
            block.append(line)
            continue
        yield from _markdown(block, console)
        block = []
        yield Text(line)
    yield from _markdown(block, console)


def _markdown(block: Sequence[str], console: Console) -> Iterator[RenderableType]:
    """The table, then once each what stands behind its lines: why one has no figures. On a narrow
    console a column that says the same in every line is said once, above."""
    if not block:
        return
    heads = [head.strip() for head in block[0].strip("|").split("|")]
    cut = [line.split("|", len(heads) + 1)[1:] for line in block[1:] if line.strip("|-: ")]
    lines = [[cell.strip() for cell in line] + [""] * (len(heads) + 1 - len(line)) for line in cut]
    marks = {words: f"[{place}]" for place, words in enumerate(_behind(lines), 1)}
    for line in lines:
        line[-1] = marks.get(line[-1], "")
    columns = {head: [line[i] for line in lines] for i, head in enumerate([*heads, ""])}
    if not marks:
        columns.pop("", None)
    wide = _closing(columns, 0)
    if _fits(wide, console):
        yield wide
    else:
        several = len(lines) > 1
        alike = {head: cells[0] for head, cells in columns.items()
                 if several and head and len({*cells}) == 1}  # fmt: skip
        if alike:
            yield Text(" · ".join(f"{head}: {cell}" for head, cell in alike.items()))
        varied = {head: cells for head, cells in columns.items() if head not in alike}
        yield _closing(varied, console.width)
    for words, mark in marks.items():
        yield Text(f"{mark} {words.strip('[]')}")


def _behind(lines: Sequence[Sequence[str]]) -> Iterable[str]:
    return dict.fromkeys(line[-1] for line in lines if line[-1])


def _closing(columns: Mapping[str, Sequence[str]], room: int) -> Table:
    """The table as wide as it wants to be, or, with a `room`, so wide: headings break before
    figures do."""
    table = _frame("")
    table.padding = 0 if room else table.padding
    widths = _widths(columns, room)
    for head, cells in columns.items():
        justify: JustifyMethod = "right" if _numeric(cells) else "left"
        table.add_column(head, justify=justify, overflow="fold", width=widths.get(head))
    for line in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, line))
    return table


def _widths(columns: Mapping[str, Sequence[str]], room: int) -> dict[str, int]:
    if not room:
        return {}
    least = {head: max(map(len, cells), default=0) for head, cells in columns.items()}
    widths = {head: max([least[head], *(len(part) for part in head.split())]) for head in columns}
    while sum(widths.values()) + len(widths) - 1 > room:
        spare, head = max((widths[head] - least[head], head) for head in columns)
        if not spare:
            break
        widths[head] -= 1
    return widths


def _numeric(cells: Sequence[str]) -> bool:
    found = [cell for cell in cells if cell != "–"]
    return bool(found) and all(cell[:1].isdigit() and "x" not in cell for cell in found)
