"""What is said of a table's structure holds for all pairs, and is found where it is there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest

from narrowgauge_lab.multipliers import (
    NAMES,
    Structure,
    Table,
    Term,
    analyse,
    find_table,
    make_table,
    named,
    prove,
)
from narrowgauge_lab.multipliers import structure as structure_module
from narrowgauge_lab.multipliers.lowrank import rank_at_least
from narrowgauge_lab.multipliers.report import analysis_text
from narrowgauge_lab.multipliers.structure import BILINEAR, LOW_RANK, NONE
from narrowgauge_lab.multipliers.table import codes
from narrowgauge_lab.multipliers.terms import Factored, factor_type, factored, total

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

_FEW = settings(
    max_examples=8, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip

#: name -> how many terms, all of them masks and as few as possible.
_MASKS: Dict[str, int] = {
    "exact": 1, "ama5": 2, "ama5-4x4": 2, "truncated-2": 3, "truncated-4": 5, "truncated-8": 7,
    "bam-2-4": 3, "bam-3-6": 4, "bam-6-3": 1, "exact-signed": 1, "truncated-4-signed": 5,
    "truncated-6-signed": 7, "bam-2-4-signed": 3, "bam-3-6-signed": 4, "bam-6-3-signed": 1,
    "truncated-0": 1, "bam-8-0": 1,
}  # fmt: skip


def _of(terms: List[Term], a_signed: bool, b_signed: bool) -> Table:
    values = total([factored(term, a_signed, b_signed) for term in terms])
    return make_table("made", values, a_signed=a_signed, b_signed=b_signed, source="test")


def _by_hand(structure: Structure, table: Table) -> np.ndarray:
    """The terms as kernels have them: on codes in 8 bits, not by the module's own arithmetic."""
    found = np.zeros((256, 256), np.int64)
    for term in structure.terms:
        sides = []
        for signed, mask, shift in (
            (table.a_signed, term.a_mask, term.a_shift),
            (table.b_signed, term.b_mask, term.b_shift),
        ):
            bits = codes(signed).astype(np.uint8) & np.uint8(mask)
            sides.append((bits.view(np.int8) if signed else bits).astype(np.int64) >> shift)
        found += term.coefficient * sides[0][:, None] * sides[1][None, :]
    return found


def _require_true(structure: Structure, table: Table) -> None:
    """Whatever is said must hold; nothing is said of kind none."""
    if structure.kind == NONE:
        assert (structure.terms, structure.factors, structure.proved) == ((), (), False)
        return
    assert structure.proved
    assert structure.checked_pairs == 65536
    assert (total(structure.factors) == table.values).all()
    assert len(structure.factors) >= max(structure.rank, 1)
    for each in structure.factors:
        assert factor_type(each.a_values)
        assert factor_type(each.b_values)
    if structure.kind == BILINEAR:
        assert (_by_hand(structure, table) == table.values).all()
        assert len(structure.terms) == len(structure.factors)


@pytest.mark.parametrize("name", sorted(_MASKS))
def test_arrays_are_few_masked_products_and_no_fewer_do(name: str) -> None:
    table = named(name)
    found = analyse(table)

    _require_true(found, table)
    assert (found.kind, len(found.terms), found.fewest) == (BILINEAR, _MASKS[name], True)


@pytest.mark.parametrize(
    ("name", "count"), [("drum-3", 1), ("drum-6", 1), ("ama5-signed", 2), ("drum-4-signed", 4)]
)
def test_multipliers_of_magnitudes_are_products_of_lists(name: str, count: int) -> None:
    table = named(name)
    found = analyse(table)

    _require_true(found, table)
    assert (found.kind, len(found.factors), found.terms) == (LOW_RANK, count, ())


@pytest.mark.parametrize("name", ["mitchell", "mitchell-signed"])
def test_of_mitchells_nothing_is_claimed(name: str) -> None:
    found = analyse(named(name))

    assert (found.kind, found.proved, found.checked_pairs) == (NONE, False, 0)
    assert "rank" in found.evidence["why"]
    assert "why:" in analysis_text(named(name), found)


def test_ama5_is_its_closed_form() -> None:
    assert set(analyse(named("ama5")).terms) == {Term(0x11, 0xFF), Term(0xEE, 0x88, 2)}


@_FEW
@given(st.lists(st.integers(0, 255), min_size=8, max_size=8), st.booleans(), st.booleans())
def test_any_zero_one_matrix_of_partial_products_is_found(
    rows: List[int], a_signed: bool, b_signed: bool
) -> None:
    terms = [Term(1 << i, row) for i, row in enumerate(rows)]
    table = _of(terms, a_signed, b_signed)
    found = analyse(table)

    _require_true(found, table)
    assert found.kind in (BILINEAR, LOW_RANK)
    assert found.evidence["zero_one"]
    assert len(found.factors) <= max(len({row for row in rows if row}), 1)


_TERMS = st.lists(
    st.builds(Term, st.integers(1, 255), st.integers(1, 255), st.sampled_from([1, 1, 2, -1, 4])),
    min_size=1, max_size=4,
)  # fmt: skip


@_FEW
@given(_TERMS, st.booleans(), st.booleans())
def test_a_sum_of_masked_products_is_proved(terms: List[Term], a: bool, b: bool) -> None:
    table = _of(terms, a, b)
    found = analyse(table)

    _require_true(found, table)
    assert found.kind != NONE or len(terms) == 4


