"""throughput: who works, what counts, what is recorded, and what makes a row INVALID."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable, List, Sequence, Tuple

import numpy as np
import pytest
import torch
from throughput_cases import EXPERIMENTS, NAME, job, module, parameters, run_row, spec

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import NotApplicableError, SkippedError, UsageError
from narrowgauge_contract.outcome import Metric, Row, Status, Validity
from narrowgauge_contract.summary import summary_lines
from narrowgauge_lab.engines.serving import make_ready
from narrowgauge_lab.measure.concurrent import Program
from narrowgauge_lab.measure.steady import Worked
from narrowgauge_lab.networks.subject import Subject
from narrowgauge_lab.networks.trained import TRAINED, Labelled

Outcome = Tuple[Tuple[Worked, ...], Tuple[Any, ...]]
TENSORRT = ("engine=tensorrt", "precision=int8", "batch=16", "dla_batch=4")


def _plan(*words: str, device: str = "cpu", processors: int = 8) -> List[Tuple[Any, ...]]:
    planned = module("stations").plan_stations(parameters(*words), device, processors)
    return [(each.name, each.batch, each.threads, dict(each.options)) for each in planned]


class TestStations:
    def test_processors_are_shared_out_among_processes(self) -> None:
        assert _plan("workers=3", "batch=5", "engine=eager", processors=8) == [
            ("cpu-0", 5, 2, {}), ("cpu-1", 5, 2, {}), ("cpu-2", 5, 2, {}),
        ]  # fmt: skip

    def test_more_workers_than_processors_have_a_thread_each(self) -> None:
        assert {each[2] for each in _plan("workers=5", "engine=eager", processors=2)} == {1}

    def test_our_engine_is_told_its_threads_and_does_not_choose(self) -> None:
        plan = _plan("workers=1", "batch=1", "engine=narrowgauge", "threads=4")

        assert plan == [("cpu-0", 1, 4, {"threads": 4})]

    def test_a_gpu_s_workers_are_alike(self) -> None:
        plan = _plan("workers=2", "batch=8", "engine=narrowgauge", device="cuda")

        assert plan == [("gpu-0", 8, 0, {}), ("gpu-1", 8, 0, {})]

    def test_accelerators_work_beside_the_gpu(self) -> None:
        plan = _plan(*TENSORRT, "workers=1", "dlas=2", device="cuda")

        assert plan == [
            ("dla-0", 4, 0, {"dla": 0}), ("dla-1", 4, 0, {"dla": 1}), ("gpu-0", 16, 0, {"dla": -1}),
        ]  # fmt: skip

    def test_a_cpu_has_no_accelerators(self) -> None:
        with pytest.raises(NotApplicableError, match="no deep-learning accelerators"):
            _plan(*TENSORRT, "dlas=1")

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (("dlas=2", "engine=eager", "precision=int8"), "eager runs nothing on"),
            (("dlas=2", "engine=tensorrt", "precision=fp32"), "have no fp32"),
            (("engine=eager", "threads=2"), "threads are for rows on a CPU"),
        ],
    )
    def test_what_contradicts_itself_is_refused(self, words: Tuple[str, ...], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            _plan(*words, device="cuda")


class TestDeclaration:
    def test_claims_are_about_rows_that_can_be_asked_for(self) -> None:
        claims = load_claims(EXPERIMENTS / NAME / "claims.toml", spec())

        assert {claim.id for claim in claims} >= {"nx-resnet50", "agx-1941", "accelerators-add"}
        for claim in claims:
            for selection in claim.selections:
                job(*(f"{name}={value}" for name, value in selection.where.items()))

    def test_only_the_data_of_the_networks_asked_for_are_read(self) -> None:
        for model in spec().parameters["model"].choices:
            own = (TRAINED[model].set_name,) if model in TRAINED else ()
            assert job("weights=trained", f"model={model}").data_sets == ("imagenet-20", *own)
            assert job(f"model={model}").data_sets == ()

    def test_the_paper_s_rows_are_those_of_the_figure(self) -> None:
        row = job(profile="paper").rows[0].parameters
        claims = load_claims(EXPERIMENTS / NAME / "claims.toml", spec())
        (claim,) = [each for each in claims if each.id == "agx-1941"]

        assert claim.device == "Jetson AGX Xavier"
        assert {name: row[name] for name in claim.selections[0].where} == claim.selections[0].where

    def test_the_last_lines_hold_engines_against_eager_at_the_same_load(self) -> None:
        closing = spec().closing
        assert closing is not None
        rows = [
            _measured(engine, batch, rate)
            for engine, batch, rate in (("eager", 1, 100.0), ("narrowgauge", 1, 250.0),
                                        ("narrowgauge", 8, 400.0))
        ]  # fmt: skip

        assert [line.split(" | ")[2:] for line in summary_lines(closing, rows)[1:]] == [
            ["1", "1", "narrowgauge", "100", "250", "240", "4", "2.50 |"],
            ["8", "1", "narrowgauge", "–", "400", "390", "4", "– |"],
        ]


def _measured(engine: str, batch: int, rate: float) -> Row:
    values = {
        "images_per_second": (rate, "image/s"),
        "images_counted_per_second": (rate - 10, "image/s"),
        "latency": (0.004, "s"),
    }
    metrics = [Metric(name, unit, "x", (value,)) for name, (value, unit) in values.items()]
    row = parameters(f"engine={engine}", f"batch={batch}", "workers=1")
    return Row(0, 0, 0, row, Status.COMPLETE, Validity(True), metrics=tuple(metrics))


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers that are made and called here, and take 10 ms for each of ten calls by their own
    account: processes need seconds to begin, and a busy machine stops anyone for a while."""

    def run(programs: Sequence[Program], seconds: float) -> Outcome:
        worked, reports = [], []
        for program in programs:
            call, report = make_ready(program.job)
            call()
            spans = tuple((0.01 * number, 0.01 * (number + 1)) for number in range(10))
            worked.append(Worked(program.name, program.batch, spans))
            reports.append(report())
        return tuple(worked), tuple(reports)

    monkeypatch.setattr(module("work"), "run_processes", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_in_this_process")
class TestRows:
    def test_a_row_has_both_rates_and_every_worker_s_calls(self, tmp_path: Path) -> None:
        row, folder = run_row(tmp_path, "workers=2")

        assert row.validity.valid, row.validity.reasons
        # Two workers, two images a call, 10 ms a call.
        assert _values(row, "images_per_second") == [pytest.approx(400)]
        assert _values(row, "images_counted_per_second") == [pytest.approx(400)]
        assert _values(row, "latency") == [pytest.approx(0.01)] * 20
        latency = row.metric("latency")
        assert latency is not None
        whose = [(each["worker"], each["samples"]) for each in latency.conditions["workers"]]
        assert whose == [("cpu-0", 10), ("cpu-1", 10)]
        window = row.facts["window"]
        assert [each["worker"] for each in window["workers"]] == ["cpu-0", "cpu-1"]
        assert [each["calls_in_window"] for each in window["workers"]] == [10, 10]
        for name in ("cpu-0", "cpu-1"):
            calls = np.load(folder / f"calls-{name}.npy")
            assert calls.shape[1] == 2
            assert (calls[:, 1] > calls[:, 0]).all()
            assert calls.min() >= 0

    def test_it_says_what_ran_and_holds_it_against_float64(self, tmp_path: Path) -> None:
        row, _ = run_row(tmp_path)

        assert row.facts["precision_ran"] == "fp32"
        assert max(_values(row, "relative_error")) < 1e-5
        assert row.facts["weights"].startswith("random")
        assert row.metric("top1") is None
        (worker,) = row.facts["workers"]
        assert worker["batch"] == 2
        assert worker["threads_ran"] >= 1
        assert row.facts["engine_cache"] == {"from_cache": False, "note": ""}
        assert row.facts["providers"]

    def test_our_engine_tells_its_choice(self, tmp_path: Path) -> None:
        row, _ = run_row(tmp_path, "engine=narrowgauge")

        assert row.validity.valid, row.validity.reasons
        (worker,) = row.facts["workers"]
        assert worker["choice"]["threads"] == torch.get_num_threads()
        assert worker["choice"]["reason"]
        assert row.facts["layers"]

    def test_long_series_are_thinned_and_say_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module("records"), "_MOST_SAMPLES", 2)

        row, folder = run_row(tmp_path)

        latency = row.metric("latency")
        assert latency is not None
        assert 1 <= len(latency.values) <= 2
        (worker,) = latency.conditions["workers"]
        assert worker["samples"] == len(latency.values)
        assert worker["every"] > 1
        assert len(np.load(folder / "calls-cpu-0.npy")) > 2

    def test_accuracy_stands_beside_the_speed_where_weights_are_trained(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """20 images, a batch of 3: the last one is filled up, and does not count twice."""
        make = module("run").make_subject
        images = torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(0))

        def trained(*arguments: Any, **rest: Any) -> Subject:
            subject = make(*arguments, **rest)
            with torch.no_grad():
                best = subject.model(images).argmax(1)
            # Right for three quarters of them.
            classes = torch.where(torch.arange(20) % 4 == 0, (best + 1) % 10, best)
            return Subject(
                subject.model, subject.images, subject.calibration, Labelled(images, classes),
                "trained", "real",
            )  # fmt: skip

        monkeypatch.setattr(module("run"), "make_subject", trained)
        row, _ = run_row(tmp_path, "batch=3")

        assert _values(row, "top1") == [0.75]
        assert _values(row, "top5")[0] >= 0.75

    def test_a_worker_that_computes_something_else_makes_the_row_invalid(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _replace_outcome(monkeypatch, lambda worked, reports: (worked, _falsified(reports)))

        row, _ = run_row(tmp_path, "workers=2")

        assert any("off by" in reason for reason in row.validity.reasons)

    def test_a_worker_that_died_makes_the_row_invalid(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def died(worked: Tuple[Worked, ...], reports: Tuple[Any, ...]) -> Outcome:
            return (worked[0], Worked("cpu-1", 2, (), "killed by signal 9")), (reports[0], None)

        _replace_outcome(monkeypatch, died)
        row, folder = run_row(tmp_path, "workers=2")

        assert "the worker cpu-1 died: killed by signal 9" in row.validity.reasons
        assert row.metric("images_per_second") is None
        assert len(np.load(folder / "calls-cpu-1.npy")) == 0

    def test_workers_that_never_ran_together_make_the_row_invalid(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def apart(worked: Tuple[Worked, ...], reports: Tuple[Any, ...]) -> Outcome:
            later = tuple((begin + 60, end + 60) for begin, end in worked[1].spans)
            return (worked[0], Worked("cpu-1", 2, later)), reports

        _replace_outcome(monkeypatch, apart)
        row, _ = run_row(tmp_path, "workers=2")

        assert "no moment in which all workers ran" in row.validity.reasons[0]
        assert row.metric("images_per_second") is None

    def test_an_engine_that_this_host_lacks_is_skipped_with_the_reason(
        self, tmp_path: Path
    ) -> None:
        with pytest.raises(SkippedError, match="this host has no tensorrt"):
            run_row(tmp_path, "engine=tensorrt")

    def test_a_precision_that_it_lacks_is_skipped_too(self, tmp_path: Path) -> None:
        with pytest.raises(SkippedError, match="eager runs no fp8"):
            run_row(tmp_path, "precision=fp8")


def _values(row: Row, name: str) -> List[float]:
    metric = row.metric(name)
    assert metric is not None
    return list(metric.values)


def _replace_outcome(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], Outcome]
) -> None:
    run = module("work").run_processes

    def changed(programs: Sequence[Program], seconds: float) -> Outcome:
        return change(*run(programs, seconds))

    monkeypatch.setattr(module("work"), "run_processes", changed)


def _falsified(reports: Tuple[Any, ...]) -> Tuple[Any, ...]:
    last = dataclasses.replace(reports[-1], logits=reports[-1].logits * 1.1)
    return (*reports[:-1], last)


@pytest.mark.slow  # each process imports torch and its compiler
def test_two_real_processes_work_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    row, _ = run_row(tmp_path, "workers=2", "seconds=0.3")

    assert row.validity.valid, row.validity.reasons
    assert row.facts["precision_ran"] == "fp32"
    assert [each["threads_ran"] for each in row.facts["workers"]] == [torch.get_num_threads()] * 2
    assert _values(row, "images_counted_per_second")[0] > 0
