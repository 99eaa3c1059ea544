"""The paper's figure beside ours, as SVG: one line each, on one axis.

matplotlib draws; its output is then cut down to shapes and text with classes, so that the page's
style sheet colours it, light or dark, and a strict content policy can hold: no style attributes, no
ids, no script.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from narrowgauge.judge.model import Estimate
from narrowgauge.judge.rules import allowed
from narrowgauge.report.content import ClaimView
from narrowgauge.report.words import told_apart
from narrowgauge.units import prefixed_scale_of
from narrowgauge_contract.claims import Claim, ClaimKind, Expectation, MetricOperator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Sketch", "claim_picture", "picture_css", "svg_of"]

_WIDTH, _ROW, _EDGE, _AXIS = 520, 30, 150, 34
#: In matplotlib's figure an inch is as many points, and an SVG of it as many units.
_POINTS = 72
_FONT = 11
#: What drawing code calls a colour, what the style sheet calls it, and both of its values there.
_INKS = {
    "#000001": ("ink", "#1b1f24", "#e6e8ea"),
    "#000002": ("quiet", "#5c6570", "#a3abb5"),
    "#000003": ("paper", "#a14a00", "#ffa657"),
    "#000004": ("here", "#0060a0", "#6cb6ff"),
}
_INK, _QUIET, _PAPER, _HERE = _INKS
#: As many bars, or repeats, as one can look at.
_MOST_BARS = 24
_MOST_REPEATS = 60
#: Only letters that matplotlib's own font has: it warns of others, and measures them wrongly.
_LETTERS = re.compile(r"[^\x20-\x7e\xa0-\xff–×µ]")
_SVG = "http://www.w3.org/2000/svg"
_DASHES = {"stroke-dasharray", "stroke-dashoffset"}


class Sketch:
    """A picture of rows on one axis: a label at the left, marks at values."""

    def __init__(self, rows: int, values: Iterable[float], unit: str) -> None:
        from matplotlib.figure import Figure

        self.rows = rows
        self.height = rows * _ROW + _AXIS
        self._picture = Figure(figsize=(_WIDTH / _POINTS, self.height / _POINTS), dpi=_POINTS)
        self._low, self._high = _span(values)
        self._unit = unit

    def at(self, value: float) -> float:
        """Where on the axis a value lies; what is beyond it lies at its end."""
        share = (value - self._low) / (self._high - self._low)
        return _EDGE + min(1.0, max(0.0, share)) * (_WIDTH - _EDGE - 24)

    def level(self, row: int) -> float:
        return self.height - (row + 0.5) * _ROW

    def line(self, x: Sequence[float], y: Sequence[float], colour: str, width: float = 1.0) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.transforms import IdentityTransform

        self._picture.add_artist(
            Line2D(x, y, color=colour, linewidth=width, transform=IdentityTransform(),
                   solid_capstyle="butt")
        )  # fmt: skip

    def area(self, corners: Sequence[tuple[float, float]], colour: str, alpha: float = 1.0) -> None:
        from matplotlib.patches import Polygon
        from matplotlib.transforms import IdentityTransform

        self._picture.add_artist(
            Polygon(corners, closed=True, facecolor=colour, edgecolor="none", alpha=alpha,
                    transform=IdentityTransform())
        )  # fmt: skip

    def text(self, x: float, y: float, words: str, colour: str, align: str) -> None:
        self._picture.text(
            x / _WIDTH, y / self.height, _LETTERS.sub("?", words), color=colour, ha=align,
            va="center_baseline", fontsize=_FONT, parse_math=False,
        )  # fmt: skip

    def label(self, row: int, words: str) -> None:
        shown = words if len(words) <= 22 else f"{words[:20]}.."
        self.text(_EDGE - 12, self.level(row), shown, _INK, "right")

    def band(self, row: int, low: float, high: float, colour: str) -> None:
        """A tolerance: all values that would do."""
        left, right, y = self.at(low), self.at(high), self.level(row)
        corners = [(left, y - 9), (right, y - 9), (right, y + 9), (left, y + 9)]
        self.area(corners, colour, 0.25)

    def mark(self, row: int, value: float, colour: str) -> None:
        x, y = self.at(value), self.level(row)
        self.area([(x - 6, y), (x, y - 7), (x + 6, y), (x, y + 7)], colour)

    def estimate(self, row: int, estimate: Estimate, colour: str) -> None:
        """The figure, its interval, and every repeat as a stroke below."""
        y = self.level(row)
        if estimate.low is not None and estimate.high is not None:
            left, right = self.at(estimate.low), self.at(estimate.high)
            self.line([left, right], [y, y], colour, 2)
            for edge in (left, right):
                self.line([edge, edge], [y - 5, y + 5], colour, 2)
        for value in filter(math.isfinite, estimate.per_repeat[:_MOST_REPEATS]):
            x = self.at(value)
            self.line([x, x], [y - 13, y - 8], _QUIET, 1)
        self.mark(row, estimate.figure, colour)

    def axis(self) -> None:
        from matplotlib.ticker import MaxNLocator

        y = self.height - self.rows * _ROW - 4
        self.line([_EDGE, _WIDTH - 24], [y, y], _QUIET, 1)
        scale = prefixed_scale_of(max(abs(self._low), abs(self._high)), self._unit)
        ticks = MaxNLocator(5).tick_values(self._low * scale.factor, self._high * scale.factor)
        for tick in ticks:
            value = tick / scale.factor
            if self._low <= value <= self._high:
                x = self.at(value)
                self.line([x, x], [y, y - 4], _QUIET, 1)
                self.text(x, y - 14, f"{tick:.4g}", _QUIET, "center")
        if scale.unit not in ("", "1"):
            self.text(_EDGE - 12, y - 14, scale.unit, _QUIET, "right")

    def figure(self) -> Figure:
        return self._picture


def claim_picture(view: ClaimView) -> str:
    """The SVG of one claim; empty where there is nothing of ours to show beside the paper's."""
    judgement = view.judgement
    if view.judgement.claim.operator is MetricOperator.ORDER:
        return _bars(judgement.parts, view)
    estimate = judgement.estimate
    if estimate is None or not math.isfinite(estimate.figure):
        return ""
    expected = judgement.expectation
    bounds = _bounds(expected, judgement.claim) if expected is not None else None
    values = [estimate.figure, *filter(math.isfinite, estimate.per_repeat[:_MOST_REPEATS])]
    values += [each for each in (estimate.low, estimate.high) if each is not None]
    if bounds is not None:
        values += [each for each in bounds if each is not None]
    sketch = Sketch(2, values, estimate.unit)
    _paint_expected(sketch, bounds)
    sketch.label(1, "here")
    sketch.estimate(1, estimate, _HERE)
    sketch.axis()
    return svg_of(sketch.figure(), _alternative(view))


