"""Tables of low rank as sums of few products of integer factors, P[a, b] = Σ_r f_r(a)·g_r(b).

The rows of a table make a lattice of integers. A basis of it, reduced (Lenstra, Lenstra, Lovász) so
that its vectors are short, gives the g_r, and how each row is made of the basis the f_r: integers
by construction. What then does not fit 8 bits is split in two. As few terms as the table's rank is
what one gets where everything fits; no fewer are possible in any form.
"""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from math import gcd
from typing import List, Optional, Sequence, Tuple

import numpy as np

from narrowgauge_lab.multipliers.terms import Factored, factor_type

__all__ = ["factorise", "rank_at_least"]

#: The largest prime below 2^31: products of residues fit int64.
_PRIME = 2**31 - 1
#: Digits of what does not fit 8 bits.
_DIGIT = 256
#: Lovász's condition.
_DELTA = Fraction(3, 4)

_Vector = List[int]


def rank_at_least(values: np.ndarray) -> int:
    """The rank of an integer matrix modulo a prime: never more than its rank."""
    return len(_independent_columns(values))


def _independent_columns(values: np.ndarray) -> List[int]:
    """As many as there are modulo the prime: independent over the rationals too."""
    rest = values.astype(np.int64) % _PRIME
    chosen: List[int] = []
    for column in range(rest.shape[1]):
        done = len(chosen)
        there = np.flatnonzero(rest[done:, column])
        if not len(there):
            continue
        pivot = done + int(there[0])
        rest[[done, pivot]] = rest[[pivot, done]]
        inverse = pow(int(rest[done, column]), _PRIME - 2, _PRIME)
        rest[done] = rest[done] * inverse % _PRIME
        below = rest[done + 1 :]
        below -= below[:, column : column + 1] * rest[done] % _PRIME
        below %= _PRIME
        chosen.append(column)
        if len(chosen) == len(rest):
            break
    return chosen


def factorise(values: np.ndarray, most: int) -> Optional[Tuple[Factored, ...]]:
    """At most `most` terms that add up to the integer matrix [256, 256], or None.

    Tries rows and columns, whichever basis has fewer terms. What it gives is still to be proved.
    """
    rank = rank_at_least(values)
    best: Optional[List[Factored]] = None
    for turned in (False, True) if rank <= most else ():
        terms = _by_rows(values.T if turned else values, most)
        if terms is not None and (best is None or len(terms) < len(best)):
            best = [_turned(term) for term in terms] if turned else terms
        if best is not None and len(best) <= rank:
            break
    return None if best is None else tuple(best)


def _turned(term: Factored) -> Factored:
    return Factored(term.coefficient, term.b_values, term.a_values)


