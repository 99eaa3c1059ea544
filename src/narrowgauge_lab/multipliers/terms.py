"""Products of a table as sums of few exact 8-bit products, and the proof that they are.

The kernels' `Term` masks both operands, which they do as they load them. A `Factored` term looks
both operands up in a list of 256 first: more multipliers have that form, and codes can be looked up
before an exact 8-bit product takes them. Every Term is a Factored one as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np

from narrowgauge_kernels.codes import Term
from narrowgauge_lab.multipliers.table import CODES, Table, codes

__all__ = [
    "Factored",
    "Proof",
    "Term",
    "factor_type",
    "factored",
    "masked",
    "prove",
    "term_fact",
    "term_text",
    "total",
]

_INT32 = np.iinfo(np.int32)
#: What a factor may be held in, the first that does.
_TYPES = {"int8": (-128, 127), "uint8": (0, 255)}


@dataclass(frozen=True)
class Factored:
    """coefficient · a_values[a] · b_values[b], with 256 values a side in the order of a table's
    rows and columns; a side's values fit int8, or else uint8 (`factor_type`)."""

    coefficient: int
    a_values: Tuple[int, ...]
    b_values: Tuple[int, ...]

    def to_fact(self) -> Dict[str, Any]:
        return {
            "coefficient": self.coefficient,
            "a_values": list(self.a_values),
            "b_values": list(self.b_values),
        }


@dataclass(frozen=True)
class Proof:
    """How many of a table's pairs were multiplied both ways, and how many came out otherwise."""

    checked_pairs: int
    mismatches: int

    @property
    def holds(self) -> bool:
        return self.checked_pairs == CODES * CODES and self.mismatches == 0


def term_fact(term: Term) -> Dict[str, Any]:
    """For a record."""
    return {
        "a_mask": f"0x{term.a_mask & 0xFF:02x}",
        "b_mask": f"0x{term.b_mask & 0xFF:02x}",
        "coefficient": term.coefficient,
        "a_shift": term.a_shift,
        "b_shift": term.b_shift,
    }


def term_text(term: Term) -> str:
    """As a formula."""
    times = "" if term.coefficient == 1 else f"{term.coefficient}·"
    return times + "·".join(
        (_side("a", term.a_mask, term.a_shift), _side("b", term.b_mask, term.b_shift))
    )


def masked(code: np.ndarray, mask: int, shift: int, signed: bool) -> np.ndarray:
    """int64: (code & mask) >> shift, of codes as `Term` has it."""
    low = code & mask & 0xFF
    kept = np.where(low >= CODES // 2, low - CODES, low) if signed else low
    shifted: np.ndarray = kept >> shift
    return shifted


def factored(term: Term, a_signed: bool, b_signed: bool) -> Factored:
    """The same with a list for each mask."""
    a = masked(codes(a_signed), term.a_mask, term.a_shift, a_signed)
    b = masked(codes(b_signed), term.b_mask, term.b_shift, b_signed)
    return Factored(term.coefficient, tuple(a.tolist()), tuple(b.tolist()))


def factor_type(values: Sequence[int]) -> Optional[str]:
    """ "int8" or "uint8"; None where neither holds them all."""
    low, high = min(values), max(values)
    return next((name for name, (a, b) in _TYPES.items() if a <= low and high <= b), None)


def total(terms: Sequence[Factored]) -> np.ndarray:
    """int64 [256, 256]: what the terms add up to. Exact: see `prove` for what keeps it so."""
    found = np.zeros((CODES, CODES), dtype=np.int64)
    for term in terms:
        a, b = (np.array(side, dtype=np.int64) for side in (term.a_values, term.b_values))
        found += term.coefficient * np.multiply.outer(a, b)
    return found


def prove(table: Table, terms: Sequence[Factored]) -> Proof:
    """Compare the terms with the table, pair by pair, in int64.

    A term that kernels could not take (a factor beyond 8 bits, a coefficient beyond 32) proves
    nothing: no pair is checked then.
    """
    sides = [side for term in terms for side in (term.a_values, term.b_values)]
    fits = all(len(side) == CODES and factor_type(side) is not None for side in sides)
    if not fits or not all(_INT32.min <= t.coefficient <= _INT32.max for t in terms):
        return Proof(0, 0)
    # 2^31 · 2^16 a term at most: int64 holds the sum of thousands.
    differing = total(terms) != table.values
    return Proof(differing.size, int(differing.sum()))


def _side(name: str, mask: int, shift: int) -> str:
    kept = name if mask & 0xFF == 0xFF else f"({name} & 0x{mask & 0xFF:02x})"
    return f"({kept} >> {shift})" if shift else kept
