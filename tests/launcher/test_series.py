"""Tables with a line for each block, step or size: what stands where, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from result_cases import recorded, with_row

from narrowgauge.errors import UsageError
from narrowgauge.reference import export, render_tables
from narrowgauge.series import series_markdown
from narrowgauge_contract.outcome import Metric, Row, Validity
from narrowgauge_contract.record import Record


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Three repeats in fp32 and in bf16, three epochs each."""
    return recorded(tmp_path).record()


def _fp32(record: Record) -> list[Row]:
    return [row for row in record.rows if row.parameters["precision"] == "fp32"]


def _with(record: Record, facts: dict[str, object], *metrics: Metric) -> Record:
    """Every row with these metrics and facts beside its own."""
    rows = tuple(
        dataclasses.replace(row, facts=facts, metrics=(*row.metrics, *metrics))
        for row in record.rows
    )
    return dataclasses.replace(record, rows=rows)


def test_a_line_for_each_step_and_a_column_for_each_metric(record: Record) -> None:
    lines = series_markdown(record, "precision=fp32 accuracy,loss").splitlines()

    assert lines[0] == "| epoch | accuracy (%) | loss (nat) | valid repeats |"
    assert lines[2] == "| 1 | 97.10 (97.00 to 97.20) | 1 | 3/3 |"
    assert lines[4] == "| 3 | 99.10 (99.00 to 99.20) | 0.3333 | 3/3 |"
    assert len(lines) == 5


def test_configurations_stand_apart(record: Record) -> None:
    lines = series_markdown(record, "from=0 called=step accuracy").splitlines()

    assert lines[0].startswith("| precision | step | accuracy (%) |")
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        [f"| {name}", str(step)] for name in ("fp32", "bf16") for step in range(3)
    ]


def test_lines_take_their_names_from_a_fact_or_a_parameter(record: Record) -> None:
    named = _with(record, {"blocks": ["layer1.0", "layer1.1", "layer2.0"]})
    rows = tuple(
        dataclasses.replace(row, parameters={**row.parameters, "ratios": "0.1,0.5,0.9"})
        for row in record.rows
    )

    by_fact = series_markdown(named, "by=blocks precision=bf16 accuracy").splitlines()
    by_parameter = series_markdown(
        dataclasses.replace(record, rows=rows), "by=ratios precision=bf16 accuracy"
    ).splitlines()

    assert [line.split(" | ")[0] for line in by_fact[2:]] == [
        "| layer1.0", "| layer1.1", "| layer2.0",
    ]  # fmt: skip
    assert [line.split(" | ")[0] for line in by_parameter[2:]] == ["| 0.1", "| 0.5", "| 0.9"]


def test_a_family_of_metrics_is_a_series(record: Record) -> None:
    metrics = [
        Metric(name, "%", "x", (value,))
        for name, value in (("size16_accuracy", 30.0), ("size20_accuracy", 35.0), ("sizes", 1.0))
    ]

    lines = series_markdown(
        _with(record, {}, *metrics), "precision=fp32 size*_accuracy"
    ).splitlines()

    assert lines[0] == "| size | size*_accuracy (%) | valid repeats |"
    assert lines[2:] == [
        "| 16 | 30.00 | 3/3 |",
        "| 20 | 35.00 | 3/3 |",
    ]


def test_each_repeat_is_shown_in_its_place_and_invalid_ones_are_not(record: Record) -> None:
    second = next(r.index for r in _fp32(record) if r.repeat == 1)
    spoiled = with_row(record, second, validity=Validity(False, ("x",)))

    whole = series_markdown(record, "precision=fp32 repeats=each accuracy").splitlines()
    without = series_markdown(spoiled, "precision=fp32 repeats=each accuracy").splitlines()

    assert whole[4] == "| 3 | 99.00, 99.10, 99.20 | 3/3 |"
    assert without[4] == "| 3 | 99.00, 99.20 | 2/3 |"


def test_a_line_that_a_configuration_lacks_is_a_dash(record: Record) -> None:
    shorter = record
    for row in _fp32(record):
        cut = tuple(dataclasses.replace(m, values=m.values[:2]) for m in row.metrics)
        shorter = with_row(shorter, row.index, metrics=(*cut[1:], record.rows[0].metrics[0]))

    lines = series_markdown(shorter, "precision=fp32 loss,accuracy").splitlines()

    assert lines[4] == "| 3 | 0.3333 | – | 3/3 |"


def test_a_page_shows_it_with_its_source(record: Record, tmp_path: Path) -> None:
    export(record, tmp_path)
    mark = f"<!-- series: epyc/{record.run_id} repeats=each accuracy -->"

    page = render_tables(f"{mark}\n<!-- /series -->\n", tmp_path / "toy")

    assert "| fp32 | 3 | 99.00, 99.10, 99.20 | 3/3 |" in page
    assert "a figure for each valid repeat, in their order" in page
    assert page.endswith(f"record `{record.run_id}`.\n\n<!-- /series -->\n")
    assert render_tables(page, tmp_path / "toy") == page
    median = render_tables(page.replace("repeats=each ", ""), tmp_path / "toy")
    assert "median over the valid repeats (least to most)" in median


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("precision=fp32", "asks for no series"),
        ("from=last accuracy", "asks for no series"),
        ("repeats=some accuracy", "asks for no series"),
        ("precision=fp8 accuracy", "no row of .* has 'accuracy'"),
        ("acuracy", "no row of .* has 'acuracy'"),
        ("size*_accuracy", "no row of .* has 'size\\*_accuracy'"),
        ("plain", "'plain' is no series"),
        ("thinned", "'thinned' is no series"),
        ("by=blocks accuracy", "'blocks' does not name what 'accuracy' counts"),
        ("by=nothing accuracy", "'nothing' does not name"),
    ],
)
def test_what_is_no_series_is_an_error(record: Record, said: str, message: str) -> None:
    plain = Metric("plain", "s", "x", (1.0, 2.0))
    thinned = Metric("thinned", "nat", "x", (1.0,), "step", {"samples": "1 of 300"})

    with pytest.raises(UsageError, match=message):
        series_markdown(_with(record, {"blocks": ["one"]}, plain, thinned), said)
