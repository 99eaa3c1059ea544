"""What form a multiplier's products have, found and proved: whether exact 8-bit products make them.

    structure = analyse(named("truncated-4-signed"))
    structure.kind, structure.terms      # "bilinear": few masked exact products, added up

A convolution by such a table is, bit for bit, an exact one whose channels are that many times as
many. Nothing is taken on trust: whatever the search came by, its terms are multiplied out over all
65,536 pairs and compared, and what does not stand that is of kind "none".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from narrowgauge_lab.multipliers.bits import bit_coefficients, mask_terms, relative
from narrowgauge_lab.multipliers.lowrank import factorise, rank_at_least
from narrowgauge_lab.multipliers.table import CODES, Table, codes
from narrowgauge_lab.multipliers.terms import Factored, Term, factored, prove, term_fact

__all__ = ["BILINEAR", "LOW_RANK", "MOST_TERMS", "NONE", "Structure", "analyse"]

BILINEAR = "bilinear"
LOW_RANK = "low-rank"
NONE = "none"
#: More terms than these are no gain over the table itself.
MOST_TERMS = 8


@dataclass(frozen=True)
class Structure:
    """What `analyse` found of a table.

    `kind`: "bilinear", in the operands' bits, as `terms`; "low-rank", as `factors`, which are lists
    to look operands up in; "none". `factors` has the bilinear ones too. `rank` is the table's as a
    matrix modulo a prime: no sum of products has fewer terms, so `fewest`, where as many were
    found, is proved as well. `proved`: the terms gave the table at all of `checked_pairs`; a kind
    other than "none" always is. `evidence` is for a record.
    """

    kind: str
    terms: Tuple[Term, ...] = ()
    factors: Tuple[Factored, ...] = ()
    rank: int = 0
    proved: bool = False
    checked_pairs: int = 0
    evidence: Dict[str, Any] = field(default_factory=dict)

    @property
    def fewest(self) -> bool:
        return self.proved and len(self.factors) <= max(self.rank, 1)

    def to_fact(self) -> Dict[str, Any]:
        """For a record: the proof, and the terms it is about."""
        return {
            "kind": self.kind,
            "terms": self._terms(),
            "rank": self.rank,
            "fewest": self.fewest,
            "proved": self.proved,
            "checked_pairs": self.checked_pairs,
            **self.evidence,
        }

    def _terms(self) -> List[Dict[str, Any]]:
        masks = [term_fact(term) for term in self.terms]
        return masks or [each.to_fact() for each in self.factors]


def analyse(table: Table, most_terms: int = MOST_TERMS) -> Structure:
    """Find at most `most_terms` exact products that make the table, and prove that they do.

    Masks come first, since kernels apply them for nothing: unless lists need less than half as many
    terms. About 0.1 s where there is something to be found, and less where there is not.
    """
    values = table.values.astype(np.int64)
    rank = rank_at_least(values)
    evidence: Dict[str, Any] = {"table_sha256": table.sha256()}
    terms = _bilinear(table, evidence)
    best = len(terms) if terms is not None else None
    if best is None or best > max(2 * rank, 1):
        lists = _low_rank(table, values, rank, most_terms)
        if lists is not None and (best is None or 2 * len(lists) < best or best > most_terms):
            return _proved(table, LOW_RANK, (), lists, rank, evidence)
    if terms is None or len(terms) > most_terms:
        evidence["why"] = _why(terms, rank, most_terms)
        return Structure(NONE, rank=rank, evidence=evidence)
    lists = tuple(factored(term, table.a_signed, table.b_signed) for term in terms)
    return _proved(table, BILINEAR, terms, lists, rank, evidence)


def _bilinear(table: Table, evidence: Dict[str, Any]) -> Optional[Tuple[Term, ...]]:
    """The masked products of a table that is bilinear in bits; its coefficients as evidence."""
    coefficients = bit_coefficients(table)
    if coefficients is None:
        return None
    matrix = relative(coefficients, table.a_signed, table.b_signed)
    evidence["bit_coefficients"] = coefficients.tolist()
    evidence["zero_one"] = all(value in (0, 1) for row in matrix for value in row)
    terms = mask_terms(matrix)
    # A table of zeros: one product that is zero spares everyone the case of no product at all.
    return (Term(0, 0),) if terms == () else terms


def _low_rank(
    table: Table, values: np.ndarray, rank: int, most: int
) -> Optional[Tuple[Factored, ...]]:
    """Of the table itself, or of the exact product and its error, whichever has fewer terms."""
    if rank > most:
        return None
    found = factorise(values, most)
    if found is not None and len(found) <= rank:
        return found
    # An error may fit 8 bits where the products do not.
    exact = factored(Term(0xFF, 0xFF), table.a_signed, table.b_signed)
    a, b = codes(table.a_signed), codes(table.b_signed)
    error = factorise(values - np.multiply.outer(a, b), most - 1)
    if error is not None and (found is None or len(error) + 1 < len(found)):
        return (exact, *error)
    return found


def _proved(
    table: Table,
    kind: str,
    terms: Tuple[Term, ...],
    lists: Sequence[Factored],
    rank: int,
    evidence: Dict[str, Any],
) -> Structure:
    """Of that kind where the proof holds, and else of none."""
    proof = prove(table, lists)
    evidence = {**evidence, "mismatches": proof.mismatches}
    if not proof.holds:
        evidence["why"] = f"the {kind} form that was found is not the table"
        return Structure(NONE, rank=rank, checked_pairs=proof.checked_pairs, evidence=evidence)
    return Structure(kind, terms, tuple(lists), rank, True, proof.checked_pairs, evidence)


def _why(terms: Optional[Sequence[Term]], rank: int, most: int) -> str:
    if rank > most:
        return f"of rank {rank} at least, and so no sum of {most} products, of {CODES}×{CODES}"
    if terms is not None:
        return f"bilinear, as {len(terms)} masked products: more than {most}"
    return f"of rank {rank} at least, and no {most} products of 8-bit factors were found"
