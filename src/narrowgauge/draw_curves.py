"""Curves along an index: a panel per metric, a colour and a marker per configuration, a thin
line per repeat, a thick median."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from narrowgauge import statistics
from narrowgauge.draw_labels import axis_of, index_of, unit_of
from narrowgauge.draw_style import looks
from narrowgauge.statistics import Configuration
from narrowgauge_contract.drawing import Drawing
from narrowgauge_contract.outcome import Metric
from narrowgauge_contract.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["curves_size", "paint_curves"]

#: Of panels on one axis, how much of it the curves of each have to take up at least.
_LEAST_OF_AXIS = 0.25
#: How many times the least value the largest may be on a linear axis.
_MOST_OF_LINEAR = 300.0
#: Of more points than these a line is drawn without them.
_MOST_MARKED = 12
#: Of markers, in points: those on top are smaller than what they may cover.
_SIZES = (9.0, 6.2, 5.0, 4.0)
#: As many names as can be read below an axis, upright; and in inches how wide that is, and a letter
#: of a name.
_MOST_PLACES, _PANEL, _LETTER = 36, 3.4, 0.08

_NOTHING = statistics.Summary(0, math.nan, math.nan, math.nan, math.nan, math.nan, None)


def curves_size(metrics: Sequence[str]) -> tuple[float, float]:
    """Width and height in inches."""
    return 1.5 + 4.2 * len(metrics), 4.2


def paint_curves(
    picture: Figure,
    drawing: Drawing,
    record: Record,
    found: Sequence[Configuration],
    metrics: Sequence[str],
) -> None:
    """Paint `metrics` of the configurations, each of which has valid rows, into `picture`. Panels
    of one unit have one axis, so that their curves compare, unless one would be flat on it. An axis
    is logarithmic where the least value would be a hair above nothing on a linear one."""
    panels = picture.subplots(1, len(metrics), squeeze=False)[0]
    names = statistics.varying(found)
    places = _places_of(drawing, found)
    for panel, metric in zip(panels, metrics, strict=True):
        for each, look, size in zip(found, looks(), itertools.cycle(_SIZES), strict=False):
            _curve(panel, each, metric, (*look, size), each.label(names))
        panel.set_ylabel(drawing.y or axis_of(metric, unit_of(record, metric)))
        if len(metrics) > 1:
            panel.set_title(axis_of(metric, ""), fontsize=10, loc="left")
        measured = [m for each in found for row in each.valid if (m := row.metric(metric))]
        longest = max(len(each.values) for each in measured)
        _index_axis(panel, drawing, drawing.x or index_of(record, metric), longest, places)
        if _spans_decades(measured):
            _by_decades(panel)
    _share_axes(panels, [unit_of(record, metric) for metric in metrics])
    if names:
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")


def _spans_decades(measured: Sequence[Metric]) -> bool:
    values = [value for each in measured for value in each.values if math.isfinite(value)]
    return bool(values) and 0 < min(values) < max(values) / _MOST_OF_LINEAR


def _by_decades(panel: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    panel.set_yscale("log")
    # Powers would be formulas, which no text of ours is read as.
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_ylabel(f"{panel.get_ylabel()}, logarithmic")


def _places_of(drawing: Drawing, found: Sequence[Configuration]) -> tuple[str, ...]:
    """What the index's places are called, where all rows call them the same."""
    if drawing.ticks is None:
        return ()
    said = {drawing.ticks.names_of(row) for each in found for row in each.valid}
    return (said.pop() or ()) if len(said) == 1 else ()


def _index_axis(
    panel: Axes, drawing: Drawing, words: str, longest: int, places: Sequence[str]
) -> None:
    from matplotlib.ticker import MaxNLocator

    if places and len(places) == longest:
        shown = range(0, longest, math.ceil(longest / _MOST_PLACES))
        panel.set_xticks([1 + each for each in shown], [places[each] for each in shown])
        if len(shown) * (1 + max(len(places[each]) for each in shown)) * _LETTER > _PANEL:
            panel.tick_params(axis="x", labelrotation=90, labelsize=8)
        panel.set_xlabel(words)
    else:
        panel.set_xlabel(f"{words}, counted from the first" if drawing.ticks else words)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if longest < 2:
        panel.set_xlim(0.5, 1.5)


def _share_axes(panels: Sequence[Axes], units: Sequence[str]) -> None:
    kinds = [(panel.get_yscale(), unit) for panel, unit in zip(panels, units, strict=True)]
    for kind in dict.fromkeys(kinds):
        group = [panel for panel, each in zip(panels, kinds, strict=True) if each == kind]
        spans = [_span(panel) for panel in group]
        whole = max(high for _, high in spans) - min(low for low, _ in spans)
        if all(high - low >= _LEAST_OF_AXIS * whole for low, high in spans):
            for panel in group[1:]:
                panel.sharey(group[0])
            group[0].autoscale(axis="y")


def _span(panel: Axes) -> tuple[float, float]:
    """From the least value to the largest, as the axis has them."""
    low, high = panel.dataLim.intervaly
    return (math.log(low), math.log(high)) if panel.get_yscale() == "log" else (low, high)


def _curve(
    panel: Axes, found: Configuration, metric: str, look: tuple[str, str, float], label: str
) -> None:
    """Lines of few points have markers, which are hollow where more than one line is drawn: each
    shows those that it coincides with."""
    series = [m.values for row in found.valid if (m := row.metric(metric)) is not None and m.values]
    if not series:
        return
    colour, marker, size = look
    for values in series if len(series) > 1 else []:
        panel.plot(range(1, len(values) + 1), values, color=colour, linewidth=0.8, alpha=0.45,
                   marker="." if len(values) < 2 else "", markersize=5)  # fmt: skip
    longest = max(len(values) for values in series)
    middle = [
        (statistics.summarize([v[i] for v in series if i < len(v)]) or _NOTHING).median
        for i in range(longest)
    ]
    panel.plot(range(1, longest + 1), middle, color=colour, linewidth=2, label=label,
               marker=marker if longest <= _MOST_MARKED else "", markersize=size if label else 4,
               markerfacecolor="none" if label else colour, markeredgewidth=1.4)  # fmt: skip
