"""Two runs side by side: paired by parameters, pooled only where everything agrees."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from ratio_cases import bench_run
from result_cases import job, record_of, with_row
from rich.console import Console

from narrowgauge import compare as module
from narrowgauge.compare import Comparison, comparison_json, print_comparison
from narrowgauge.errors import UsageError
from narrowgauge.noise import Floors
from narrowgauge.store import Store
from narrowgauge_contract.outcome import Metric, Validity
from narrowgauge_contract.record import Record


def _record(root: Path, name: str, **values: object) -> Record:
    scale = values.pop("scale", 1.0)
    device = values.pop("device", "EPYC")
    folder = Store(root).new_run(job(f"20261121T100000Z-toy-{name}", **values))
    return record_of(folder, scale=scale, device=device)  # type: ignore[arg-type]


def compare(left: Record, right: Record) -> Comparison:
    """Where no run of noise-floor is at hand."""
    return module.compare(left, right, Floors.none())


def _screen(found: Comparison) -> str:
    stream = io.StringIO()
    print_comparison(found, Console(file=stream, width=120))
    return stream.getvalue()


def test_two_runs_of_the_same_are_paired_and_pooled(tmp_path: Path) -> None:
    found = compare(_record(tmp_path, "aaaaaa"), _record(tmp_path, "bbbbbb", scale=2.0))

    assert found.differences == ()
    speeds = [pair for pair in found.pairs if pair.metric == "images_per_second"]
    assert [pair.label for pair in speeds] == ["precision=fp32", "precision=bf16"]
    assert [pair.ratio for pair in speeds] == [pytest.approx(2.0)] * 2
    assert all(pair.pooled is not None and pair.pooled.n == 6 for pair in speeds)
    assert all(pair.ratio_interval is None for pair in speeds)  # three repeats tell no spread
    screen = _screen(found)
    assert "pooled" in screen
    assert "no interval: 3 repeats, and fewer than 6 do not tell" in screen
    assert "noise floor unknown: narrowgauge run noise-floor" in screen


def test_what_differs_is_named_and_nothing_is_pooled(tmp_path: Path) -> None:
    left, right = _record(tmp_path, "aaaaaa"), _record(tmp_path, "bbbbbb", device="Xeon")

    found = compare(left, dataclasses.replace(right, target="desktop"))

    assert found.differences == ("target: cpu / desktop", "device: EPYC / Xeon")
    assert all(pair.pooled is None for pair in found.pairs)
    screen = _screen(found)
    assert "not pooled" in screen
    assert "device: EPYC / Xeon" in screen


def test_a_parameter_that_both_runs_fix_is_what_is_compared(tmp_path: Path) -> None:
    left = _record(tmp_path, "aaaaaa", precision=["fp32"])
    right = _record(tmp_path, "bbbbbb", precision=["bf16"])

    found = compare(left, right)

    assert {pair.metric for pair in found.pairs} == {"loss", "accuracy", "images_per_second"}
    accuracy = next(pair for pair in found.pairs if pair.metric == "accuracy")
    assert (accuracy.left.median, accuracy.right.median) == (99.1, 98.1)
    assert (found.only_left, found.only_right) == ((), ())
    assert found.differences == ("parameter precision: fp32 / bf16",)
    without = dataclasses.replace(right, parameters={**right.parameters, "precision": ""})
    assert compare(left, without).differences == ("parameter precision: fp32 / ''",)


def test_what_is_in_one_run_only_is_listed(tmp_path: Path) -> None:
    left = _record(tmp_path, "aaaaaa", precision=["fp32", "fp16"])
    right = _record(tmp_path, "bbbbbb", precision=["fp32", "bf16"])

    found = compare(left, right)

    assert found.only_left == ("precision=fp16",)
    assert found.only_right == ("precision=bf16",)
    assert {pair.label for pair in found.pairs} == {"precision=fp32"}


def test_invalid_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    left = with_row(_record(tmp_path, "aaaaaa"), 0, validity=Validity(False, ("hot",)))

    found = compare(left, _record(tmp_path, "bbbbbb"))

    assert found.dropped == 1
    assert found.pairs[0].left.n == 2
    assert "1 INVALID rows are left out" in _screen(found)


def test_two_experiments_cannot_be_compared(tmp_path: Path) -> None:
    left = _record(tmp_path, "aaaaaa")

    with pytest.raises(UsageError, match="cannot be compared"):
        compare(left, dataclasses.replace(left, experiment="other"))


def test_with_enough_repeats_the_ratio_has_an_interval(tmp_path: Path) -> None:
    left, right = _record(tmp_path, "aaaaaa"), _record(tmp_path, "bbbbbb", scale=1.5)
    more = [dataclasses.replace(record, rows=record.rows * 3) for record in (left, right)]

    found = compare(*more)

    speed = next(pair for pair in found.pairs if pair.metric == "images_per_second")
    assert speed.ratio_interval is not None
    assert speed.ratio_interval.low <= 1.5 <= speed.ratio_interval.high


def test_repeats_of_two_runs_are_no_pairs(tmp_path: Path) -> None:
    """Both runs slow down alike from repeat to repeat: within one record a pair of repeats would
    share that; of two, what they share is the number."""
    sides = [
        bench_run(tmp_path, f"20261121T1{i}0000Z-bench-{'ab'[i] * 6}", modes=("strict",)).record()
        for i in (0, 1)
    ]
    left, right = (
        dataclasses.replace(
            record,
            rows=tuple(
                dataclasses.replace(row, metrics=(_seconds(scale * 1.1**row.repeat, row.repeat),))
                for row in record.rows
            ),
        )
        for record, scale in zip(sides, (1.0, 1.02), strict=True)
    )

    (pair,) = compare(left, right).pairs

    assert pair.ratio == pytest.approx(1.02, rel=0.01)
    assert pair.ratio_interval is not None
    assert pair.ratio_interval.low < 0.9
    assert pair.ratio_interval.high > 1.1


def _seconds(value: float, repeat: int) -> Metric:
    return Metric("latency", "s", "monotonic", (value * (1 + 1e-4 * (repeat % 3)),))


def test_json_is_one_document(tmp_path: Path) -> None:
    found = compare(_record(tmp_path, "aaaaaa"), _record(tmp_path, "bbbbbb"))

    body = json.loads(json.dumps(comparison_json(found), allow_nan=False))

    assert body["left"] == "20261121T100000Z-toy-aaaaaa"
    assert len(body["pairs"]) == 6
