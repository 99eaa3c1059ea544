"""How far a table is from exact products, over all pairs of operands, each counted once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, Tuple

import numpy as np

from narrowgauge_lab.multipliers.table import CODES, Table

__all__ = ["ErrorStatistics", "error_blocks", "error_statistics"]


@dataclass(frozen=True)
class ErrorStatistics:
    """The literature's measures of the error table[a, b] - a·b.

    `er`: the share of pairs that are wrong. `med`: the mean of |error|; `nmed`: that over the
    largest |a·b|. `mred`: the mean of |error| / |a·b| over pairs where a·b is not 0. `worst`: the
    largest |error|. `bias`: the mean error. `symmetric`: whether operands commute.
    """

    er: float
    med: float
    nmed: float
    mred: float
    worst: int
    bias: float
    exact_pairs: int
    symmetric: bool

    def to_fact(self) -> Dict[str, Any]:
        return asdict(self)


def error_statistics(table: Table) -> ErrorStatistics:
    """All of them; of operands with fewer bits, over those operands."""
    exact, error = _exact_and_error(table)
    size = np.abs(error)
    there = exact != 0
    values = table.values[: len(error), : len(error)]
    return ErrorStatistics(
        er=float((error != 0).mean()),
        med=float(size.mean()),
        nmed=float(size.mean() / np.abs(exact).max()),
        mred=float((size[there] / np.abs(exact[there])).mean()),
        worst=int(size.max()),
        bias=float(error.mean()),
        exact_pairs=int((error == 0).sum()),
        symmetric=table.a_signed == table.b_signed and bool((values == values.T).all()),
    )


def error_blocks(table: Table, blocks: int = 16) -> np.ndarray:
    """float64 [blocks, blocks]: the mean |error| of neighbouring operands, activations downwards.

    `blocks` divides the number of operands.
    """
    _, error = _exact_and_error(table)
    side = len(error) // blocks
    grouped: np.ndarray = np.abs(error).reshape(blocks, side, blocks, side).mean(axis=(1, 3))
    return grouped


def _exact_and_error(table: Table) -> Tuple[np.ndarray, np.ndarray]:
    """int64, over the operands that there are."""
    count = CODES >> (8 - table.bits)
    exact = table.exact()[:count, :count]
    return exact, table.values[:count, :count].astype(np.int64) - exact
