"""A scoring as the part of a Markdown page that stands between two markers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.report.markdown import table_line, update_block
from narrowgauge.report.text import markdown
from narrowgauge.units import format_value
from narrowgauge_scores.resampling import COVERAGE, DRAWS
from narrowgauge_scores.scalars import BUDGETS

if TYPE_CHECKING:
    from narrowgauge.anytime.bases import AtBase
    from narrowgauge.anytime.scoring import FamilyScore, Scoring
    from narrowgauge_scores.resampling import Interval

__all__ = ["SCORES", "scoring_block", "update_page"]

#: What of a page is a scoring's: between `<!-- scores -->` and `<!-- /scores -->`.
SCORES = "scores"


def update_page(path: Path, found: Scoring) -> bool:
    """Write the scoring between its markers; whether that changed the page. Raises UsageError where
    the page cannot be read or has no such place."""
    return update_block(path, scoring_block(found), check=False, name=SCORES)


def scoring_block(found: Scoring) -> str:
    """A line for each family, those of the largest area first, and what the figures are of; with a
    column of what each costs within a point of the plain network, where one was named."""
    timed = found.latency_range is not None
    within = {each.label: each for each in found.base.families} if found.base else None
    budgets = " / ".join(map(str, BUDGETS))
    heads = ["family", "exits", "MMAC", "last exit (%)", "area", f"% at {budgets} % of the cost"]
    heads += ["MMAC within a point of the plain network"] if within is not None else []
    heads += ["area over time"] if timed else []
    lines = [table_line(heads), table_line(["---"] * len(heads))]
    ranked = sorted(found.families, key=lambda each: -each.macs.area.value)
    lines += [table_line(_cells(each, within, timed)) for each in ranked]
    return "\n".join([*lines, "", *_below(found), ""])


def _cells(each: FamilyScore, within: dict[str, AtBase] | None, timed: bool) -> Iterator[str]:
    costs = each.macs.costs
    yield markdown(each.label)
    yield str(len(costs))
    yield " to ".join(dict.fromkeys(f"{1e-6 * cost:.3g}" for cost in (costs[0], costs[-1])))
    yield _interval(each.macs.accuracies[-1], 100.0, 1)
    yield _interval(each.macs.area, 1.0, 3)
    shares = (each.figures.get(f"accuracy_at_{share}") for share in BUDGETS)
    yield " / ".join("–" if mean is None else f"{mean.mean:.1f}" for mean in shares)
    if within is not None:
        yield _at_base(within[each.label]) if each.label in within else "the plain network"
    if timed:
        yield _interval(each.latency.area, 1.0, 3) if each.latency else "–"


def _at_base(found: AtBase) -> str:
    """Never: no exit is within a point."""
    value, low, high = (
        f"{1e-6 * each:.3g}" if math.isfinite(each) else "never"
        for each in (found.macs, found.low, found.high)
    )
    return value if low == high == value else f"{value} ({low} to {high})"


def _interval(found: Interval, scale: float, digits: int) -> str:
    value, low, high = (
        f"{scale * each:.{digits}f}" for each in (found.value, found.low, found.high)
    )
    return f"{value} ({low} to {high})"


def _below(found: Scoring) -> Iterator[str]:
    yield (
        f"{found.images:,} test images of {found.data}; areas over ln(MACs), {found.range.why}; "
        f"intervals: {100 * COVERAGE:.0f} %, {DRAWS} draws of test images."
    )
    if found.base is not None:
        yield (
            f"The plain network is {markdown(found.base.label)}: {100 * found.base.accuracy:.1f} % "
            f"at {1e-6 * found.base.macs:.3g} MMAC."
        )
    if found.latency_range is not None:
        span = " to ".join(
            format_value(each, "s") for each in (found.latency_range.low, found.latency_range.high)
        )
        yield f"Areas over time: from {span}, {markdown(found.device)}."
    best = list(dict.fromkeys(label for label, _ in found.front))
    yield f"Nobody beats points of: {markdown('; '.join(best))}."
    runs = dict.fromkeys(row.run_id for each in found.families for row in each.family.rows)
    yield f"Runs: {', '.join(f'`{run}`' for run in runs)}."
