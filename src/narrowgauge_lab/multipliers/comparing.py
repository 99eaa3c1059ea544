"""Two multipliers beside each other: how far apart their products are, pair by pair."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, Optional

import numpy as np

from narrowgauge_lab.multipliers.statistics import error_blocks
from narrowgauge_lab.multipliers.table import CODES, Table

__all__ = ["Difference", "difference", "error_difference"]


@dataclass(frozen=True)
class Difference:
    """Over all pairs of operands: `pairs` that two tables have different products for, their
    `share`, and the `mean` and the `largest` |difference| of all products."""

    pairs: int
    share: float
    mean: float
    largest: int

    def to_fact(self) -> Dict[str, Any]:
        return asdict(self)


def difference(first: Table, second: Table) -> Optional[Difference]:
    """None where their operands are not the same: other signs, or another number of bits."""
    if _operands(first) != _operands(second):
        return None
    count = CODES >> (8 - first.bits)
    one, other = (table.values[:count, :count].astype(np.int64) for table in (first, second))
    size = np.abs(one - other)
    return Difference(
        pairs=int((size != 0).sum()),
        share=float((size != 0).mean()),
        mean=float(size.mean()),
        largest=int(size.max()),
    )


def error_difference(first: Table, second: Table, blocks: int = 16) -> Optional[np.ndarray]:
    """float64 [blocks, blocks]: the second's `error_blocks` less the first's, so that below 0 the
    second is nearer to exact products; None as in `difference`."""
    if _operands(first) != _operands(second):
        return None
    found: np.ndarray = error_blocks(second, blocks) - error_blocks(first, blocks)
    return found


def _operands(table: Table) -> Any:
    return table.a_signed, table.b_signed, table.bits