@_FEW
@given(_TERMS, st.integers(0, 255), st.integers(0, 255), st.sampled_from([1, -1, 1000]))
def test_one_wrong_pair_is_never_overlooked(
    terms: List[Term], row: int, column: int, by: int
) -> None:
    right = _of(terms, True, False)
    values = right.values.astype(np.int64)
    values[row, column] += by
    wrong = make_table("wrong", values, a_signed=True, b_signed=False, source="test")
    found = analyse(wrong)

    _require_true(found, wrong)
    before = [factored(term, True, False) for term in terms]
    assert prove(right, before).holds
    assert prove(wrong, before).mismatches == 1


@_FEW
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([2, 300, 70_000, 2**31 - 1]),
    st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_random_tables_through_file_and_analysis(
    tmp_path: Path, seed: int, most: int, rank: int, low: bool
) -> None:
    random = np.random.RandomState(seed)
    if low:
        f, g = (random.randint(-9, 10, (256, rank)) for _ in range(2))
        values = (f @ g.T).astype(np.int64)
    else:
        values = random.randint(-most, most, (256, 256), dtype=np.int64)
    np.save(str(tmp_path / "random.npy"), values)
    table = find_table(str(tmp_path / "random.npy"), signed=bool(seed % 2))
    found = analyse(table)

    assert (table.values == values).all()
    _require_true(found, table)
    assert found.rank <= rank or not low
    if low and rank == 1:
        assert found.kind in (LOW_RANK, BILINEAR)
    if not low and most > 2:
        assert found.kind == NONE


@pytest.mark.parametrize(
    ("what", "count"), [("a·b + 37", 2), ("|a|·b", 1), ("(a - 3)·(b + 5)", 4), ("0", 1)]
)
def test_offsets_and_functions_of_an_operand_are_lists(what: str, count: int) -> None:
    a, b = codes(True)[:, None], codes(True)[None, :]
    values = {
        "a·b + 37": a * b + 37, "|a|·b": abs(a) * b, "(a - 3)·(b + 5)": (a - 3) * (b + 5),
        "0": 0 * a * b,
    }[what]  # fmt: skip
    table = make_table(what, values, a_signed=True, b_signed=True, source="test")
    found = analyse(table)

    _require_true(found, table)
    assert found.kind != NONE
    assert len(found.factors) <= count


def test_half_weights_take_a_shift() -> None:
    a, b = codes(False)[:, None], codes(False)[None, :]
    table = make_table("half", (a & 0xF0) * b // 2, a_signed=False, b_signed=False, source="test")
    found = analyse(table)

    _require_true(found, table)
    assert found.terms == (Term(0xF0, 0xFF, 1, 1, 0),)


def test_what_the_search_gets_wrong_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(matrix: Any) -> Tuple[Term, ...]:
        return (Term(0xFF, 0xFE),)

    monkeypatch.setattr(structure_module, "mask_terms", wrong)
    found = analyse(named("exact"))

    assert (found.kind, found.proved, found.terms, found.factors) == (NONE, False, (), ())
    assert found.evidence["mismatches"] == 128 * 255  # every odd b but where a is 0


def test_factors_beyond_eight_bits_prove_nothing() -> None:
    table = named("exact")
    side = tuple(range(256))
    (good,) = analyse(table).factors

    assert prove(table, [good]).holds
    for bad in (
        Factored(1, tuple(2 * value for value in side), side),
        Factored(1, tuple(value - 129 for value in side), side),
        Factored(2**31, side, side),
        Factored(1, side[:255], side),
    ):
        assert prove(table, [bad]).checked_pairs == 0
    assert not prove(table, []).holds


def test_more_terms_than_asked_for_are_none() -> None:
    found = analyse(named("truncated-4"), most_terms=4)

    assert found.kind == NONE
    assert analyse(named("truncated-4"), most_terms=5).kind == BILINEAR


@pytest.mark.parametrize("rank", [0, 1, 7, 256])
def test_the_rank_is_the_rank(rank: int) -> None:
    random = np.random.RandomState(rank)
    left, right = random.randint(-50, 50, (256, rank)), random.randint(-50, 50, (rank, 256))

    assert rank_at_least((left @ right).astype(np.int64)) == rank


def test_the_proof_stands_in_the_record() -> None:
    table = named("bam-2-4-signed")
    found = analyse(table)
    fact = found.to_fact()

    assert (fact["proved"], fact["checked_pairs"], fact["mismatches"]) == (True, 65536, 0)
    assert fact["table_sha256"] == table.sha256()
    assert fact["terms"][0] == {
        "a_mask": "0xfc", "b_mask": "0xfc", "coefficient": 1, "a_shift": 0, "b_shift": 0,
    }  # fmt: skip
    assert dataclasses.is_dataclass(found)
    text = analysis_text(table, found)
    assert "65,536 pairs" in text
    assert "(a & 0xfc)·(b & 0xfc)" in text


def test_the_terms_are_what_kernels_take() -> None:
    codes_module = pytest.importorskip("narrowgauge_kernels.codes")

    assert codes_module.Term is Term
    assert set(NAMES) >= {"ama5", "mitchell"}
