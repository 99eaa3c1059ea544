"""Families of approximate multipliers of 8-bit numbers, as tables.

The unsigned ones are the published designs. A `-signed` one is, where its design is an array of
partial products (exact, truncated, broken array), the same array on two's complement operands,
whose top bits count negative; else (AMA5, Mitchell, DRUM) it multiplies magnitudes and sets the
sign, as those papers do.
"""

from __future__ import annotations

import re
from typing import Callable, Dict, Tuple

import numpy as np

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.multipliers.errors import TableError
from narrowgauge_lab.multipliers.table import Table, codes, make_table

__all__ = [
    "FAMILIES",
    "NAMES",
    "ama5",
    "ama5_4x4",
    "broken_array",
    "drum",
    "exact",
    "mitchell",
    "named",
    "truncated",
]

_BITS = 8
_SIGNED = "-signed"
#: A part of a multiplier, of which there is no signed kin.
_BLOCK = "ama5-4x4"
_Magnitudes = Callable[[np.ndarray, np.ndarray], np.ndarray]


def exact(signed: bool = False) -> Table:
    """a·b."""
    a = codes(signed)
    return _table("exact", np.multiply.outer(a, a), signed, "a·b")


def ama5(signed: bool = False) -> Table:
    """8×8 of four 4×4 blocks whose adders are approximate mirror adders of kind 5; the blocks'
    products are added exactly. With a = 16·ah + al, this closed form of the block
    m4(a, b) = (a & 1)·b + 16·(b >> 3)·(a & 14) adds up to the one below. Products take 17 bits."""
    return _by_magnitude("ama5", _ama5, signed, "four 4×4 blocks of AMA5 adders")


def ama5_4x4() -> Table:
    """The 4×4 block alone, of the operands' low four bits."""
    a, b = (side & 15 for side in _grid(False))
    values = (a & 1) * b + 16 * (b >> 3) * (a & 14)
    return make_table("ama5-4x4", values, a_signed=False, b_signed=False,
                      source="one 4×4 block of AMA5 adders", bits=4)  # fmt: skip


def truncated(columns: int, signed: bool = False) -> Table:
    """An array multiplier without the partial products of its lowest `columns` columns (0..15)."""
    _within("columns", columns, 0, 2 * _BITS - 1)
    source = f"an array without its lowest {columns} columns"
    return _table(f"truncated-{columns}", _array(0, columns, signed), signed, source)


def broken_array(rows: int, columns: int, signed: bool = False) -> Table:
    """The broken-array multiplier: without the array's first `rows` rows (of the weight's lowest
    bits; the horizontal break level, 0..8) and its lowest `columns` columns (the vertical one,
    0..15)."""
    _within("rows", rows, 0, _BITS)
    _within("columns", columns, 0, 2 * _BITS - 1)
    source = f"a broken array: horizontal break level {rows}, vertical {columns}"
    return _table(f"bam-{rows}-{columns}", _array(rows, columns, signed), signed, source)


def mitchell(signed: bool = False) -> Table:
    """Mitchell's: the antilogarithm of the sum of logarithms, both linear between powers of two."""
    return _by_magnitude("mitchell", _mitchell, signed, "Mitchell's logarithms")


def drum(bits: int, signed: bool = False) -> Table:
    """DRUM: of each operand `bits` bits (3..8) from its leading one on, the last of them set to
    make up for what is cut off."""
    _within("bits", bits, 3, _BITS)

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _leading(a, bits) * _leading(b, bits)

    return _by_magnitude(f"drum-{bits}", product, signed, f"DRUM with {bits} bits")


def _ama5(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a & 0x11) * b + 16 * (a & 0xEE) * ((b >> 3) & 0x11)


