"""How all pictures look, and how they are written: the same values give the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "write_pictures"]

#: Okabe and Ito's colours, told apart by colour-blind readers as well, in an order of contrast.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
_DPI = 150
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
