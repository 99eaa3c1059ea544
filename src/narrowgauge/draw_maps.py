"""Maps over images: where in each image each of several answers comes from."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge.side_files import side_file
from narrowgauge_contract.errors import DamagedRecordError

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from narrowgauge.store import RunFolder
    from narrowgauge_contract.outcome import Row

__all__ = ["Maps", "maps_size", "paint_maps", "read_maps"]

#: More than these are no picture any more.
_MOST_ROWS, _MOST_COLUMNS, _MOST_SIDE = 24, 16, 512
#: Of a file, in bytes, which as Python's lists is some thirty times as large; and of a name, in
#: characters, which all are drawn.
_MOST_BYTES, _MOST_NAME = 16 << 20, 120
#: Inches; the title has to fit in.
_CELL, _LEAST_WIDE = 1.25, 5.6
#: Colours go from dark to light, so that maps can be read without colours as well.
_COLOURS, _OPAQUE = "inferno", 0.6

_Lines = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Maps:
    """What a side file of maps holds: `images[row]` as lines of (red, green, blue) from 0 to 255,
    `maps[row][column]` as lines of values from 0 to 1, and what rows and columns are called."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    images: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]
    maps: tuple[tuple[_Lines, ...], ...]


def read_maps(row: Row, name: str, folder: RunFolder) -> Maps | None:
    """The row's, checked; None where it has none. Raises DamagedRecordError."""
    path = side_file(row, name, folder)
    if path is None:
        return None
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise _damaged(path, f"{size} bytes; {_MOST_BYTES} at most are read")
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        found = Maps(
            rows=tuple(map(str, body["rows"])),
            columns=tuple(map(str, body["columns"])),
            images=tuple(_image(each) for each in body["images"]),
            maps=tuple(tuple(_lines(one) for one in line) for line in body["maps"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    problem = _problem(found)
    if problem:
        raise _damaged(path, problem)
    return found


def _damaged(path: Path, why: str) -> DamagedRecordError:
    return DamagedRecordError(f"the side file {path} holds no maps over images", why=why)


def _image(lines: Any) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    return tuple(
        tuple((int(red), int(green), int(blue)) for red, green, blue in line) for line in lines
    )


def _lines(values: Any) -> _Lines:
    return tuple(tuple(map(float, line)) for line in values)


def _problem(found: Maps) -> str:
    """Why this cannot be drawn; empty where it can."""
    rows, columns = len(found.rows), len(found.columns)
    if not (0 < rows <= _MOST_ROWS and 0 < columns <= _MOST_COLUMNS):
        return f"{rows} images and {columns} maps of each; 1 to {_MOST_ROWS} and {_MOST_COLUMNS}"
    if any(len(name) > _MOST_NAME or not name.isprintable() for name in found.rows + found.columns):
        return f"a name is longer than {_MOST_NAME} characters, or has some that cannot be printed"
    if not len(found.images) == len(found.maps) == rows:
        return f"{rows} names, {len(found.images)} images and maps of {len(found.maps)}"
    if any(len(line) != columns for line in found.maps):
        return f"an image has not one map for each of {columns} names"
    grids: list[tuple[tuple[Any, ...], ...]] = [*found.images]
    grids += [one for line in found.maps for one in line]
    if not all(_rectangular(grid) for grid in grids):
        return f"an image or a map is not rectangular, with sides of 1 to {_MOST_SIDE}"
    colours = (c for image in found.images for line in image for pixel in line for c in pixel)
    if not all(0 <= colour <= 255 for colour in colours):
        return "a colour is not from 0 to 255"
    values = (v for line in found.maps for one in line for places in one for v in places)
    if not all(math.isfinite(value) and 0 <= value <= 1 for value in values):
        return "a value of a map is not from 0 to 1"
    return ""


def _rectangular(grid: tuple[tuple[Any, ...], ...]) -> bool:
    wide = len(grid[0]) if grid else 0
    return (
        0 < len(grid) <= _MOST_SIDE
        and 0 < wide <= _MOST_SIDE
        and all(len(line) == wide for line in grid)
    )


def maps_size(maps: Maps) -> tuple[float, float]:
    """Width and height of the picture, in inches."""
    wide = 0.8 + _CELL * (1 + len(maps.columns))
    return max(wide, _LEAST_WIDE), 1.1 + (_CELL + 0.25) * len(maps.rows)


def paint_maps(picture: Figure, maps: Maps) -> None:
    """A line for each image: the image, then each of its maps over it. Light is where an answer
    comes from."""
    panels = picture.subplots(len(maps.rows), 1 + len(maps.columns), squeeze=False)
    for line, name, image, over in zip(panels, maps.rows, maps.images, maps.maps, strict=True):
        extent = (-0.5, len(image[0]) - 0.5, len(image) - 0.5, -0.5)
        for panel, values in zip(line, (None, *over), strict=True):
            panel.imshow(image, extent=extent)
            if values is not None:
                panel.imshow(values, cmap=_COLOURS, alpha=_OPAQUE, vmin=0.0, vmax=1.0,
                             extent=extent, interpolation="bilinear")  # fmt: skip
            panel.set_axis_off()
        line[0].set_title(name, fontsize=7, loc="left")
    for panel, name in zip(panels[0][1:], maps.columns, strict=True):
        panel.set_title(name, fontsize=8)
