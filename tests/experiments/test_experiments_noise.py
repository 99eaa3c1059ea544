"""noise-floor: what it plants is exact, what it records can be told apart, and it runs quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import BadValueError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.outcome import Fold
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.experiments import load_run
from narrowgauge_lab.measure import Comparison, Samples, TimingPlan

NAME = "noise-floor"
QUICK = ("size=tiny", "comparisons=2", "pairs=6", "iterations=50")
_ROWS = Rows(NAME, QUICK)
_module, _spec, _job, _run = _ROWS.module, _ROWS.spec, _ROWS.job, _ROWS.run


@pytest.fixture(autouse=True)
def _no_long_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine nothing becomes steady, and these tests look at no number."""
    plan = TimingPlan(limit_s=20.0, warm_up_limit_s=0.05)
    monkeypatch.setattr(_module("run"), "_PLAN", plan)


class TestPlanted:
    @pytest.mark.parametrize(
        ("iterations", "planted", "slowed"),
        [(50, 0.0, 50), (50, 2.0, 51), (100, 1.0, 101), (1000, 0.1, 1001), (4, 25.0, 5)],
    )
    def test_it_is_exact(self, iterations: int, planted: float, slowed: int) -> None:
        assert _module("workloads").second_iterations(iterations, planted) == slowed

    @pytest.mark.parametrize(("iterations", "planted"), [(50, 1.0), (49, 2.0), (1, 0.1)])
    def test_what_is_no_whole_number_is_refused(self, iterations: int, planted: float) -> None:
        with pytest.raises(BadValueError, match="is no whole number") as caught:
            _module("workloads").second_iterations(iterations, planted)

        step = int(caught.value.next_step.rpartition("=")[2])
        slowed = _module("workloads").second_iterations(step, planted)
        assert slowed / step == pytest.approx(1 + planted / 100)

    def test_the_second_side_runs_the_operation_so_much_more_often(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts: List[int] = []
        run = _module("run")

        def count_calls(first: Any, second: Any, *_: Any) -> Comparison:
            for side in (first, second):
                counts.append(0)
                side()
            return _comparison(3)

        def operation(*_: Any) -> Any:
            def once() -> None:
                counts[-1] += 1

            return once

        monkeypatch.setattr(run, "interleave", count_calls)
        monkeypatch.setattr(run, "workload", operation)

        row = _run(tmp_path, "planted=2")

        assert counts == [50, 51, 50, 51]
        assert row.facts["iterations"] == [50, 51]

    def test_a_row_that_cannot_plant_fails_before_it_measures(self, tmp_path: Path) -> None:
        with pytest.raises(BadValueError):
            _run(tmp_path, "planted=1")


def _comparison(pairs: int, stopped: str = "sample limit") -> Comparison:
    side = Samples(
        seconds=tuple(1e-3 + i * 1e-6 for i in range(pairs)), source="monotonic", calls=1,
        host_seconds=(1e-3,) * pairs, warm_up_calls=3, steady=True, stopped=stopped,
        interleaved=True,
    )  # fmt: skip
    return Comparison(side, side)


@pytest.mark.parametrize("workload", ["copy", "matmul", "conv", "launch"])
def test_every_workload_runs_and_says_what_it_measured(tmp_path: Path, workload: str) -> None:
    row = _run(tmp_path, f"workload={workload}")

    samples = {metric.name: metric for metric in row.metrics}
    assert set(samples) == {"ratio", "latency_first", "latency_second"}
    assert row.facts["pairs"] == [6, 6]
    assert all(len(metric.values) == 12 for metric in row.metrics)
    firsts, seconds = samples["latency_first"].values, samples["latency_second"].values
    assert samples["ratio"].values == tuple(b / a for a, b in zip(firsts, seconds))
    assert samples["latency_first"].unit == "s"
    assert samples["latency_first"].conditions["interleaved"] is True
    assert row.facts["windows_discarded"] == 0
    assert row.validity.valid


@pytest.mark.parametrize(("workload", "hidden"), [("copy", True), ("launch", False)])
def test_only_launch_has_its_launches_in_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: str, hidden: bool
) -> None:
    plans: List[TimingPlan] = []

    def compared(*given: Any) -> Comparison:
        plans.append(given[3])
        return _comparison(6)

    monkeypatch.setattr(_module("run"), "interleave", compared)

    _run(tmp_path, f"workload={workload}")

    assert [plan.hide_launches for plan in plans] == [hidden, hidden]


