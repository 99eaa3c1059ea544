"""A scoring as a table for a terminal, as one JSON document and as CSV."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowgauge.anytime.showing_base import base_csv, base_json, base_table
from narrowgauge.report.text import clean, csv_cell
from narrowgauge.units import format_value
from narrowgauge_scores.answers import confidences, correct_of
from narrowgauge_scores.points import oracle_points
from narrowgauge_scores.quality import conditional_profile, performance_profile
from narrowgauge_scores.resampling import COVERAGE, DRAWS
from narrowgauge_scores.scalars import BUDGETS, chance_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from narrowgauge.anytime.scoring import Curve, FamilyScore, Pair, Scoring
    from narrowgauge_scores.areas import CostRange
    from narrowgauge_scores.points import Point
    from narrowgauge_scores.resampling import Interval
    from narrowgauge_scores.side_file import RunLogits

__all__ = ["print_scoring", "scoring_csv", "scoring_json"]

_FEW_PAIRS = 6
_MOST_NOTES = 12
#: Times at which performance profiles are given, geometrically from half the range to twice it.
_TIMES = 41


def print_scoring(found: Scoring, console: Console) -> None:
    """The table of families, the pairs, and what to know of them. All of it is `Text`: what comes
    from a file is neither markup nor an emoji's name."""
    from rich.text import Text

    images = f"{found.images:,} test images of {found.data}"
    count = len(found.families)
    families = f"{count} famil{'y' if count == 1 else 'ies'}"
    console.print(Text(families, "bold").append(f" on {images}", "not bold"))
    console.print(
        Text(f"areas over ln(MACs): {found.range.why}, steps, chance level before the first")
    )
    console.print(_family_table(found))
    console.print(_figure_table(found))
    if found.base is not None:
        console.print(base_table(found.base))
    if found.pairs:
        console.print(_pair_table(found))
    names = list(dict.fromkeys(label for label, _ in found.front))
    console.print(
        Text(f"hypervolume {found.hypervolume:.4f}; nobody beats points of: {'; '.join(names)}")
    )
    if found.latency_range is not None:
        span = " to ".join(format_value(s, "s") for s in _ends(found.latency_range))
        console.print(Text(f"latencies of {found.device}, areas from {span}"))
    for note in found.notes[:_MOST_NOTES]:
        console.print(Text(f"note: {clean(note)}"))
    if len(found.notes) > _MOST_NOTES:
        console.print(Text(f"note: {len(found.notes) - _MOST_NOTES} more in --json"))


def _ends(within: CostRange) -> tuple[float, float]:
    return within.low, within.high


def _family_table(found: Scoring) -> Table:
    """What is judged, with intervals."""
    from rich.text import Text

    caption = f"intervals: {100 * COVERAGE:.0f} %, {DRAWS} paired draws of test images"
    timed = [["area, time"]] if any(each.latency for each in found.families) else []
    headings = ["seeds", "exits", "last exit (%)", "area", *itertools.chain(*timed)]
    table = _table(caption, *headings)
    for each in found.families:
        cells = [
            str(len(each.family.rows)),
            str(len(each.macs.costs)),
            _interval(each.macs.accuracies[-1], 100.0, 2),
            _interval(each.macs.area, 1.0, 4),
        ]
        if timed:
            cells.append(_interval(each.latency.area, 1.0, 4) if each.latency else "–")
        table.add_row(Text(each.label), *cells)
    return table


def _figure_table(found: Scoring) -> Table:
    """What else there is to know of a family, means over its seeds."""
    from rich.text import Text

    budgets = " / ".join(map(str, BUDGETS))
    headings = [f"% at {budgets} % of cost", "own last exit −1", "overthinks", "ECE", "AUROC"]
    based = any(run.base_accuracy is not None for e in found.families for run in e.family.runs)
    headings[1:1] = ["plain network −1"] if based else []
    caption = (
        "means over the seeds that have the figure; −1: MACs within a point of that accuracy; "
        "ECE and AUROC of the last exit"
    )
    table = _table(caption, *headings, "monotone")
    for each in found.families:
        last = len(each.macs.costs) - 1
        table.add_row(
            Text(each.label),
            " / ".join(_mean(each, f"accuracy_at_{share}", "{:.1f}") for share in BUDGETS),
            *([_at_base(each)] if based else []),
            _mean(each, "macs_at_last_less_1", "{:.4g} M", 1e-6),
            _mean(each, "overthinking", "{:.2f} %"),
            _mean(each, f"ece_exit{last}", "{:.3f}"),
            _mean(each, f"auroc_exit{last}", "{:.3f}"),
            _mean(each, "monotonicity", "{:.2f}"),
        )
    return table


def _table(caption: str, *headings: str) -> Table:
    from rich.table import Table

    table = Table(caption=caption)
    table.add_column("family", overflow="fold", ratio=1)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _mean(each: FamilyScore, name: str, form: str, scale: float = 1.0) -> str:
    """A mean, with how many seeds it is of where some do not have the figure."""
    found = each.figures.get(name)
    if found is None:
        return "–"
    some = f" ({found.seeds} of {found.of} seeds)" if found.seeds < found.of else ""
    return form.format(scale * found.mean) + some


