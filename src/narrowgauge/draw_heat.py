"""The picture of a function of two things: cells in shades."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge.side_files import side_file
from narrowgauge_contract.errors import DamagedRecordError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from narrowgauge.store import RunFolder
    from narrowgauge_contract.drawing import Drawing
    from narrowgauge_contract.outcome import Row

__all__ = ["Heat", "heat_size", "paint_heat", "read_heat"]


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
    return 2.8 + 0.3 * len(heat.columns), 1.6 + 0.26 * len(heat.rows)


def paint_heat(picture: Figure, heat: Heat, drawing: Drawing) -> None:
    """Rows downwards. Shades go from no value at all; where some are negative, on both sides."""
    panel = picture.subplots()
    flat = [each for line in heat.values for each in line]
    most = max(map(abs, flat)) or 1.0
    signed = min(flat) < 0
    image = panel.imshow(
        heat.values,
        cmap="RdBu_r" if signed else "Blues",
        vmin=-most if signed else 0.0,
        vmax=most,
        aspect="auto",
    )
    panel.set_xticks(range(len(heat.columns)), heat.columns, rotation=90, fontsize=8)
    panel.set_yticks(range(len(heat.rows)), heat.rows, fontsize=8)
    panel.set_xlabel(drawing.x or "column")
    panel.set_ylabel(drawing.y or "row")
    panel.grid(visible=False)
    picture.colorbar(image, ax=panel, shrink=0.85, label=heat.label)