def test_a_comparison_that_went_astray_makes_the_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [_comparison(4, "time limit"), _comparison(6)]
    monkeypatch.setattr(_module("run"), "interleave", lambda *_: found.pop(0))

    row = _run(tmp_path)

    assert not row.validity.valid
    assert "1 comparisons did not end" in row.validity.reasons[0]
    assert row.facts["pairs"] == [4, 6]


def test_operations_do_what_their_names_say() -> None:
    make = _module("workloads").workload
    copied = make("copy", "tiny", CPU)()
    assert copied.shape == (4096,)
    assert copied.abs().sum() > 0
    assert make("matmul", "tiny", CPU)().shape == (32, 32)
    assert make("conv", "tiny", CPU)().shape == (1, 8, 8, 8)
    assert make("launch", "tiny", CPU)().shape == (1,)


def test_sizes_are_those_declared_and_in_the_page() -> None:
    sizes = _module("workloads").SIZES
    page = (EXPERIMENTS / NAME / "README.md").read_text(encoding="utf-8")

    assert set(sizes) == set(_spec().parameter("workload").choices)
    for name, by_size in sizes.items():
        assert tuple(by_size) == _spec().parameter("size").choices
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
        for shape, cell in zip(by_size.values(), line.strip("|").split("|")[1:]):
            for number in shape:
                assert str(number) in cell.replace(",", ""), (name, shape, cell)


def test_profiles_are_as_promised() -> None:
    short, paper = _job(profile="short"), _job(profile="paper")

    assert len(short.rows) == 4 * 6
    equal = [row for row in paper.rows if row.parameters["planted"] == 0.0]
    planted = [row for row in paper.rows if row.parameters["planted"] == 2.0]
    assert len(equal) * paper.parameters["comparisons"] == 400
    assert len(planted) == len(equal)
    for job in (short, paper):
        # a reference record keeps 200 samples of a metric and row: all of these
        assert job.parameters["comparisons"] * job.parameters["pairs"] <= 200


def test_claims_follow_the_schema_and_say_what_was_promised() -> None:
    claims = {c.id: c for c in load_claims(EXPERIMENTS / NAME / "claims.toml", _spec())}

    assert claims["false-alarms"].expected["any"].maximum == 0.05
    assert claims["power"].expected["any"].minimum == 0.95
    assert claims["a-equals-a"].kind.value == "equivalence"
    assert {name: c.statistic for name, c in claims.items()} == {
        "false-alarms": "alarm-rate",  # either way, for nothing differs
        "power": "slower-rate",  # a slowdown is not found by calling it a speed-up
        "a-equals-a": "median",
    }


def test_drawings_name_what_a_row_records(tmp_path: Path) -> None:
    recorded = {metric.name for metric in _run(tmp_path).metrics}

    assert set(_spec().headline) <= recorded
    for drawing in _spec().drawings:
        assert set(drawing.metrics) <= recorded


@pytest.mark.gpu
@pytest.mark.parametrize("workload", ["copy", "matmul", "conv", "launch"])
def test_on_a_gpu_it_measures_with_events(tmp_path: Path, workload: str) -> None:
    plan = _job(*QUICK, f"workload={workload}").rows[0]
    with EventLog(tmp_path / EVENTS_FILE) as log:
        head = {"repeat": 0, "seed": 0, "parameters": plan.parameters}
        log.emit(EventKind.ROW_START, 0, **head)
        ctx = RowContext(plan, log, tmp_path, device=torch.device("cuda"), profile="smoke")
        load_run(EXPERIMENTS, NAME)(ctx)
        log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0, error=None)
    (row,) = Fold().add_all(read_events(tmp_path / EVENTS_FILE)).rows()

    metric = row.metric("ratio")
    assert metric is not None
    assert metric.source == "cuda-event"
    assert len(metric.values) == 12
