"""The picture of an attribution ladder: a waterfall on a logarithmic axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from narrowgauge.draw_style import foot
from narrowgauge.ladder import Climb, Rung, closing_words
from narrowgauge.statistics import LogRatio
from narrowgauge.units import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ladder_size", "paint_ladder"]

_FASTER, _SLOWER, _NULL, _WHOLE = "#0072B2", "#D55E00", "#9A9A9A", "#303030"


def ladder_size(climb: Climb) -> tuple[float, float]:
    """Width and height of the picture, in inches."""
    return 9.0, 2.2 + 0.46 * (len(climb.rungs) + 1)


def paint_ladder(picture: Figure, climb: Climb) -> None:
    """Each rung is a bar from where the one before ended; a whisker is its interval.

    What an interval of 1 cannot tell from nothing is grey. The last bar is the ratio end to end,
    from rows of its own: where it ends, the last rung should.
    """
    panel = picture.subplots()
    reached, labels, right = 0.0, [], 0.0
    for place, rung in enumerate(climb.rungs):
        figure = format_value(rung.figure, climb.unit) if rung.figure is not None else "–"
        labels.append(f"{rung.name}\n{figure}")
        reached, end = _rung(panel, place, rung, reached)
        right = max(right, end)
    last = len(climb.rungs)
    labels.append("end to end,\nrows of its own")
    right = max(right, _bar(panel, last, 0.0, climb.end_to_end, _WHOLE, _text(climb.end_to_end)))
    if climb.product is not None:
        panel.axvline(math.exp(climb.product), color=_WHOLE, linewidth=0.8, linestyle=":")
    panel.axvline(1.0, color="#606060", linewidth=0.8)
    panel.set_xscale("log")
    _ticks(panel, right)
    panel.set_yticks(range(last + 1), labels, fontsize=9)
    panel.set_ylim(last + 0.6, -0.6)
    panel.grid(visible=False, axis="y")
    panel.set_xlabel("times as fast as the first rung (logarithmic)")
    foot(picture, *closing_words(climb))


def _rung(panel: Axes, place: int, rung: Rung, reached: float) -> tuple[float, float]:
    """Draw one rung from the logarithm that was reached; the new one, and where the ink ends."""
    if rung.missing:
        panel.text(math.exp(reached), place, f"  {rung.missing}", va="center", fontsize=8,
                   color=_NULL)  # fmt: skip
        return reached, reached
    if rung.speedup is None or rung.speedup.value is None:
        panel.plot([math.exp(reached)], [place], "o", color=_WHOLE, markersize=5)
        return reached, reached
    colours = {"null": _NULL, "faster": _FASTER, "slower": _SLOWER, "no interval": _FASTER}
    note = {"null": "  null", "no interval": "  no interval"}.get(rung.verdict, "")
    if rung.verdict != "null" and rung.detectable is not None and rung.detectable.within:
        note += "  within the noise floor"
    text = _text(rung.speedup) + note
    end = _bar(panel, place, reached, rung.speedup, colours[rung.verdict], text)
    reached += rung.speedup.value
    panel.plot([math.exp(reached)] * 2, [place, place + 1], color="#B0B0B0", linewidth=0.8,
               zorder=0.5)  # fmt: skip
    return reached, end


def _bar(panel: Axes, place: int, begin: float, step: LogRatio, colour: str, text: str) -> float:
    """A bar from exp(begin) to exp(begin + step), its whisker and its text; where it ends."""
    if step.value is None:
        panel.text(1.0, place, f"  {step.reason}", va="center", fontsize=8, color=_NULL)
        return begin
    left, right = sorted((begin, begin + step.value))
    panel.barh(place, math.exp(right) - math.exp(left), left=math.exp(left), height=0.6,
               color=colour, alpha=0.85)  # fmt: skip
    end = right
    if step.interval is not None:
        low, high = begin + step.interval.low, begin + step.interval.high
        end = max(end, high)
        panel.plot([math.exp(low), math.exp(high)], [place, place], color="black", linewidth=1.2)
        for edge in (low, high):
            panel.plot([math.exp(edge)] * 2, [place - 0.14, place + 0.14], color="black",
                       linewidth=1.2)  # fmt: skip
    panel.annotate(text, (math.exp(end), place), xytext=(6, 0), textcoords="offset points",
                   va="center", fontsize=9,
                   bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip
    return end


def _text(step: LogRatio) -> str:
    return f"×{step.ratio:.3g}" if step.value is not None else ""


def _ticks(panel: Axes, right: float) -> None:
    """Ticks at 1, 2, 5, 10, … as plain numbers, and room for the text at the right."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    low, high = panel.get_xlim()
    low, high = min(low, 1 / 1.03), max(high, 1.03, math.exp(right))
    span = math.log(high / low)
    high *= math.exp(0.18 * span)
    panel.set_xlim(low, high)
    ticks = [m * 10.0**e for e in range(-3, 6) for m in (1, 2, 5)]
    if span < math.log(2.5):
        step = 0.01 if span < 0.1 else 0.05 if span < 0.4 else 0.2
        ticks = [1 + step * i for i in range(-100, 200)]
    panel.xaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_minor_formatter(NullFormatter())