def _by_rows(values: np.ndarray, most: int) -> Optional[List[Factored]]:
    """With g from the lattice of the rows. Rows are told apart by as few columns as the rank, so
    the basis is made of those and then continued to all."""
    columns = _independent_columns(values)
    if not columns:
        return []
    narrow = values[:, columns].astype(object)
    rows = _independent_columns(values[:, columns].T)
    lattice: List[_Vector] = []
    for row in np.unique(values[:, columns], axis=0):
        _insert(lattice, [int(each) for each in row])
    basis = np.array(lattice, dtype=object)
    onward, scale = _inverse(narrow[rows])
    wide = basis @ onward @ values[rows].astype(object) // scale
    reduction = _reduction(wide)
    back, scale = _inverse(reduction @ basis)
    return _terms(narrow @ back // scale, reduction @ wide, most)


def _terms(f: np.ndarray, g: np.ndarray, most: int) -> Optional[List[Factored]]:
    terms: List[Factored] = []
    for number in range(len(g)):
        terms += _fitting(f[:, number].tolist(), g[number].tolist())
        if len(terms) > most:
            return None
    return terms if all(abs(term.coefficient) < 2**31 for term in terms) else None


def _insert(basis: List[_Vector], row: _Vector) -> None:
    """Euclid's algorithm at each leading entry, keeping the basis in order of where these are."""
    at = 0
    while True:
        lead = _lead(row)
        if lead is None:
            return
        while at < len(basis) and (_lead(basis[at]) or 0) < lead:
            at += 1
        if at == len(basis) or _lead(basis[at]) != lead:
            basis.insert(at, row)
            _tidy(basis, at)
            return
        while row[lead]:
            times = basis[at][lead] // row[lead]
            basis[at] = [x - times * y for x, y in zip(basis[at], row)]
            basis[at], row = row, basis[at]
        _tidy(basis, at)


def _tidy(basis: List[_Vector], at: int) -> None:
    """Keep entries above a leading one below it, or they would grow and grow."""
    lead = _lead(basis[at]) or 0
    for above in range(at):
        times = basis[above][lead] // basis[at][lead]
        if times:
            basis[above] = [x - times * y for x, y in zip(basis[above], basis[at])]


def _lead(row: Sequence[int]) -> Optional[int]:
    return next((at for at, value in enumerate(row) if value), None)


def _reduction(vectors: np.ndarray) -> np.ndarray:
    """Lenstra, Lenstra and Lovász's algorithm: integers [n, n], as objects, by which to multiply n
    vectors so that they are short. It needs their scalar products only, in exact arithmetic."""
    size = len(vectors)
    made = np.array([[int(i == j) for j in range(size)] for i in range(size)], dtype=object)
    gram = vectors @ vectors.T
    at = 1
    while at < size:
        mu, norms = _projections(gram, at)
        for other in range(at - 1, -1, -1):
            times = round(mu[at][other])
            if times:
                made[at] -= times * made[other]
                gram[at] -= times * gram[other]
                gram[:, at] -= times * gram[:, other]
                for j in range(other):
                    mu[at][j] -= times * mu[other][j]
                mu[at][other] -= times
        if norms[at] >= (_DELTA - mu[at][at - 1] ** 2) * norms[at - 1]:
            at += 1
        else:
            swapped = [at, at - 1]
            made[[at - 1, at]] = made[swapped]
            gram[[at - 1, at]] = gram[swapped]
            gram[:, [at - 1, at]] = gram[:, swapped]
            at = max(at - 1, 1)
    return made


def _projections(gram: np.ndarray, at: int) -> Tuple[List[List[Fraction]], List[Fraction]]:
    """Of the vectors up to `at`: their Gram-Schmidt coefficients, and the squared lengths."""
    mu: List[List[Fraction]] = []
    norms: List[Fraction] = []
    for i in range(at + 1):
        row: List[Fraction] = []
        for j in range(i):
            known = sum((mu[j][k] * row[k] * norms[k] for k in range(j)), Fraction())
            row.append((gram[i, j] - known) / norms[j])
        mu.append(row)
        norms.append(gram[i, i] - sum((row[k] ** 2 * norms[k] for k in range(i)), Fraction()))
    return mu, norms


def _inverse(square: np.ndarray) -> Tuple[np.ndarray, int]:
    """(integers, what they are to be divided by), of a matrix of integers that has an inverse, by
    Gauss and Jordan."""
    size = len(square)
    rows = [[Fraction(int(each)) for each in row] + [Fraction(i == j) for j in range(size)]
            for i, row in enumerate(square)]  # fmt: skip
    for at in range(size):
        pivot = next(i for i in range(at, size) if rows[i][at])
        rows[at], rows[pivot] = rows[pivot], rows[at]
        rows[at] = [value / rows[at][at] for value in rows[at]]
        for i in range(size):
            if i != at and rows[i][at]:
                times = rows[i][at]
                rows[i] = [x - times * y for x, y in zip(rows[i], rows[at])]
    found = [row[size:] for row in rows]
    scale = reduce(_common_multiple, (value.denominator for row in found for value in row), 1)
    return np.array([[int(value * scale) for value in row] for row in found], dtype=object), scale


def _common_multiple(a: int, b: int) -> int:
    return a * b // gcd(a, b)


def _fitting(f: _Vector, g: _Vector) -> List[Factored]:
    """f·g as terms that fit: what all values of a side share goes into the coefficient, and what is
    beyond 8 bits then is split into digits."""
    f_content, g_content = reduce(gcd, f), reduce(gcd, g)
    if not f_content or not g_content:
        return []
    coefficient = f_content * g_content
    return [
        Factored(coefficient * f_scale * g_scale, f_part, g_part)
        for f_scale, f_part in _digits([value // f_content for value in f])
        for g_scale, g_part in _digits([value // g_content for value in g])
    ]


def _digits(values: _Vector) -> List[Tuple[int, Tuple[int, ...]]]:
    """(scale, values that fit 8 bits), which add up to the values."""
    scale, found = 1, []
    while any(values):
        for part in (values, [-value for value in values]):
            if factor_type(part) is not None:
                sign = 1 if part is values else -1
                return [*found, (sign * scale, tuple(part))]
        low = [(value + _DIGIT // 2) % _DIGIT - _DIGIT // 2 for value in values]
        if any(low):
            found.append((scale, tuple(low)))
        values = [(value - rest) // _DIGIT for value, rest in zip(values, low)]
        scale *= _DIGIT
    return found
