"""A table of all products of two 8-bit numbers: what an approximate multiplier is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from narrowgauge_lab.multipliers.errors import TableError

__all__ = ["CODES", "Table", "codes", "make_table"]

#: Codes of an operand.
CODES = 256
_INT32 = np.iinfo(np.int32)
_INT16 = np.iinfo(np.int16)


@dataclass(frozen=True, eq=False)
class Table:
    """`values` (int32, [256, 256], not writable) has at [a + 128·a_signed, b + 128·b_signed] what
    is taken for a·b. Operands do not commute: a is the activation, b the weight.

    `source` says where it comes from, for a record. `bits` is how many bits of the operands count,
    8 but for parts of multipliers: of fewer, the table repeats itself.
    """

    name: str
    values: np.ndarray
    a_signed: bool
    b_signed: bool
    source: str
    bits: int = 8

    def exact(self) -> np.ndarray:
        """int64 [256, 256]: what the table stands for."""
        a, b = codes(self.a_signed), codes(self.b_signed)
        if self.bits < 8:
            a, b = a & (2**self.bits - 1), b & (2**self.bits - 1)
        return np.multiply.outer(a, b)

    def fits_int16(self) -> bool:
        """Whether kernels may keep its products in 16 bits."""
        return bool(self.values.min() >= _INT16.min and self.values.max() <= _INT16.max)

    def sha256(self) -> str:
        """Of values and signs: tables of one multiplier are one, whatever they are called."""
        head = f"{int(self.a_signed)}{int(self.b_signed)}:".encode("ascii")
        return hashlib.sha256(head + self.values.astype("<i4").tobytes()).hexdigest()


def codes(signed: bool) -> np.ndarray:
    """int64 [256]: an operand's codes in the order of rows and columns."""
    return np.arange(CODES, dtype=np.int64) - (CODES // 2 if signed else 0)


def make_table(
    name: str, values: np.ndarray, *, a_signed: bool, b_signed: bool, source: str, bits: int = 8
) -> Table:
    """A table of any integers that fit int32. Raises TableError, which says what does not."""
    found = np.asarray(values)
    if found.shape != (CODES, CODES):
        raise TableError(
            f"the table '{name}' has shape {list(found.shape)}, not [256, 256]",
            why="it has a row for every code of the activation and a column for the weight's",
            next_step="values[a, b] from a = 0 to 255, or from -128 to 127 where it is signed",
        )
    if found.dtype.kind not in "iu":
        raise TableError(
            f"the table '{name}' is of {found.dtype}, not of integers",
            why="products of codes are added exactly, as integers",
            next_step="round it first: values.round().astype('int32')",
        )
    low, high = int(found.min()), int(found.max())
    if low < _INT32.min or high > _INT32.max:
        raise TableError(
            f"the table '{name}' has products from {low} to {high}, which int32 does not hold",
            why="a product of two 8-bit numbers has 16 bits, and kernels hold 32",
        )
    kept = np.array(found, dtype=np.int32, order="C")
    kept.setflags(write=False)
    return Table(name, kept, a_signed, b_signed, source, bits)
