"""A bar per configuration: the median over the repeats, its interval, every repeat a dot."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """Paint a panel per metric into `picture`; `words`: beside each bar."""
    labels = [each.replace(", ", "\n") for each in words]
    panels = picture.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        unit = unit_of(record, metric)
        scale = _scale([each.figures(metric) for each in found], unit)
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


def _scale(bars: Sequence[Sequence[float]], unit: str) -> Scale:
    """The one that the longest bar reads well in."""
    middles = [found.median for each in bars if (found := statistics.summarize(each)) is not None]
    longest = max((abs(each) for each in middles if math.isfinite(each)), default=0.0)
    return prefixed_scale_of(longest, unit)


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
