"""All families in one picture: accuracy against MACs, or against measured latency.

A family has a colour, a marker and its name beside its line, so that no reader depends on colours.
Of more families than can be told apart the rest are thin lines without names, in the colour of
their experiment.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from narrowgauge.draw_style import foot, heading, looks, write_pictures
from narrowgauge.errors import results_unwritable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from narrowgauge.anytime.scoring import Curve, FamilyScore, Scoring

__all__ = ["draw_scoring", "plain_ticks"]

#: A colour and a marker.
_Look: TypeAlias = tuple[str, str]

#: More lines with names than these are no picture any more: those of the greatest areas have one.
_MOST_NAMED = 12
#: The height of a line of a label, as a share of the axis, and how many letters fit on it.
_LABEL = 0.045
_LETTERS = 42
#: Of a family without a name whose experiment has none either.
_OTHER = "#808080"


def draw_scoring(found: Scoring, out: Path) -> list[Path]:
    """Draw `anytime-macs` and, where latencies were measured, `anytime-latency` into `out`, as SVG
    and PNG; the files made. Raises ResultsUnwritable."""
    try:
        return list(write_pictures(_pictures(found), out))
    except OSError as error:
        raise results_unwritable(out, f"{error.strerror}: {error.filename}") from error


def _pictures(found: Scoring) -> Iterator[tuple[str, Figure]]:
    yield "anytime-macs", _against_macs(found)
    if found.latency_range is not None:
        yield "anytime-latency", _against_latency(found)


def _against_macs(found: Scoring) -> Figure:
    families, others = _drawn(found)
    picture, panel = _picture(found, "Accuracy against computation")
    _thin(panel, [(each.macs, colour) for each, colour in others], 1e-6)
    for each, (colour, _) in families:
        for points in each.budgeted:
            panel.plot([p.macs / 1e6 for p in points], [100 * p.accuracy for p in points],
                       color=colour, linewidth=1.0, linestyle=":", zorder=2)  # fmt: skip
    _lines(panel, [(each.label, each.macs, look) for each, look in families], 1e-6)
    panel.axvspan(found.range.low / 1e6, found.range.high / 1e6, color="#F4F6F8", zorder=0)
    _finish(panel, "million multiply-accumulates per image (logarithmic)")
    foot = f"shaded: where areas are taken, {found.range.why}"
    if any(points for each, _ in families for points in each.budgeted):
        foot += " · dotted: leaving by entropy, thresholds from validation images"
    _foot(picture, foot, found)
    return picture


def _against_latency(found: Scoring) -> Figure:
    families, others = _drawn(found)
    picture, panel = _picture(found, "Accuracy against measured latency")
    rest = [(e.latency, colour) for e, colour in others if e.latency is not None]
    _thin(panel, rest, 1e3)
    timed = [(e.label, e.latency, look) for e, look in families if e.latency is not None]
    _lines(panel, timed, 1e3)
    _finish(panel, "milliseconds to the answer, batch of one (logarithmic)")
    text = f"medians on {found.device}"
    untimed = sum(each.latency is None for each in found.families)
    if untimed:
        text += f" · not timed: {untimed} of {len(found.families)} families"
    _foot(picture, text, found)
    return picture


def _drawn(
    found: Scoring,
) -> tuple[list[tuple[FamilyScore, _Look]], list[tuple[FamilyScore, str]]]:
    """Those that have a name, in their own order, the best of each experiment before others: ten
    variants of one system would be no picture of all. And the others, by the colour of the first of
    their experiment that has a name. A family looks the same in all pictures."""
    # By place: of equal areas the first stand, and none of a larger area falls out for them.
    largest = sorted(
        range(len(found.families)), key=lambda place: -found.families[place].macs.area.value
    )
    best = {found.families[place].family.rows[0].experiment: place for place in reversed(largest)}
    order = sorted(largest, key=lambda place: place not in best.values())
    drawn = [found.families[place] for place in sorted(order[:_MOST_NAMED])]
    named = list(zip(drawn, looks(), strict=False))
    colours = {e.family.rows[0].experiment: colour for e, (colour, _) in reversed(named)}
    others = [found.families[place] for place in sorted(order[_MOST_NAMED:])]
    return named, [(e, colours.get(e.family.rows[0].experiment, _OTHER)) for e in others]


def _thin(panel: Axes, curves: Sequence[tuple[Curve, str]], scale: float) -> None:
    """Families without a name: steps alone, behind the others, and a dot at each exit."""
    for curve, colour in curves:
        costs, heights = _exits(curve, scale)
        panel.step(costs, heights, where="post", color=colour, linewidth=0.7, alpha=0.55, zorder=1)
        panel.plot(costs, heights, ".", color=colour, markersize=3, alpha=0.55, zorder=1)


def _exits(curve: Curve, scale: float) -> tuple[list[float], list[float]]:
    """Costs and accuracies of a family's exits, as the axes have them."""
    costs = [scale * cost for cost in curve.costs]
    return costs, [100 * found.value for found in curve.accuracies]


