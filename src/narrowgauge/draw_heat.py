"""The picture of a function of two things: cells in shades."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge.side_files import side_file
from narrowgauge_contract.errors import DamagedRecordError

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from narrowgauge.store import RunFolder
    from narrowgauge_contract.drawing import Drawing
    from narrowgauge_contract.outcome import Row

__all__ = ["Heat", "heat_size", "paint_heat", "read_heat"]

#: More numbers than these nobody reads.
_MOST_NUMBERS = 120
#: Inches: a cell without a number in it, all of them together at least, a digit of a number, and a
#: letter of the bar's label, as wide as they come on average.
_CELL_WIDE, _CELL_TALL, _LEAST_TALL = 0.3, 0.26, 1.2
_DIGIT, _LETTER = 0.075, 0.07
_SHADES = 256


@dataclass(frozen=True)
class Heat:
    """`values[row][column]`, what rows and columns are called, and what values are."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    label: str


def read_heat(row: Row, name: str, folder: RunFolder) -> Heat | None:
    """The row's, checked; None where it has none. Raises DamagedRecordError."""
    path = side_file(row, name, folder)
    if path is None:
        return None
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        rows, columns = (tuple(map(str, body[key])) for key in ("rows", "columns"))
        values = tuple(tuple(map(float, line)) for line in body["values"])
        label = str(body["label"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedRecordError(
            f"the side file {path} holds no heat map", why=str(error)
        ) from error
    shapely = len(values) == len(rows) and all(len(line) == len(columns) for line in values)
    if (
        not shapely
        or not values
        or not all(math.isfinite(each) for line in values for each in line)
    ):
        raise DamagedRecordError(
            f"the side file {path} holds no heat map",
            why=f"{len(rows)} × {len(columns)} finite values are wanted",
        )
    return Heat(rows, columns, values, label)


def heat_size(heat: Heat) -> tuple[float, float]:
    """Width and height of the picture, in inches."""
    numbers = _numbers(heat)
    longest = max((len(each) for line in numbers for each in line), default=0)
    names = max(map(len, heat.columns))
    wide = max(_CELL_WIDE, 0.1 + _DIGIT * longest) * len(heat.columns)
    return 2.8 + wide, 1.1 + 0.07 * names + max(_CELL_TALL * len(heat.rows), _LEAST_TALL)


def paint_heat(picture: Figure, heat: Heat, drawing: Drawing) -> None:
    """Rows downwards. Shades go from no value at all; where some are negative, on both sides, and
    as far as values do. Few cells have their values written in them."""
    import numpy as np

    panel = picture.subplots()
    flat = [each for line in heat.values for each in line]
    low, high = min(0.0, *flat), max(0.0, *flat)
    image = panel.imshow(
        heat.values, cmap=_shades(low, high), vmin=low, vmax=high if high > low else 1.0,
        aspect="auto",
    )  # fmt: skip
    colours = image.to_rgba(np.asarray(heat.values))
    for row, line in enumerate(_numbers(heat)):
        for column, number in enumerate(line):
            red, green, blue, _ = colours[row, column]
            light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
            panel.text(column, row, number, ha="center", va="center", fontsize=7,
                       color="#202020" if light else "white")  # fmt: skip
    panel.set_xticks(range(len(heat.columns)), heat.columns, rotation=90, fontsize=8)
    panel.set_yticks(range(len(heat.rows)), heat.rows, fontsize=8)
    panel.set_xlabel(drawing.x or "column")
    panel.set_ylabel(drawing.y or "row")
    panel.grid(visible=False)
    bar = picture.colorbar(image, ax=panel, shrink=0.85)
    tall = 0.85 * max(_CELL_TALL * len(heat.rows), _LEAST_TALL)
    bar.set_label("\n".join(textwrap.wrap(heat.label, max(int(tall / _LETTER), 1))), fontsize=9)


def _shades(low: float, high: float) -> Colormap:
    """From `low` to `high`, of which neither is beyond 0. Values of both signs that are as far from
    it are as dark, and no part of the scale is left to values that do not occur."""
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap

    if low == 0:
        return mpl.colormaps["Blues"]
    both, most = mpl.colormaps["RdBu_r"], max(-low, high)
    first, last = 0.5 + 0.5 * low / most, 0.5 + 0.5 * high / most
    steps = [first + (last - first) * step / (_SHADES - 1) for step in range(_SHADES)]
    return ListedColormap([both(step) for step in steps])


def _numbers(heat: Heat) -> list[list[str]]:
    """What stands in the cells: all with as many decimals, three digits for the largest. Nothing of
    more cells than one would read, nor of values so small or large that they need exponents."""
    most = max(abs(each) for line in heat.values for each in line)
    if len(heat.rows) * len(heat.columns) > _MOST_NUMBERS or not 1e-3 <= (most or 1.0) < 1e6:
        return []
    decimals = max(0, 2 - math.floor(math.log10(most or 1.0)))
    return [[_number(each, decimals) for each in line] for line in heat.values]


def _number(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    # What rounds to nothing has no sign.
    return text.lstrip("-") if not float(text) else text.replace("-", "\u2212")
