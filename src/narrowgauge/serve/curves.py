"""Series as SVG: a panel per metric, a thin line per row, the newest row in full. Where each
row has one value, the rows stand beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from narrowgauge.report.picture import svg_of
from narrowgauge.serve.series import Series
from narrowgauge.units import Scale, number

__all__ = ["curve_picture"]

_WIDTH, _HEIGHT, _POINTS = 520.0, 150.0, 72
#: Left: room for `2.035e-07` in the larger type that pages use on a phone.
_LEFT, _RIGHT, _TOP, _BOTTOM = 104.0, 20.0, 12.0, 26.0
_QUIET, _HERE = "#000002", "#000004"


def curve_picture(name: str, unit: str, series: Mapping[int, Series]) -> str:
    """The SVG of one metric: row -> its series. Empty where no value is finite."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.transforms import IdentityTransform

    low = min((each.low for each in series.values()), default=math.inf)
    high = max((each.high for each in series.values()), default=-math.inf)
    if low > high:
        return ""
    longest = max(each.count for each in series.values())
    order = {row: place for place, row in enumerate(series)}
    # Single values make no curve, and would all lie on one spot: then x is the row.
    places = longest if longest > 1 else len(series)
    picture = Figure(figsize=(_WIDTH / _POINTS, _HEIGHT / _POINTS), dpi=_POINTS)

    def place(row: int) -> tuple[list[float], list[float]]:
        x, y = [], []
        for step, value in series[row].points():
            along = step if longest > 1 else order[row]
            x.append(_LEFT + (_WIDTH - _LEFT - _RIGHT) * along / max(1, places - 1))
            share = (value - low) / (high - low) if high > low else 0.5
            y.append(_BOTTOM + (_HEIGHT - _BOTTOM - _TOP) * share)
        return x, y

    def line(x: Sequence[float], y: Sequence[float], colour: str, width: float) -> None:
        picture.add_artist(
            Line2D(x, y, color=colour, linewidth=width, transform=IdentityTransform())
        )

    newest = [*series][-1]
    for row in series:
        colour, width = (_HERE, 2.0) if row == newest else (_QUIET, 0.8)
        x, y = place(row)
        if not x:
            continue
        # A single value is no line: a short stroke shows where it is.
        line([x[0] - 4, x[0] + 4] if len(x) == 1 else x, y * 2 if len(x) == 1 else y, colour, width)
    line([_LEFT, _WIDTH - _RIGHT], [_BOTTOM - 6] * 2, _QUIET, 1.0)
    texts = [
        (_LEFT - 8, _HEIGHT - _TOP, number(high, unit), "right"),
        (_LEFT - 8, _BOTTOM, number(low, unit), "right"),
        *_ends([*series], longest),
    ]
    for x_text, y_text, words, align in texts:
        picture.text(x_text / _WIDTH, y_text / _HEIGHT, words, color=_QUIET, ha=align,
                     va="center_baseline", fontsize=11, parse_math=False)  # fmt: skip
    rows = f"{len(series)} rows" if len(series) > 1 else "one row"
    most = " ".join(filter(None, (number(high), Scale(1.0, unit).word)))
    return svg_of(picture, f"{name} of {rows}, between {number(low)} and {most}; "
                           f"the newest value is {number(series[newest].newest)}")  # fmt: skip


def _ends(rows: Sequence[int], longest: int) -> list[tuple[float, float, str, str]]:
    """What stands at both ends of the horizontal axis: the first and the last value, or row."""
    first, last = ("1", str(longest)) if longest > 1 else (f"row {rows[0]}", f"row {rows[-1]}")
    ends = [(_LEFT, 8.0, first, "center"), (_WIDTH - 2, 8.0, last, "right")]
    return ends if first != last else ends[:1]
