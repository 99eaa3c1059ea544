"""A scoring's tables for a terminal of 80 columns.

Families have long names, and every table is about all of them: the names are listed once, with a
number each, and the tables have the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from narrowgauge_scores.resampling import COVERAGE, DRAWS
from narrowgauge_scores.scalars import BUDGETS

if TYPE_CHECKING:
    from rich.table import Table

    from narrowgauge.anytime.scoring import FamilyScore, Scoring
    from narrowgauge_scores.resampling import Interval

__all__ = [
    "INTERVALS", "family_table", "figure_table", "legend", "lined_table", "numbers_of",
    "pair_table",
]  # fmt: skip

_FEW_PAIRS = 6
#: Stands below a table with intervals.
INTERVALS = f"intervals: {100 * COVERAGE:.0f} %, {DRAWS} paired draws of test images"


def numbers_of(found: Scoring) -> dict[str, int]:
    """The families' numbers by their labels."""
    return {each.label: number for number, each in enumerate(found.families, start=1)}


def legend(found: Scoring) -> Table:
    """The families' names, each with its number."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for number, each in enumerate(found.families, start=1):
        table.add_row(str(number), Text(each.label))
    return table


def family_table(found: Scoring) -> Table:
    """What is judged, with intervals."""
    timed = any(each.latency for each in found.families)
    headings = [
        "",
        "seeds",
        "exits",
        "last exit (%)",
        "area",
        *(["area over time"] if timed else []),
    ]
    table = lined_table(INTERVALS, headings)
    for number, each in enumerate(found.families, start=1):
        cells = [
            str(len(each.family.rows)),
            str(len(each.macs.costs)),
            _interval(each.macs.accuracies[-1], 100.0, 2),
            _interval(each.macs.area, 1.0, 4),
        ]
        if timed:
            cells.append(_interval(each.latency.area, 1.0, 4) if each.latency else "–")
        table.add_row(str(number), *cells)
    return table


def figure_table(found: Scoring) -> Table:
    """What else there is to know of a family, means over its seeds."""
    budgets = " / ".join(map(str, BUDGETS))
    headings = ["", f"% at {budgets}\n% of the cost", "own last\nexit −1", "over-\nthinks",
                "ECE", "AUROC", "mono-\ntone"]  # fmt: skip
    based = any(run.base_accuracy is not None for e in found.families for run in e.family.runs)
    headings[2:2] = ["plain net-\nwork −1"] if based else []
    caption = (
        "means over the seeds that have the figure; −1: MACs within a point of that accuracy; "
        "ECE and AUROC of the last exit"
    )
    table = lined_table(caption, headings)
    for number, each in enumerate(found.families, start=1):
        last = len(each.macs.costs) - 1
        table.add_row(
            str(number),
            " / ".join(_mean(each, f"accuracy_at_{share}", "{:.1f}") for share in BUDGETS),
            *([_at_base(each)] if based else []),
            _mean(each, "macs_at_last_less_1", "{:.4g} M", 1e-6),
            _mean(each, "overthinking", "{:.2f} %"),
            _mean(each, f"ece_exit{last}", "{:.3f}"),
            _mean(each, f"auroc_exit{last}", "{:.3f}"),
            _mean(each, "monotonicity", "{:.2f}"),
        )
    return table


def pair_table(found: Scoring) -> Table:
    """Everybody against the family of the largest area, or against all of few."""
    best = max(found.families, key=lambda each: each.macs.area.value).label
    shown = [p for p in found.pairs if len(found.pairs) <= _FEW_PAIRS or best in (p.one, p.other)]
    captions = []
    if any(pair.told_apart is None for pair in shown):
        captions.append("over latency: the interval is of test images, and times have none")
    if len(shown) < len(found.pairs):
        captions.append(f"{len(found.pairs) - len(shown)} more pairs in --json")
    table = lined_table("; ".join(captions), ["pair", "area over", "difference", "told apart"])
    numbers = numbers_of(found)
    for pair in shown:
        table.add_row(
            f"{numbers[pair.one]} − {numbers[pair.other]}",
            pair.over,
            _interval(pair.difference, 1.0, 4, " "),
            {True: "yes", False: "no", None: "–"}[pair.told_apart],
        )
    return table


def lined_table(caption: str, headings: Sequence[str], title: str = "") -> Table:
    """A table under `headings`, of figures that are not to be broken."""
    from rich.text import Text

    from narrowgauge.show_tables import plain_table

    table = plain_table("", *headings)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    table.title = Text(title) if title else None
    table.caption, table.caption_justify = Text(caption) if caption else None, "left"
    return table


def _mean(each: FamilyScore, name: str, form: str, scale: float = 1.0) -> str:
    """A mean, and below it how many seeds it is of where some do not have the figure."""
    found = each.figures.get(name)
    if found is None:
        return "–"
    some = f"\n({found.seeds} of {found.of} seeds)" if found.seeds < found.of else ""
    return form.format(scale * found.mean) + some


def _at_base(each: FamilyScore) -> str:
    """What keeps within a point of the plain network: `never`, or a dash where
    no run of it names one."""
    named = any(run.base_accuracy is not None for run in each.family.runs)
    if named and "macs_at_base_less_1" not in each.figures:
        return "never"
    return _mean(each, "macs_at_base_less_1", "{:.4g} M", 1e-6)


def _interval(found: Interval, scale: float, digits: int, between: str = "\n") -> str:
    value, low, high = (f"{scale * x:.{digits}f}" for x in (found.value, found.low, found.high))
    return f"{value}{between}({low} to {high})"
