"""A scoring as a table for a terminal, as one JSON document and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowgauge.anytime.showing_base import base_csv, base_json, base_table
from narrowgauge.anytime.showing_tables import (
    family_table,
    figure_table,
    legend,
    numbers_of,
    pair_table,
)
from narrowgauge.report.text import clean, csv_cell
from narrowgauge.units import format_value
from narrowgauge_scores.answers import confidences, correct_of
from narrowgauge_scores.points import oracle_points
from narrowgauge_scores.quality import conditional_profile, performance_profile
from narrowgauge_scores.resampling import COVERAGE, DRAWS
from narrowgauge_scores.scalars import chance_of

if TYPE_CHECKING:
    from rich.console import Console

    from narrowgauge.anytime.scoring import Curve, FamilyScore, Pair, Scoring
    from narrowgauge_scores.areas import CostRange
    from narrowgauge_scores.points import Point
    from narrowgauge_scores.resampling import Interval
    from narrowgauge_scores.side_file import RunLogits

__all__ = ["print_scoring", "scoring_csv", "scoring_json"]

_MOST_NOTES = 12
#: Times at which performance profiles are given, geometrically from half the range to twice it.
_TIMES = 41


def print_scoring(found: Scoring, console: Console) -> None:
    """The families, each by a number that the tables have, the pairs, and what to know of them. All
    of it is `Text`: what comes from a file is neither markup nor an emoji's name."""
    from rich.text import Text

    images = f"{found.images:,} test images of {found.data}"
    count = len(found.families)
    families = f"{count} famil{'y' if count == 1 else 'ies'}"
    console.print(Text(families, "bold").append(f" on {images}", "not bold"))
    console.print(
        Text(f"areas over ln(MACs): {found.range.why}, steps, chance level before the first")
    )
    console.print(legend(found))
    numbers = numbers_of(found)
    tables = [family_table(found), figure_table(found)]
    if found.base is not None:
        tables.append(base_table(found.base, numbers))
    if found.pairs:
        tables.append(pair_table(found))
    for table in tables:
        console.print()
        console.print(table)
    front = dict.fromkeys(numbers[label] for label, _ in found.front)
    console.print()
    console.print(
        Text(f"hypervolume {found.hypervolume:.4f}; nobody beats points of: "
             + ", ".join(map(str, front)))
    )  # fmt: skip
    if found.latency_range is not None:
        span = " to ".join(format_value(s, "s") for s in _ends(found.latency_range))
        console.print(Text(f"latencies of {found.device}, areas from {span}"))
    for note in found.notes[:_MOST_NOTES]:
        console.print(Text(f"note: {clean(note)}"))
    if len(found.notes) > _MOST_NOTES:
        console.print(Text(f"note: {len(found.notes) - _MOST_NOTES} more in --json"))


def _ends(within: CostRange) -> tuple[float, float]:
    return within.low, within.high


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
    return {**asdict(each), "told_apart": each.told_apart}


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
