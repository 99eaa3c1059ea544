"""What only a GPU can show of training by a plan: real copies, each precision, and resuming."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import CPU, Case, SmallNet, feeds, recipe

from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog
from narrowgauge_contract.placement import BUILTIN, PlacementPlan, parse_plan
from narrowgauge_lab import training
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.hetero.convert import home_of
from narrowgauge_lab.layers.passes.choice import missing
from narrowgauge_lab.schedule import MultiStep
from narrowgauge_lab.sentry import Lookout

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
_TIMED = {"images_per_second", "epoch_seconds"}


def _plan(name: str) -> PlacementPlan:
    return parse_plan(BUILTIN[name], name)


class _PlanCase(Case):
    """A row whose accelerator is the GPU; model and data are where the plan has them."""

    def train_by(
        self,
        name: str,
        epochs: int,
        fail_at: int = 0,
        resume: bool = False,
        *,
        dropout: float = 0.2,
        **changes: Any,
    ) -> None:
        """`changes`: of the recipe."""
        plan = _plan(name)
        at = home_of(plan, CUDA)
        with EventLog(self.out / EVENTS_FILE) as log:
            ctx = RowContext(self.plan, log, self.out, device=CUDA, profile="short", resume=resume)
            log.emit(EventKind.ROW_START, 0, repeat=0, seed=3, parameters={})
            training.seed_everything(ctx.seed)
            given = dataclasses.replace(recipe(epochs), plan=plan, **changes)
            model = SmallNet(fail_at, dropout).to(at)
            training.train(ctx, model, *feeds(at), ("a", "b", "c"), given)
            ctx.finish()
            log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0, error=None)


def _needs(precision: str) -> None:
    if missing(precision, CUDA):
        pytest.skip(missing(precision, CUDA))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "int8", "fp8"])
def test_every_precision_learns_and_is_what_ran(tmp_path: Path, precision: str) -> None:
    _needs(precision)
    case = _PlanCase(tmp_path)
    case.train_by(f"hetero-{precision}", epochs=12)

    row = case.row()
    assert row.validity.valid, row.validity.reasons
    assert row.facts["precision_by_device"]["cuda"] == [precision]
    assert row.facts["placed"]["accelerator"].startswith("cuda")
    assert row.metric("images_per_second").source == "monotonic", "the step ends on the CPU"
    assert case.values("test_accuracy")[-1] > 75.0
    moved = row.facts["bytes_per_step"]
    assert moved["to_device"] > 0
    assert moved["from_device"] > 0


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "int8", "fp8"])
def test_all_on_the_gpu_moves_nothing(tmp_path: Path, precision: str) -> None:
    _needs(precision)
    name = "accelerator" if precision == "fp32" else f"accelerator-{precision}"
    case = _PlanCase(tmp_path)
    case.train_by(name, epochs=8)

    row = case.row()
    assert row.validity.valid, row.validity.reasons
    assert row.facts["bytes_per_step"] == {"to_device": 0, "from_device": 0, "images": 16}
    assert row.facts["graphs_ran"] == "cuda-graph"
    assert row.metric("images_per_second").source == "cuda-event"


@pytest.mark.parametrize("name", ["hetero-fp32", "hetero-int8", "hetero-bf16"])
def test_killed_and_resumed_is_bitwise_the_same(tmp_path: Path, name: str) -> None:
    _needs(name.partition("-")[2])
    whole, case = _PlanCase(tmp_path / "whole"), _PlanCase(tmp_path / "killed")
    whole.train_by(name, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        case.train_by(name, epochs=4, fail_at=13)

    case.train_by(name, epochs=4, resume=True)

    for metric in whole.row().metrics:
        if metric.name not in _TIMED:
            assert case.values(metric.name) == metric.values


@pytest.mark.parametrize("name", ["accelerator-bf16", "accelerator-int8"])
def test_a_captured_step_resumes_bitwise_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its seeds are drawn step by step, however few of the steps the host sees."""
    _needs(name.partition("-")[2])
    whole, case = _PlanCase(tmp_path / "whole"), _PlanCase(tmp_path / "stopped")
    whole.train_by(name, epochs=6)
    run_epoch = training.Training.run_epoch

    def stops(self: Any) -> Any:
        if self.epoch == 3:
            raise KeyboardInterrupt
        return run_epoch(self)

    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "run_epoch", stops)
        with pytest.raises(KeyboardInterrupt):
            case.train_by(name, epochs=6)

    case.train_by(name, epochs=6, resume=True)

    for metric in whole.row().metrics:
        if metric.name not in _TIMED:
            assert case.values(metric.name) == metric.values


@pytest.mark.parametrize("name", ["accelerator-bf16", "accelerator-int8"])
def test_an_overflow_in_a_captured_step_keeps_the_last_good_checkpoint(
    tmp_path: Path, name: str
) -> None:
    """As on a CPU (`test_training_plan`): epoch 3 begins with a rate that no weight survives, long
    after the step was captured; its second update is the one to go, and the epoch ends with it."""
    _needs(name.partition("-")[2])
    case = _PlanCase(tmp_path)
    case.train_by(name, epochs=6, dropout=0.0, schedule=MultiStep(0.05, (2,), gamma=1e36))

    row = case.row()
    assert row.facts["graphs_ran"] == "cuda-graph"
    (reason,) = row.validity.reasons
    found = re.match(r"diverged: loss is NaN/inf at epoch 3, update 2: layer '(\w+)' g", reason)
    assert found is not None, reason
    assert found.group(1) == row.facts["overflow"]["layer"]
    assert row.facts["overflow"]["nan"] + row.facts["overflow"]["inf"] > 0
    assert [math.isfinite(loss) for loss in case.values("train_loss")] == [True, True, False]
    with EventLog(tmp_path / "again.jsonl") as log:
        ctx = RowContext(case.plan, log, tmp_path, device=CUDA, profile="short", resume=True)
        state = ctx.checkpoints.load()
    assert state is not None
    assert state["epoch"] == 2
    assert all(torch.isfinite(each).all() for each in state["model"].values())


def test_a_lookout_sees_late_and_waits_for_nothing() -> None:
    scalar = torch.zeros((), dtype=torch.float64, device=CUDA)
    lookout = Lookout(scalar)
    seen = []
    for number in range(1, 301):
        scalar.fill_(number)
        seen.append(lookout.look())
        if number % 50 == 0:
            torch.cuda.synchronize()

    assert seen[0] == 0
    assert seen == sorted(seen)
    assert 200 <= seen[-1] <= 300


def test_the_gpu_trains_what_the_cpu_trains(tmp_path: Path) -> None:
    case = _PlanCase(tmp_path / "gpu")
    case.train_by("hetero-fp32", epochs=4)
    plain = Case(tmp_path / "cpu", CPU)
    plain.train(recipe(4))

    assert case.values("train_loss") == pytest.approx(plain.values("train_loss"), rel=1e-3)
