"""One table over several reference records: which rows it takes, and what its ratios are of."""

from __future__ import annotations

from pathlib import Path

import pytest
from ratio_cases import LATENCIES, bench_run

from narrowgauge.errors import UsageError
from narrowgauge.reference import export, render_tables

MARK = "<!-- matrix: epyc latency batch mode of=int8 -->"
SLOW = {mode: 4 * seconds for mode, seconds in LATENCIES.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Batches 32 and 64 of one run, 32 again of a newer one on a host that is four times slower."""
    older, newer = "20261121T100000Z-bench-bbbbbb", "20261122T100000Z-bench-cccccc"
    modes = ("strict", "fp16", "int8")
    for run_id, batches, latencies in ((older, (64, 32), LATENCIES), (newer, (32,), SLOW)):
        run = bench_run(tmp_path / run_id, run_id, 1e-6, 6, modes, batches, latencies=latencies)
        export(run.record(), tmp_path)
    return tmp_path / "bench"


def _page(folder: Path, mark: str = MARK) -> list[str]:
    return render_tables(f"{mark}\n<!-- /matrix -->\n", folder).splitlines()


def test_lines_are_of_the_newest_record_and_ratios_of_one(folder: Path) -> None:
    page = _page(folder)

    head = (
        "| batch | fp16 (ms) | strict (ms) | int8 (ms) | int8 × strict (95 %) | int8 × best other |"
    )
    assert page[1] == head
    assert page[3].startswith("| 64 | 20 | 80 | 10 | 8 (8 to 8) | 2 (2 to 2) |")
    assert page[4].startswith("| 32 | 80 | 320 | 40 | 8 (8 to 8) | 2 (2 to 2) |")
    assert page[5] == "| geometric mean of 2 |  |  |  | 8 | 2 |"
    assert "EPYC, torch 2.13.0" in page[7]
    assert "`20261121T100000Z-bench-bbbbbb`, `20261122T100000Z-bench-cccccc`" in page[7]


def test_a_newer_record_of_one_column_takes_no_line_from_one_of_all(folder: Path) -> None:
    before = _page(folder)
    name = "20261123T100000Z-bench-dddddd"
    run = bench_run(folder.parent / name, name, 1e-6, 6, ("int8",), (32,), latencies=LATENCIES)
    export(run.record(), folder.parent)

    assert _page(folder) == before


def test_rows_are_chosen_by_parameters(folder: Path) -> None:
    page = _page(folder, MARK.replace(" -->", " batch=64 -->"))

    assert [line.split(" | ")[0] for line in page[3:5]] == ["| 64", "| geometric mean of 1"]
    assert "cccccc" not in "".join(page)


def test_what_has_no_valid_row_has_neither_figure_nor_ratio(tmp_path: Path) -> None:
    run = bench_run(tmp_path / "run", modes=("strict", "fp16", "int8"), invalid=("int8",))
    export(run.record(), tmp_path)

    page = _page(tmp_path / "bench")

    assert page[3].endswith("| – | – | – |")
    assert page[4] == "| geometric mean of 0 |  |  |  | – | – |"


def test_columns_of_plain_numbers_name_no_unit(tmp_path: Path) -> None:
    export(bench_run(tmp_path / "run", modes=("strict", "int8"), unit="1").record(), tmp_path)

    assert _page(tmp_path / "bench")[1].startswith("| batch | strict | int8 | int8 × strict")


def test_a_cell_for_two_configurations_names_what_they_differ_in(folder: Path) -> None:
    with pytest.raises(UsageError, match="more than one strict of strict") as caught:
        _page(folder, MARK.replace("batch mode", "mode mode"))

    assert caught.value.why == "they differ in batch"
    assert caught.value.next_step == "choose by batch=VALUE"


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("<!-- matrix: epyc latency batch of=int8 -->", "asks for no matrix"),
        ("<!-- matrix: epyc latency batch mode -->", "asks for no matrix"),
        ("<!-- matrix: h200 latency batch mode of=int8 -->", "no row of 0 records"),
        ("<!-- matrix: epyc latency batch mode of=int8 batch=7 -->", "no row of 2 records"),
    ],
)
def test_what_cannot_be_made_is_an_error(folder: Path, mark: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _page(folder, mark)