def _picture(found: Scoring, title: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9.0, 5.4))
    made_up = " · made-up data" if found.synthetic else ""
    name = found.data.replace(" (made up)", "")
    text = f"{title} · {name}, {found.images:,} test images{made_up}"
    heading(picture, text)
    return picture, picture.subplots()


def _lines(panel: Axes, drawn: Sequence[tuple[str, Curve, _Look]], scale: float) -> None:
    """Steps from exit to exit, an interval at each, and the name at the last."""
    ends = []
    for label, curve, (colour, marker) in drawn:
        costs, heights = _exits(curve, scale)
        panel.step(costs, heights, where="post", color=colour, linewidth=1.6, zorder=3)
        whiskers = [
            [100 * max(0.0, found.value - found.low) for found in curve.accuracies],
            [100 * max(0.0, found.high - found.value) for found in curve.accuracies],
        ]
        panel.errorbar(costs, heights, yerr=whiskers, fmt=marker, color=colour, markersize=7,
                       markeredgecolor="white", markeredgewidth=0.6, elinewidth=1.2, capsize=2.5,
                       zorder=4)  # fmt: skip
        ends.append((costs[-1], heights[-1], label, (colour, marker)))
    panel.set_xscale("log")
    panel.margins(x=0.05, y=0.08)
    panel.set_ylim(top=min(panel.get_ylim()[1], 101.0))
    _place_labels(panel, ends)


def _place_labels(panel: Axes, ends: Sequence[tuple[float, float, str, _Look]]) -> None:
    """Write each line's name right of the axis with its marker, at its height where there is room,
    and lead to its end. `ends`: x, y, name, look."""
    bottom, top = panel.get_ylim()
    placed: list[tuple[tuple[float, float], str, _Look, float, float]] = []
    lowest = 0.0
    for x, y, name, look in sorted(ends, key=lambda end: end[1]):
        text = "\n".join(textwrap.wrap(name, _LETTERS)) or name
        half = _LABEL * (text.count("\n") + 1) / 2
        middle = max((y - bottom) / (top - bottom), lowest + half)
        lowest = middle + half
        placed.append(((x, y), text, look, half, middle))
    # What was pushed beyond the top comes back down, and pushes what is below it.
    highest = max(1.0 + _LABEL / 2, 2 * sum(half for *_, half, _ in placed))
    for end, text, (colour, marker), half, wanted in reversed(placed):
        middle = min(wanted, highest - half)
        highest = middle - half
        panel.plot([1.04], [middle], marker, color=colour, markersize=7, clip_on=False,
                   markeredgecolor="white", transform=panel.transAxes)  # fmt: skip
        panel.annotate("", xy=end, xytext=(1.03, middle), textcoords="axes fraction",
                       annotation_clip=False,
                       arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8,
                                   "alpha": 0.6, "shrinkB": 5.0, "linestyle": (0, (3, 2))},
                       )  # fmt: skip
        panel.text(1.06, middle, text, transform=panel.transAxes, va="center", ha="left",
                   fontsize=9, color="#202020", linespacing=1.0)  # fmt: skip


def plain_ticks(axis: Any) -> None:
    """1, 2, 5, 10 and so on, as plain numbers; more of them where an axis has less than that."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high > 8 * low else tuple(float(n) for n in range(1, 10))
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _finish(panel: Axes, x: str) -> None:
    plain_ticks(panel.xaxis)
    panel.set_xlabel(x)
    panel.set_ylabel("test accuracy (%)")


def _foot(picture: Figure, text: str, found: Scoring) -> None:
    unnamed = len(found.families) - _MOST_NAMED
    if unnamed > 0:
        text += f" · thin: {unnamed} more, in the colour of the best of their experiment"
    foot(picture, f"bars: 95 % intervals over test images and seeds · {text}")