def _paint_expected(sketch: Sketch, bounds: tuple[float | None, ...] | None) -> None:
    if bounds is None:
        return
    low, figure, high = bounds
    sketch.label(0, "paper")
    if low is not None or high is not None:
        sketch.band(
            0, -math.inf if low is None else low, math.inf if high is None else high, _PAPER
        )
    if figure is not None:
        sketch.mark(0, figure, _PAPER)


def _bounds(expected: Expectation, claim: Claim) -> tuple[float | None, ...]:
    """What an expectation allows, by the rules of judging: (from, the figure, to); None where there
    is none. Of a trend the published figure and its tolerance are shown, which judging asks nothing
    of but their direction."""
    figure, tolerance = expected.figure, expected.tolerance
    if claim.kind is ClaimKind.EQUIVALENCE and figure is None:
        figure = 1.0
    if claim.kind is ClaimKind.TREND and figure is not None:
        reach = None if tolerance is None else abs(figure) * tolerance
        return (None, figure, None) if reach is None else (figure - reach, figure, figure + reach)
    region = allowed(claim, expected)
    low = region.low if math.isfinite(region.low) else None
    return low, figure, region.high if math.isfinite(region.high) else None


def _bars(parts: Sequence[Estimate], view: ClaimView) -> str:
    """Of an order: its figures below each other, in the order stated."""
    shown = [each for each in parts if math.isfinite(each.figure)][:_MOST_BARS]
    if not shown:
        return ""
    values = [0.0, *(each.figure for each in shown)]
    values += [edge for each in shown for edge in (each.low, each.high) if edge is not None]
    sketch = Sketch(len(shown), values, shown[0].unit)
    names = told_apart([each.label for each in shown])
    for row, each in enumerate(shown):
        y = sketch.level(row)
        left, right = sketch.at(0.0), sketch.at(each.figure)
        corners = [(left, y - 6), (right, y - 6), (right, y + 6), (left, y + 6)]
        sketch.area(corners, _HERE, 0.35)
        sketch.label(row, names[row])
        sketch.estimate(row, each, _HERE)
    sketch.axis()
    return svg_of(sketch.figure(), _alternative(view))