def _mitchell(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """2^(ka+kb)·(1 + xa + xb) where xa + xb < 1, else 2^(ka+kb+1)·(xa + xb): integers both."""
    top_a, top_b = 1 << _log2(a), 1 << _log2(b)
    rest = (a - top_a) * top_b + (b - top_b) * top_a  # 2^(ka+kb)·(xa + xb)
    one = top_a * top_b
    return np.where((a == 0) | (b == 0), 0, np.where(rest < one, one + rest, 2 * rest))


def _leading(a: np.ndarray, bits: int) -> np.ndarray:
    cut = np.maximum(_log2(a) + 1 - bits, 0)
    return np.where(cut > 0, ((a >> cut) | 1) << cut, a)


def _log2(a: np.ndarray) -> np.ndarray:
    """Where the leading one is; 0 for 0."""
    found = np.zeros_like(a)
    for bit in range(1, _BITS):
        found[a >> bit > 0] = bit
    return found


def _array(rows: int, columns: int, signed: bool) -> np.ndarray:
    """The sum of the partial products a_i·b_j with i + j ≥ `columns` and j ≥ `rows`."""
    a, b = _grid(signed)
    weights = [2**bit for bit in range(_BITS)]
    if signed:
        weights[-1] = -weights[-1]
    total = np.zeros((2**_BITS, 2**_BITS), dtype=np.int64)
    for j in range(rows, _BITS):
        for i in range(max(columns - j, 0), _BITS):
            total += weights[i] * weights[j] * ((a >> i) & 1) * ((b >> j) & 1)
    return total


def _grid(signed: bool) -> Tuple[np.ndarray, np.ndarray]:
    side = codes(signed)
    a, b = np.meshgrid(side, side, indexing="ij")
    return a, b


def _by_magnitude(name: str, product: _Magnitudes, signed: bool, source: str) -> Table:
    a, b = _grid(signed)
    values = np.sign(a) * np.sign(b) * product(np.abs(a), np.abs(b))
    return _table(name, values, signed, source + (", of magnitudes" if signed else ""))


def _table(name: str, values: np.ndarray, signed: bool, source: str) -> Table:
    word = name + (_SIGNED if signed else "")
    return make_table(word, values, a_signed=signed, b_signed=signed, source=source)


def _within(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise TableError(f"{what} = {value} is not from {least} to {most}")


_Maker = Callable[..., Table]

#: What the words of a name mean: the pattern without `-signed`, and what makes the table of its
#: numbers.
_PATTERNS: Dict[str, _Maker] = {
    r"exact": exact,
    r"ama5": ama5,
    r"truncated-(\d+)": truncated,
    r"bam-(\d+)-(\d+)": broken_array,
    r"mitchell": mitchell,
    r"drum-(\d+)": drum,
}
#: How names look, for messages and lists.
FAMILIES = (
    "exact", "ama5", "ama5-4x4", "truncated-COLUMNS", "bam-ROWS-COLUMNS", "mitchell", "drum-BITS",
)  # fmt: skip
_USUAL = (
    "exact", "ama5", "ama5-4x4", "truncated-2", "truncated-4", "truncated-6", "truncated-8",
    "bam-2-4", "bam-3-6", "bam-6-3", "mitchell", "drum-3", "drum-4", "drum-5", "drum-6",
)  # fmt: skip
#: The tables that are listed; numbers other than theirs work too.
NAMES: Tuple[str, ...] = (
    *_USUAL,
    *(name + _SIGNED for name in _USUAL if name != _BLOCK),
)


def named(name: str) -> Table:
    """The table of that name: one of NAMES, or with other numbers.

    Raises UnknownNameError, which names the nearest, and TableError for numbers out of range.
    """
    if name == _BLOCK:
        return ama5_4x4()
    signed = name.endswith(_SIGNED)
    word = name[: -len(_SIGNED)] if signed else name
    for pattern, make in _PATTERNS.items():
        found = re.fullmatch(pattern, word)
        if found:
            return make(*(int(number) for number in found.groups()), signed=signed)
    raise UnknownNameError("multiplier", name, NAMES)
