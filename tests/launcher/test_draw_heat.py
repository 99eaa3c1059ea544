"""Cells in shades: which numbers stand in them, how far the scale goes, and that words fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from narrowgauge.draw_heat import Heat, heat_size, paint_heat
from narrowgauge_contract.drawing import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWING = Drawing("lost", "heat", "Lost", side_file="lost.json")


def _painted(*lines: tuple[float, ...], label: str = "points lost") -> Figure:
    from matplotlib.figure import Figure

    rows = tuple(f"cut {number}" for number in range(len(lines)))
    columns = tuple(f"block {number}" for number in range(len(lines[0])))
    heat = Heat(rows, columns, lines, label)
    picture = Figure(figsize=heat_size(heat), layout="constrained")
    paint_heat(picture, heat, DRAWING)
    return picture


def _numbers(picture: Figure) -> list[str]:
    return [text.get_text() for text in picture.axes[0].texts]


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ((57.68, 0.0, -0.08), ["57.7", "0.0", "−0.1"]),
        ((5.0, -0.004, -0.83), ["5.00", "0.00", "−0.83"]),
        ((1.0, 0.141, 0.0), ["1.00", "0.14", "0.00"]),
        ((-1234.5, 7.0, 0.2), ["−1234", "7", "0"]),
        ((0.0, 0.0, 0.0), ["0.00"] * 3),
        # Exponents would be wider than cells.
        ((2e-9, 1e-9, 0.0), []),
        ((2e9, 1e9, 0.0), []),
    ],
)
def test_numbers_have_as_many_decimals_as_the_largest_asks_for(
    line: tuple[float, ...], numbers: list[str]
) -> None:
    assert _numbers(_painted(line)) == numbers


def test_more_cells_than_one_would_read_have_no_numbers() -> None:
    assert len(_numbers(_painted(*[(1.0,) * 12] * 10))) == 120
    assert _numbers(_painted(*[(1.0,) * 11] * 11)) == []


def test_numbers_stay_within_their_cells_and_can_be_told_from_them() -> None:
    picture = _painted((57.68, -0.08, 3.0), (-12.25, 0.0, 29.3))
    picture.draw_without_rendering()
    panel = picture.axes[0]
    cell = panel.get_window_extent().width / 3

    assert all(text.get_window_extent().width < cell for text in panel.texts)
    colours = {text.get_text(): text.get_color() for text in panel.texts}
    assert (colours["57.7"], colours["0.0"]) == ("white", "#202020")


@pytest.mark.parametrize(
    ("line", "low", "high"),
    [((1.0, 4.0), 0.0, 4.0), ((57.0, -0.1), -0.1, 57.0), ((-7.0, -1.0), -7.0, 0.0),
     ((-4.0, 2.0), -4.0, 2.0), ((0.0, 0.0), 0.0, 1.0)],
)  # fmt: skip
def test_the_scale_goes_as_far_as_values_do(
    line: tuple[float, ...], low: float, high: float
) -> None:
    (image,) = _painted(line).axes[0].get_images()

    assert image.get_clim() == (low, high)


def test_shades_say_the_sign_and_are_as_dark_as_values_are_far_from_none() -> None:
    (image,) = _painted((-4.0, 0.0, 2.0)).axes[0].get_images()
    (red, _, blue), none, (also_red, _, also_blue) = (
        image.cmap(float(image.norm(value)))[:3] for value in (-4.0, 0.0, 2.0)
    )

    assert blue > red
    assert also_red > also_blue
    assert min(none) > 0.95
    assert red + blue < also_red + also_blue  # twice as far


@pytest.mark.parametrize("rows", [1, 2, 6, 12])
def test_the_label_of_the_scale_is_no_longer_than_the_scale(rows: int) -> None:
    picture = _painted(*[(1.0, 2.0)] * rows, label="points of test accuracy lost to one cut")
    picture.draw_without_rendering()
    _, bar = picture.axes

    assert bar.yaxis.label.get_window_extent().height <= bar.get_window_extent().height
