"""Products that are bilinear in the operands' bits: P = Σ c_ij·a_i·b_j, as few masked products.

With the bits' weights taken out, d_ij = c_ij / (w_i·w_j), the exact product is a matrix of ones,
and a masked product coefficient·(a & m)·(b & m') a rectangle (not of neighbours: any rows by any
columns) of `coefficient`. So what is looked for are few rectangles that add up to d. Their number
is at least the rank of d, which is how one knows that fewer are not to be had.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from narrowgauge_lab.multipliers.table import Table, codes
from narrowgauge_lab.multipliers.terms import Term

__all__ = ["bit_coefficients", "mask_terms", "matrix_rank", "relative"]

_BITS = range(8)
#: How many rectangles the search for the fewest takes away at most.
_BUDGET = 1000
#: Coefficients of the search are multiples of 1 / this.
_PARTS = 16
#: What counts as equal in the search.
_NEAR = 1e-6
#: Every set of bits but the empty one, as zeros and ones.
_EVERY = ((np.arange(1, 256)[:, None] >> np.arange(8)) & 1).astype(np.float64)

_Row = Tuple[Fraction, ...]
_Matrix = Tuple[_Row, ...]


@dataclass(frozen=True)
class _Rectangle:
    """`value` in the rows and columns whose bits are set."""

    rows: int
    columns: int
    value: Fraction


def bit_coefficients(table: Table) -> Optional[np.ndarray]:
    """int64 [8, 8], c of a table that is bilinear in its operands' bits; None where it is not.

    Operands with one bit give c, and all pairs are compared with what follows from it.
    """
    values = table.values.astype(np.int64)
    a_bits, b_bits = (_bits(signed) for signed in (table.a_signed, table.b_signed))
    rows = [_single(bit, table.a_signed) for bit in _BITS]
    columns = [_single(bit, table.b_signed) for bit in _BITS]
    found: np.ndarray = values[np.ix_(rows, columns)]
    return found if bool((a_bits @ found @ b_bits.T == values).all()) else None


def relative(coefficients: np.ndarray, a_signed: bool, b_signed: bool) -> _Matrix:
    """d: the coefficients over the weights of both bits; the exact product's are all one."""
    a, b = (_weights(signed) for signed in (a_signed, b_signed))
    return tuple(
        tuple(Fraction(int(coefficients[i, j]), a[i] * b[j]) for j in _BITS) for i in _BITS
    )


def matrix_rank(matrix: Sequence[Sequence[Fraction]]) -> int:
    """Over the rationals, exactly."""
    rows = [list(row) for row in matrix]
    rank = 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            times = rows[i][column] / rows[rank][column]
            rows[i] = [x - times * y for x, y in zip(rows[i], rows[rank])]
        rank += 1
    return rank


def mask_terms(matrix: _Matrix) -> Optional[Tuple[Term, ...]]:
    """Few masked products whose relative coefficients these are; None where a coefficient is a
    fraction that no shift makes.

    As few as the rank of the matrix wherever the search finds that many, and never more than
    gathering equal parts of rows, or of columns, gives.
    """
    candidates = [_gathered(matrix), _turned(_gathered(_transposed(matrix)))]
    if min(map(len, candidates)) > matrix_rank(matrix):
        independent = _independent(matrix)
        candidates += [independent] if independent is not None else []
    made = [_terms(each) for each in sorted(candidates, key=len)]
    return next((terms for terms in made if terms is not None), None)


def _bits(signed: bool) -> np.ndarray:
    """int64 [256, 8]: the bits of all codes."""
    return (codes(signed)[:, None] >> np.arange(8)) & 1


def _single(bit: int, signed: bool) -> int:
    """Where the code is that has this bit alone."""
    code = 1 << bit
    return (code + 128) % 256 if signed else code


def _weights(signed: bool) -> List[int]:
    return [-(1 << bit) if signed and bit == 7 else 1 << bit for bit in _BITS]


def _gathered(matrix: _Matrix) -> List[_Rectangle]:
    """A rectangle for each set of columns that have one value in a row, over all such rows."""
    rows: Dict[Tuple[int, Fraction], int] = {}
    for i, row in enumerate(matrix):
        for value in {value for value in row if value}:
            key = (_support(row, value), value)
            rows[key] = rows.get(key, 0) | 1 << i
    return [_Rectangle(chosen, columns, value) for (columns, value), chosen in rows.items()]


def _support(row: _Row, value: Fraction) -> int:
    return sum(1 << j for j, each in enumerate(row) if each == value)


