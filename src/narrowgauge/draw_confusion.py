"""Confusion matrices: side files read and checked, and painted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge.side_files import side_file
from narrowgauge.store import RunFolder
from narrowgauge_contract.drawing import Drawing
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.outcome import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Matrix", "added", "matrix_size", "paint_matrix", "read_matrix"]


@dataclass(frozen=True)
class Matrix:
    """`counts[i][j]`: how many of class i were taken for class j."""

    labels: Sequence[str]
    counts: Sequence[Sequence[int]]


def read_matrix(row: Row, name: str, folder: RunFolder) -> Matrix | None:
    """The row's matrix; None where it has none. Raises DamagedRecordError."""
    path = side_file(row, name, folder)
    if path is None:
        return None
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        found = Matrix(body["labels"], body["counts"])
        size = len(found.labels)
        square = [len(line) for line in found.counts] == [size] * size
    except (ValueError, KeyError, TypeError):
        square = False
    if not square:
        raise DamagedRecordError(f"the side file {path} holds no square matrix")
    return found


def added(matrices: Sequence[Matrix]) -> Matrix:
    """The counts of all of them together; their labels are the same."""
    labels = matrices[0].labels
    size = range(len(labels))
    return Matrix(labels, [[sum(m.counts[i][j] for m in matrices) for j in size] for i in size])


def matrix_size(matrix: Matrix) -> tuple[float, float]:
    """Width and height in inches."""
    size = len(matrix.labels)
    return 2.2 + 0.55 * size, 1.8 + 0.5 * size


def paint_matrix(picture: Figure, matrix: Matrix, drawing: Drawing) -> None:
    """Colour by the share of the true class, so that classes of unlike size compare."""
    labels, size = list(matrix.labels), len(matrix.labels)
    panel = picture.subplots()
    shares = [[count / max(sum(line), 1) for count in line] for line in matrix.counts]
    # A root makes the rare mistakes visible beside a diagonal near 1.
    image = panel.imshow([[math.sqrt(s) for s in line] for line in shares], cmap="Blues",
                         vmin=0.0, vmax=1.0)  # fmt: skip
    for i, line in enumerate(matrix.counts):
        for j, count in enumerate(line):
            if count:
                dark = shares[i][j] > 0.35
                panel.text(j, i, str(count), ha="center", va="center", fontsize=8,
                           color="white" if dark else "#202020")  # fmt: skip
    panel.set_xticks(range(size), labels, rotation=0 if max(map(len, labels)) < 4 else 45,
                     ha="center" if max(map(len, labels)) < 4 else "right")  # fmt: skip
    panel.set_yticks(range(size), labels)
    panel.set_xlabel(drawing.x or "predicted")
    panel.set_ylabel(drawing.y or "true")
    panel.grid(visible=False)
    panel.spines[:].set_visible(False)
    bar = picture.colorbar(image, ax=panel, shrink=0.8, label="share of the true class")
    ticks = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)
    bar.set_ticks([math.sqrt(t) for t in ticks], labels=[f"{t:g}" for t in ticks])
