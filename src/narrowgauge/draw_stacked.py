"""The picture of parts of a whole: stacked bars, and beside them what others published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from narrowgauge import statistics
from narrowgauge.statistics import Configuration
from narrowgauge_contract.drawing import Beside, Drawing, Stack
from narrowgauge_contract.figures import fitting
from narrowgauge_contract.parameters import Scalar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["paint_stacks", "stacks_size"]

#: Okabe and Ito's, told apart by colour-blind readers too; one per part, the same in all panels.
_COLOURS = ("#E69F00", "#0072B2", "#CC79A7", "#009E73", "#D55E00", "#56B4E9", "#8C8C00", "#000000")
#: Letters of a bar's name on one line.
_LETTERS = 34


def stacks_size(drawing: Drawing, found: Sequence[Configuration]) -> tuple[float, float]:
    """Width and height of the picture, in inches."""
    panels = 1 + len(_matching(drawing, found))
    return 3.2 + 4.0 * panels, max(2.8, 1.9 + 0.36 * len(found))


def paint_stacks(
    picture: Figure, drawing: Drawing, found: Sequence[Configuration], labels: Sequence[str]
) -> None:
    """A bar per configuration: the medians over the repeats of the drawing's metrics, end to end.

    What others published for a value of the stack's parameter stands in panels of its own, each
    with its own scale, as high as the bars of that value.
    """
    stack, beside = drawing.stack, _matching(drawing, found)
    assert stack is not None
    panels = picture.subplots(1, 1 + len(beside), squeeze=False, sharey=True)[0]
    ours = [_parts(each, drawing.metrics) for each in found]
    places = [(float(place), 0.68) for place in range(len(found))]
    _panel(panels[0], drawing, ours, places, _unit(found, drawing), "this run")
    for panel, other in zip(panels[1:], beside, strict=True):
        rows = _places(found, stack, other)
        parts = [other.values[value] for value in rows]
        _panel(panel, drawing, parts, list(rows.values()), _unit(found, drawing), other.name)
    panels[0].set_yticks(range(len(found)), [_broken(label) for label in labels], fontsize=9)
    panels[0].set_ylim(len(found) - 0.4, -0.6)
    _legend(picture, drawing, ours + [row for each in beside for row in each.values.values()])


def _panel(
    panel: Axes,
    drawing: Drawing,
    parts: Sequence[Mapping[str, float]],
    places: Sequence[tuple[float, float]],
    unit: str,
    title: str,
) -> None:
    widest = max((sum(each.values()) for each in parts), default=0.0)
    factor, short = fitting(widest, unit)
    for (place, height), each in zip(places, parts, strict=True):
        reached = 0.0
        for number, metric in enumerate(drawing.metrics):
            size = each.get(metric, 0.0) * factor
            colour = _COLOURS[number % len(_COLOURS)]
            panel.barh(place, size, left=reached, height=height, color=colour, linewidth=0)
            reached += size
        panel.annotate(f"{reached:.3g} {short}", (reached, place), xytext=(5, 0),
                       textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    panel.set_xlim(0, 1.22 * widest * factor or 1.0)
    panel.set_xlabel(f"{drawing.x} ({short})" if drawing.x else short)
    panel.set_title(title, fontsize=10, loc="left")
    panel.grid(visible=False, axis="y")


def _parts(found: Configuration, metrics: Sequence[str]) -> dict[str, float]:
    """The median over the repeats of each metric; a metric that is not there is no part."""
    parts = {}
    for metric in metrics:
        summary = statistics.summarize(found.figures(metric))
        if summary is not None and math.isfinite(summary.median):
            parts[metric] = summary.median
    return parts


def _matching(drawing: Drawing, found: Sequence[Configuration]) -> list[Beside]:
    """What was published for any of these."""
    if drawing.stack is None:
        return []
    return [each for each in drawing.stack.beside if _places(found, drawing.stack, each)]


def _places(
    found: Sequence[Configuration], stack: Stack, other: Beside
) -> dict[Scalar, tuple[float, float]]:
    """Middle and height of the published bar of each value: beside all our bars of it."""
    ours: dict[Scalar, list[int]] = {}
    for place, each in enumerate(found):
        value = each.parameters.get(stack.parameter, "")
        asked = all(each.parameters.get(name) == only for name, only in other.where.items())
        if asked and value in other.values:
            ours.setdefault(value, []).append(place)
    return {
        value: ((places[0] + places[-1]) / 2, places[-1] - places[0] + 0.68)
        if places[-1] - places[0] == len(places) - 1
        else (float(places[0]), 0.68)
        for value, places in ours.items()
    }


def _unit(found: Sequence[Configuration], drawing: Drawing) -> str:
    metrics = (row.metric(name) for each in found for row in each.valid for name in drawing.metrics)
    return next((metric.unit for metric in metrics if metric is not None), "")


def _broken(label: str) -> str:
    """A bar's name in lines that are not too long."""
    lines = [""]
    for word in label.split(", "):
        longer = f"{lines[-1]}, {word}" if lines[-1] else word
        lines = [*lines[:-1], longer] if len(longer) <= _LETTERS else [*lines, word]
    return "\n".join(lines)


def _legend(picture: Figure, drawing: Drawing, rows: Sequence[Mapping[str, float]]) -> None:
    """The parts that anything has, in their order."""
    from matplotlib.patches import Patch

    assert drawing.stack is not None
    entries = [
        Patch(color=_COLOURS[number % len(_COLOURS)], label=drawing.stack.name_of(metric))
        for number, metric in enumerate(drawing.metrics)
        if any(row.get(metric) for row in rows)
    ]
    picture.legend(handles=entries, loc="outside lower center", ncols=len(entries) or 1, fontsize=9)