def _alternative(view: ClaimView) -> str:
    """What a screen reader says of the picture."""
    interval = f", {view.coverage} {view.interval}" if view.interval else ""
    return f"The paper: {view.paper}. Here: {view.here or 'no figure'}{interval}."


def _span(values: Iterable[float]) -> tuple[float, float]:
    """An axis that holds all values, with room at both ends."""
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if low == 0 else low - room), high + room


def svg_of(picture: Figure, title: str) -> str:
    """A figure as an SVG element for a page: classes instead of styles, a title, no ids."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    picture.patch.set_visible(False)
    FigureCanvasSVG(picture)
    stream = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "narrowgauge"}):
        picture.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return _slim(ElementTree.fromstring(stream.getvalue()), title)


def _slim(drawn: ElementTree.Element, title: str) -> str:
    box = drawn.get("viewBox", "").split()
    root = ElementTree.Element(
        "svg", {"viewBox": " ".join(box), "class": "picture", "role": "img", "aria-label": title}
    )
    for element in drawn.iter():
        name = element.tag.removeprefix(f"{{{_SVG}}}")
        if name == "path" and element.get("style"):
            path = " ".join(element.get("d", "").split())
            ElementTree.SubElement(root, "path", {"d": path, **_look(element.get("style", ""))})
        elif name == "text":
            place = {key: element.get(key, "0") for key in ("x", "y")}
            words = ElementTree.SubElement(
                root, "text", {**place, **_look(element.get("style", ""))}
            )
            words.text = element.text
    return ElementTree.tostring(root, encoding="unicode")


def _look(style: str) -> dict[str, str]:
    """matplotlib's style as attributes; colours become classes."""
    pairs = (each.partition(":")[::2] for each in style.split(";") if each.strip())
    said = {name.strip(): value.strip() for name, value in pairs}
    found: dict[str, str] = {}
    classes = [
        f"{part}-{_INKS[said[part]][0]}" for part in ("fill", "stroke") if said.get(part) in _INKS
    ]
    if said.get("fill") == "none":
        found["fill"] = "none"
    for name in ("stroke-width", "opacity", "text-anchor"):
        if name in said:
            found[name] = said[name]
    return {**({"class": " ".join(classes)} if classes else {}), **found}


def picture_css() -> str:
    """The custom properties and classes that pictures are coloured by: light, and dark."""
    light = "".join(f"--{name}:{each};" for name, each, _ in _INKS.values())
    dark = "".join(f"--{name}:{each};" for name, _, each in _INKS.values())
    classes = "".join(
        f".fill-{name}{{fill:var(--{name})}}.stroke-{name}{{stroke:var(--{name})}}"
        for name, _, _ in _INKS.values()
    )
    return (
        f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}{classes}"
    )