def _transposed(matrix: _Matrix) -> _Matrix:
    return tuple(zip(*matrix))


def _turned(found: Sequence[_Rectangle]) -> List[_Rectangle]:
    return [_Rectangle(each.columns, each.rows, each.value) for each in found]


def _independent(matrix: _Matrix) -> Optional[List[_Rectangle]]:
    """As many rectangles as the matrix has rank, or None where there are none, or too many to try.

    The search is in floating point; what it finds is checked in fractions.
    """
    d = np.array([[float(value) for value in row] for row in matrix])
    found = _Peeling().run(d, matrix_rank(matrix))
    return found if found is not None and _adds_up(found, matrix) else None


class _Peeling:
    """Takes away one rectangle after the other, each of which leaves one rank less.

    Wedderburn: d - c·s·tᵀ has one rank less than d where s is in the space of d's columns, t in
    that of its rows, and c = 1 / (tᵀ·d⁺·s). So few pairs of sets qualify that all can be tried, of
    those that cover one row which something has to cover.
    """

    def __init__(self) -> None:
        self._left = _BUDGET

    def run(self, d: np.ndarray, rank: int) -> Optional[List[_Rectangle]]:
        if rank == 0:
            return [] if np.abs(d).max() < _NEAR else None
        self._left -= 1
        if self._left < 0:
            return None
        for c, s, t in _that_lower_rank(d, rank):
            rest = self.run(d - c * np.multiply.outer(s, t), rank - 1)
            if rest is not None:
                return [_Rectangle(_mask(s), _mask(t), Fraction(round(c * _PARTS), _PARTS)), *rest]
        return None


def _that_lower_rank(d: np.ndarray, rank: int) -> List[Tuple[float, np.ndarray, np.ndarray]]:
    """(coefficient, rows, columns), of one and of many cells first, all of which cover some row."""
    u, size, vt = np.linalg.svd(d)
    if size[rank - 1] < _NEAR:
        return []
    rows, columns = _sets_in(u[:, :rank].T), _sets_in(vt[:rank])
    inverse = vt[:rank].T @ np.diag(1 / size[:rank]) @ u[:, :rank].T
    product = rows @ inverse.T @ columns.T
    c = 1 / np.where(np.abs(product) > _NEAR, product, np.inf)
    good = (c != 0) & (np.abs(c * _PARTS - np.round(c * _PARTS)) < _NEAR)
    covering = [
        (int(good[rows[:, i] > 0].sum()), i) for i in range(8) if np.abs(d[i]).max() > _NEAR
    ]
    row = min(covering)[1] if covering else 0
    pairs = np.argwhere(good & (rows[:, row : row + 1] > 0))
    found = [(float(c[i, j]), rows[i], columns[j]) for i, j in pairs]
    return sorted(found, key=lambda each: (each[0] != 1, -each[1].sum() * each[2].sum()))


def _sets_in(space: np.ndarray) -> np.ndarray:
    """Every vector of zeros and ones, but that of zeros, in the space of orthonormal vectors."""
    found: np.ndarray = _EVERY[np.abs(_EVERY - _EVERY @ space.T @ space).max(axis=1) < _NEAR]
    return found


def _mask(there: np.ndarray) -> int:
    return sum(1 << j for j in _BITS if there[j])


def _adds_up(found: Sequence[_Rectangle], matrix: _Matrix) -> bool:
    return all(
        sum((r.value for r in found if r.rows >> i & 1 and r.columns >> j & 1), Fraction()) == value
        for i, row in enumerate(matrix)
        for j, value in enumerate(row)
    )


def _terms(found: Sequence[_Rectangle]) -> Optional[Tuple[Term, ...]]:
    """None where a value is no integer once the operands are shifted as far as their masks go."""
    terms = [_term(each) for each in found]
    if any(term is None for term in terms):
        return None
    kept = [term for term in terms if term is not None]
    return tuple(sorted(kept, key=lambda t: (-t.a_mask, -t.b_mask)))


def _term(found: _Rectangle) -> Optional[Term]:
    """With integer values no shift is needed; a half, a quarter, … takes one of the lowest bits,
    which a mask must leave empty."""
    shift = found.value.denominator.bit_length() - 1
    a_shift = min(shift, _lowest(found.rows))
    b_shift = shift - a_shift
    coefficient = found.value * (1 << shift)
    if b_shift > _lowest(found.columns) or coefficient.denominator != 1:
        return None
    return Term(found.rows, found.columns, int(coefficient), a_shift, b_shift)


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
