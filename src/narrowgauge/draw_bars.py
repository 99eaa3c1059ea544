"""A bar per configuration: the median over the repeats, its interval, every repeat a dot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from narrowgauge import statistics
from narrowgauge.draw_labels import axis_of, unit_of
from narrowgauge.draw_style import COLOURS
from narrowgauge.statistics import Configuration
from narrowgauge.units import Scale, number, prefixed_scale_of
from narrowgauge_contract.drawing import Drawing
from narrowgauge_contract.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bars_size", "paint_bars"]

#: Of bars on one axis, how many times as long one may be as another that is still to be seen.
_MOST_APART = 30.0


def bars_size(words: Sequence[str], metrics: Sequence[str]) -> tuple[float, float]:
    """Width and height in inches, for what is written beside each bar."""
    lines = max(each.count(", ") + 1 for each in words)
    height = 1.4 + max(0.5, 0.1 + 0.18 * lines) * len(words)
    return 2.4 + 4.4 * len(metrics), max(height, 2.4)


def paint_bars(
    picture: Figure,
    drawing: Drawing,
    record: Record,
    found: Sequence[Configuration],
    metrics: Sequence[str],
    words: Sequence[str],
) -> None:
    """Paint a panel per metric into `picture`; `words`: beside each bar. Panels of one unit have
    one axis, so that their bars compare."""
    labels = [each.replace(", ", "\n") for each in words]
    panels = picture.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    units = {metric: unit_of(record, metric) for metric in metrics}
    bars = {metric: [each.figures(metric) for each in found] for metric in metrics}
    first: dict[str, Axes] = {}
    for panel, metric in zip(panels, metrics, strict=True):
        unit, group = units[metric], _alike(metric, units, bars)
        scale = _scale([figures for each in group for figures in bars[each]], unit)
        for place, each in enumerate(found):
            figures = [scale.factor * value for value in each.figures(metric)]
            _bar(panel, place, figures, COLOURS[place % len(COLOURS)], scale.unit)
        panel.set_yticks(range(len(found)), labels)
        panel.set_ylim(len(found) - 0.4, -0.6)
        own_words = drawing.y if scale.unit == unit else ""
        panel.set_xlabel(own_words or axis_of(metric, scale.unit))
        if len(metrics) > 1:
            panel.set_title(axis_of(metric, ""), fontsize=10, loc="left")
        panel.grid(visible=False, axis="y")
        panel.margins(x=0.15)
        leader = first.setdefault(group[0], panel)
        if leader is not panel:
            panel.sharex(leader)
            panel.autoscale(axis="x")


def _alike(
    metric: str, units: Mapping[str, str], bars: Mapping[str, Sequence[Sequence[float]]]
) -> list[str]:
    """The metrics that share an axis with this one: those of its unit, unless the longest bar of
    them is so much longer than the longest of another that nothing would be seen of that."""
    group = [each for each, unit in units.items() if unit == units[metric]]
    longest = [_longest(bars[each]) for each in group]
    return group if 0 < max(longest) <= _MOST_APART * min(longest) else [metric]


def _scale(bars: Sequence[Sequence[float]], unit: str) -> Scale:
    """The one that the longest bar reads well in."""
    return prefixed_scale_of(_longest(bars), unit)


def _longest(bars: Sequence[Sequence[float]]) -> float:
    middles = [found.median for each in bars if (found := statistics.summarize(each)) is not None]
    return max((abs(each) for each in middles if math.isfinite(each)), default=0.0)


def _bar(panel: Axes, place: int, figures: Sequence[float], colour: str, unit: str) -> None:
    summary = statistics.summarize(figures)
    if summary is None or not math.isfinite(summary.median):
        panel.text(0, place, " no figure", va="center")
        return
    panel.barh(place, summary.median, height=0.6, color=colour, alpha=0.75)
    panel.plot(figures, [place] * len(figures), "o", color="black", markersize=3, alpha=0.7)
    interval = summary.interval
    if interval is not None:
        panel.plot([interval.low, interval.high], [place, place], color="black", linewidth=1.2)
        for edge in (interval.low, interval.high):
            panel.plot([edge, edge], [place - 0.14, place + 0.14], color="black", linewidth=1.2)
    panel.annotate(number(summary.median, unit), (max(summary.high, 0.0), place), xytext=(6, 0),
                   textcoords="offset points", va="center")  # fmt: skip
