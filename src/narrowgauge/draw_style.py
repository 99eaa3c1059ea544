"""How all pictures look, and how they are written: the same values give the same bytes."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "MARKERS", "foot", "heading", "looks", "write_pictures"]

#: Okabe and Ito's colours, told apart by colour-blind readers as well, in an order of contrast.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
#: As many as colours, so that what comes again in a colour has another of them.
MARKERS = ("o", "s", "^", "D", "v", "p", "<", "h")
_DPI = 150
#: Inches: a letter of the heading and of the foot, as wide as they come on average, and a line.
_HEADING_LETTER, _HEADING_LINE = 0.115, 0.2
_FOOT_LETTER = 0.068
#: Fixed ids and no date, so that the same record gives the same bytes.
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "narrowgauge",
    "svg.fonttype": "path",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    # Names come from records: a `$` in one is a `$`, and no formula that may fail to parse.
    "text.parse_math": False,
}


def looks() -> Iterator[tuple[str, str]]:
    """A colour and a marker for one thing after the other, no two of 64 the same."""
    for number in itertools.count():
        again, place = divmod(number, len(COLOURS))
        yield COLOURS[place], MARKERS[(place + again) % len(MARKERS)]


def heading(picture: Figure, text: str) -> None:
    """What a picture is called, in as many lines as its width asks for; it grows by all but one."""
    lines = _wrapped(picture, text, _HEADING_LETTER)
    width, height = picture.get_size_inches()
    picture.set_size_inches(width, height + _HEADING_LINE * (len(lines) - 1))
    picture.suptitle("\n".join(lines), fontsize=12, fontweight="bold", x=0.02, ha="left")


def foot(picture: Figure, *texts: str) -> None:
    """What a reader has to know of all of it, below, each text in as many lines as the width asks
    for."""
    lines = [line for text in texts for line in _wrapped(picture, text, _FOOT_LETTER)]
    picture.supxlabel("\n".join(lines), fontsize=8, x=0.02, ha="left")


def _wrapped(picture: Figure, text: str, letter: float) -> list[str]:
    room = int(0.96 * picture.get_size_inches()[0] / letter)
    return textwrap.wrap(text, max(room, 12)) or [""]


def write_pictures(pictures: Iterable[tuple[str, Figure]], folder: Path) -> Iterator[Path]:
    """Write each picture as SVG and PNG; the files, as they are made. Pictures that are made as
    they are asked for get the style. Raises OSError."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with mpl.rc_context(_STYLE):
        for name, picture in pictures:
            FigureCanvasAgg(picture)
            for suffix, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
                path = folder / f"{name}.{suffix}"
                picture.savefig(path, dpi=_DPI, metadata=metadata)
                yield path
