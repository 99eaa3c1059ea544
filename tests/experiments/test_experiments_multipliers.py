"""The experiment `multipliers`: its declaration, and rows from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Tuple

import numpy as np
import pytest
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.multipliers import NAMES, named

ROWS = Rows("multipliers")


def test_a_row_has_the_errors_the_structure_and_its_proof(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path / "out", "table=bam-2-4-signed")

    assert {each.name: each.values for each in row.metrics}["terms"] == (3.0,)
    assert row.facts["structure"]["kind"] == "bilinear"
    assert row.facts["structure"]["proved"] is True
    assert row.facts["structure"]["checked_pairs"] == 65536
    assert row.facts["multiplier"]["sha256"] == row.facts["structure"]["table_sha256"]
    folder = tmp_path / "out" / "row-0"
    assert "(a & 0xfc)·(b & 0xfc)" in (folder / "analysis.txt").read_text(encoding="utf-8")
    assert "MRED" in (folder / "show.txt").read_text(encoding="utf-8")
    heat = json.loads((folder / "errors.json").read_text(encoding="utf-8"))
    assert (len(heat["values"]), heat["rows"][0], heat["columns"][-1]) == (16, "-128", "112")


def test_without_a_structure_there_is_no_figure_of_terms(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path / "out", "table=mitchell")

    assert "terms" not in {each.name for each in row.metrics}
    assert row.facts["structure"]["kind"] == "none"


def test_a_file_goes_through_with_lists_beside_the_record(tmp_path: Path) -> None:
    side = np.arange(256) - 128
    np.save(str(tmp_path / "mine.npy"), np.abs(side)[:, None] * side)
    row = ROWS.run(tmp_path / "out", f"table={tmp_path / 'mine.npy'}", "signed=true")

    assert row.facts["structure"]["terms"] == [1]
    written = json.loads((tmp_path / "out" / "row-0" / "structure.json").read_text("utf-8"))
    assert len(written["terms"][0]["a_values"]) == 256


def test_another_stands_beside(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path / "out", "table=truncated-4", "against=truncated-6")
    folder = tmp_path / "out" / "row-0"

    against = row.facts["against"]
    assert against["multiplier"]["name"] == "truncated-6"
    assert against["statistics"]["med"] > row.facts["statistics"]["med"]
    share = against["difference"]["share"]
    assert {each.name: each.values for each in row.metrics}["differing"] == (share,)
    text = (folder / "comparison.txt").read_text(encoding="utf-8").splitlines()
    assert text[0].split() == ["truncated-4", "truncated-6"]
    heat = json.loads((folder / "difference.json").read_text(encoding="utf-8"))
    assert min(cell for line in heat["values"] for cell in line) > 0  # nowhere nearer


def test_of_other_operands_there_is_no_difference_to_record(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path / "out", "table=ama5", "against=ama5-signed")

    assert row.facts["against"]["difference"] is None
    assert "differing" not in {each.name for each in row.metrics}
    assert not (tmp_path / "out" / "row-0" / "difference.json").exists()


@pytest.mark.parametrize("order", [("table", "against"), ("against", "table")])
def test_signs_are_of_the_file_of_two(order: Tuple[str, str], tmp_path: Path) -> None:
    side = np.arange(256) - 128
    np.save(str(tmp_path / "mine.npy"), np.multiply.outer(side, side))
    words = [f"{order[0]}={tmp_path / 'mine.npy'}", f"{order[1]}=exact-signed", "signed=true"]
    row = ROWS.run(tmp_path / "out", *words)

    assert row.facts["against"]["difference"]["pairs"] == 0


def test_a_kept_table_is_the_table(tmp_path: Path) -> None:
    ROWS.run(tmp_path / "out", "table=ama5-signed", "keep_table=true")
    kept = np.load(str(tmp_path / "out" / "row-0" / "table.npy"))

    assert kept.dtype == np.int32
    assert (kept == named("ama5-signed").values).all()


def test_a_list_stands_beside_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="a list has nothing"):
        ROWS.run(tmp_path / "out", "table=all", "against=ama5")


def test_signs_of_what_is_built_in_are_in_its_name(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="says itself"):
        ROWS.run(tmp_path / "out", "table=ama5", "signed=true")


def test_the_profile_of_all_has_all_and_the_list_too(tmp_path: Path) -> None:
    assert ROWS.spec().profiles["paper"].values["table"] == NAMES
    row = ROWS.run(tmp_path / "out", "table=all")

    assert row.facts["listed"] == len(NAMES)
    lines = (tmp_path / "out" / "row-0" / "list.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(NAMES)
    entries = json.loads((tmp_path / "out" / "row-0" / "list.json").read_text(encoding="utf-8"))
    assert [entry["multiplier"] for entry in entries] == list(NAMES)
    assert {entry["multiplier"]: entry["terms"] for entry in entries}["mitchell"] is None


def test_the_claims_hold_of_the_tables_they_are_about(tmp_path: Path) -> None:
    spec = ROWS.spec()
    for number, claim in enumerate(load_claims(EXPERIMENTS / "multipliers" / "claims.toml", spec)):
        (selection,) = claim.selections
        table = selection.where["table"]
        assert table in spec.profiles[claim.profile].values["table"]
        row = ROWS.run(tmp_path / str(number), f"table={table}")
        (found,) = (each for each in row.metrics if each.name == selection.metric)
        expected = claim.expected["any"]
        if expected.figure is not None:
            assert found.values[0] == pytest.approx(expected.figure, rel=expected.tolerance)
        else:
            assert expected.maximum is not None
            assert found.values[0] <= expected.maximum