def _at_base(each: FamilyScore) -> str:
    """What keeps within a point of the plain network: `never`, or a dash where
    no run of it names one."""
    named = any(run.base_accuracy is not None for run in each.family.runs)
    if named and "macs_at_base_less_1" not in each.figures:
        return "never"
    return _mean(each, "macs_at_base_less_1", "{:.4g} M", 1e-6)


def _interval(found: Interval, scale: float, digits: int) -> str:
    value, low, high = (f"{scale * x:.{digits}f}" for x in (found.value, found.low, found.high))
    return f"{value} [{low}, {high}]".replace("[", "\\[")


def _pair_table(found: Scoring) -> Table:
    """Everybody against the family of the largest area, or against all of few."""
    from rich.table import Table
    from rich.text import Text

    best = max(found.families, key=lambda each: each.macs.area.value).label
    shown = [p for p in found.pairs if len(found.pairs) <= _FEW_PAIRS or best in (p.one, p.other)]
    more = len(found.pairs) - len(shown)
    table = Table(caption=f"{more} more pairs in --json" if more > 0 else None)
    for heading in ("one", "other", "area over"):
        table.add_column(heading, overflow="fold")
    table.add_column("one − other", no_wrap=True, justify="right")
    table.add_column("")
    for pair in shown:
        verdict = "told apart" if pair.difference.excludes_zero else "not told apart"
        table.add_row(
            Text(pair.one), Text(pair.other), pair.over,
            _interval(pair.difference, 1.0, 4), verdict,
        )  # fmt: skip
    return table


def scoring_csv(found: Scoring) -> str:
    """A line for each figure of each family, `seeds` that have it of its `of`; `low` and `high`
    where it has an interval. No cell begins a spreadsheet's formula."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["family", "figure", "unit", "mean", "least", "greatest", "seeds", "of", "low", "high"]
    )
    for each in found.families:
        known = dict(_intervals(each))
        for name, mean in each.figures.items():
            interval = known.get(name)
            ends = [repr(interval.low), repr(interval.high)] if interval else ["", ""]
            values = [repr(x) for x in (mean.mean, mean.least, mean.greatest)]
            counts = [mean.seeds, mean.of]
            writer.writerow([csv_cell(each.label), name, mean.unit, *values, *counts, *ends])
    writer.writerows(base_csv(found.base))
    return stream.getvalue()


def _intervals(each: FamilyScore) -> Iterator[tuple[str, Interval]]:
    """The intervals of figures, in the figures' own units."""
    yield "area", each.macs.area
    for k, found in enumerate(each.macs.accuracies):
        yield f"exit{k}_accuracy", _scaled(found, 100.0)


def _scaled(found: Interval, scale: float) -> Interval:
    return type(found)(scale * found.value, scale * found.low, scale * found.high)


def scoring_json(found: Scoring) -> dict[str, Any]:
    """Everything, NaN as null: figures, intervals, points, profiles and notes."""
    body = {
        "data": found.data,
        "images": found.images,
        "classes": found.classes,
        "synthetic": found.synthetic,
        "range": asdict(found.range),
        "device": found.device,
        "latency_range": asdict(found.latency_range) if found.latency_range else None,
        "coverage": COVERAGE,
        "draws": DRAWS,
        "hypervolume": found.hypervolume,
        "front": [{"family": label, **_point(point)} for label, point in found.front],
        "families": [_family(each, found) for each in found.families],
        "pairs": [_pair(each) for each in found.pairs],
        "base": base_json(found.base),
        "notes": list(found.notes),
    }
    return {name: _plain(value) for name, value in body.items()}


def _pair(each: Pair) -> dict[str, Any]:
    told = each.difference.excludes_zero
    return {**asdict(each), "told_apart": told}


def _point(point: Point) -> dict[str, Any]:
    return asdict(point)


def _family(each: FamilyScore, found: Scoring) -> dict[str, Any]:
    return {
        "label": each.label,
        "figures": {name: asdict(mean) for name, mean in each.figures.items()},
        "macs": asdict(each.macs),
        "latency": asdict(each.latency) if each.latency else None,
        "static_gain": each.static_gain,
        "points": [_point(point) for point in each.points],
        "seeds": [
            {
                "run": row.run_id,
                "row": row.row.index,
                "seed": row.logits.seed,
                "budgeted": [_point(point) for point in budgeted],
                "oracle": [_point(point) for point in oracle_points(row.logits)],
                "profile": _profile(row.logits, found.latency_range, each.latency),
                "conditional": _conditional(row.logits),
            }
            for row, budgeted in zip(each.family.rows, each.budgeted, strict=True)
        ],
    }


def _profile(
    run: RunLogits, within: CostRange | None, latency: Curve | None
) -> dict[str, Any] | None:
    """Q(t): seconds, and the accuracy expected of who is stopped then."""
    if within is None or latency is None or run.latency is None:
        return None
    times = np.geomspace(within.low / 2, within.high * 2, _TIMES)
    heights = correct_of(run.test).mean(axis=1)
    expected = performance_profile(run.latency, heights, times, chance=chance_of(run))
    return {"seconds": times.tolist(), "accuracy": expected.tolist()}


def _conditional(run: RunLogits) -> dict[str, Any]:
    """Of the first exit's confidence, what each exit then gets right."""
    profile = conditional_profile(confidences(run.test.logits), correct_of(run.test))
    return {name: value.tolist() for name, value in vars(profile).items()}


def _plain(value: Any) -> Any:
    """What JSON has: no NaN, no tuples."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
