"""What pictures are called, and what stands below them, is there whole; and how lines look."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from narrowgauge.draw_style import COLOURS, foot, heading, looks

_LONG = "What every exit of a network with four of them says of the test images · made-up data"


@pytest.mark.parametrize("width", [4.0, 6.8, 13.0])
@pytest.mark.parametrize("text", [_LONG, "short"])
def test_a_heading_and_a_foot_are_as_wide_as_their_picture_at_most(width: float, text: str) -> None:
    picture = Figure(figsize=(width, 3.0), layout="constrained")
    canvas = FigureCanvasAgg(picture)
    heading(picture, text)
    foot(picture, 3 * text)
    picture.subplots()
    canvas.draw()

    edge = picture.bbox.width
    for words in (picture._suptitle, picture._supxlabel):
        box = words.get_window_extent(canvas.get_renderer())
        assert box.x0 >= 0
        assert box.x1 <= edge
    assert picture.get_suptitle().replace("\n", " ") == text
    assert picture.get_supxlabel().replace("\n", "").replace(" ", "") == (3 * text).replace(" ", "")


def test_a_picture_grows_by_the_lines_of_its_heading() -> None:
    one, many = Figure(figsize=(4.0, 3.0)), Figure(figsize=(4.0, 3.0))
    heading(one, "short")
    heading(many, _LONG)

    assert one.get_size_inches()[1] == 3.0
    assert many.get_size_inches()[1] == pytest.approx(3.0 + 0.2 * many.get_suptitle().count("\n"))


def test_no_two_of_many_things_look_alike() -> None:
    first = list(itertools.islice(looks(), 64))

    assert len(set(first)) == 64
    assert [colour for colour, _ in first[:8]] == list(COLOURS)
