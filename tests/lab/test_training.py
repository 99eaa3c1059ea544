"""The training loop on CPU: what it records, when it stops, that a resumed row is the same row."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest
import torch
from training_cases import CLASSES, CPU, Case, SmallNet, feeds, recipe

from narrowgauge_contract.errors import NotApplicableError, UnknownNameError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.outcome import Status
from narrowgauge_lab import precision, torch_compat, training, training_checkpoints
from narrowgauge_lab.checkpoint import CheckpointMismatchError, Checkpoints
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.history import EPOCH_METRICS, SCALING_METRICS
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.schedule import Cosine

#: Timings differ from run to run; everything else must not.
_TIMED = {"images_per_second", "epoch_seconds"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny layers on a shared machine: one thread is faster than threads that wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _state(model: torch.nn.Module) -> dict:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _assert_equal_states(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_the_loss_falls_and_the_network_learns(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.train(recipe(epochs=8))

    losses = case.values("train_loss")
    assert losses[-1] < 0.5 * losses[0]
    assert case.values("test_accuracy")[-1] > 80.0
    assert case.row().validity.valid


def test_every_epoch_has_every_metric_with_unit_and_source(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.train(recipe(epochs=3))

    metrics = {metric.name: metric for metric in case.row().metrics}
    assert set(metrics) == set(EPOCH_METRICS)
    for name, metric in metrics.items():
        assert metric.index == "epoch"
        assert len(metric.values) == 3
        assert metric.unit == EPOCH_METRICS[name][0]
        assert metric.source
    assert metrics["learning_rate"].values == pytest.approx((0.05, 0.05, 0.005))
    assert all(0 < value < 1e9 for value in metrics["images_per_second"].values)


def test_training_measures_are_over_all_images_also_of_the_partial_batch(tmp_path: Path) -> None:
    """With a rate of 0 and no dropout, the training pass is one evaluation in train mode."""
    case = Case(tmp_path)
    model = case.train(recipe(epochs=1, rate=0.0), dropout=0.0)

    (accuracy,) = case.values("train_accuracy")
    assert accuracy * 70 / 100 == pytest.approx(round(accuracy * 70 / 100))
    assert case.row().facts["training_images"] == 70
    # Batch normalisation saw 5 batches (16 · 4 + 6), not 4.
    assert int(model.norm.num_batches_tracked) == 5


def test_test_measures_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """The mean over 33 images in batches of 20 and 13 is the mean over all at once."""
    case = Case(tmp_path)
    model = case.train(recipe(epochs=2))
    _, test_set = feeds()
    images, labels = test_set.batch(torch.arange(33))
    model.eval()
    with torch.no_grad():
        logits = model(images)

    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert case.values("test_loss")[-1] == pytest.approx(loss, rel=1e-5)
    accuracy = 100.0 * (logits.argmax(1) == labels).double().mean().item()
    assert case.values("test_accuracy")[-1] == pytest.approx(accuracy)


def test_the_confusion_matrix_is_of_the_last_epoch_on_the_whole_test_set(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.train(recipe(epochs=3))

    (side_file,) = case.row().side_files
    assert side_file.path == "row-0/confusion.json"
    table = json.loads((tmp_path / side_file.path).read_text())
    counts = np.array(table["counts"])
    assert table["labels"] == list(CLASSES)
    assert counts.shape == (3, 3)
    assert counts.sum() == 33
    assert 100.0 * np.trace(counts) / 33 == pytest.approx(case.values("test_accuracy")[-1])
    # Rows are the true classes.
    true = np.bincount(feeds()[1].labels.numpy(), minlength=3)
    assert counts.sum(axis=1).tolist() == true.tolist()


@pytest.mark.parametrize("each_update", [False, True])
def test_updates_have_the_rate_of_their_time(tmp_path: Path, each_update: bool) -> None:
    """70 images in batches of 20: four updates an epoch."""
    seen: List[float] = []

    class Watched(SGD):
        def step(self, skip: Optional[torch.Tensor] = None) -> None:
            seen.append(self.rate.item())
            super().step(skip)

    schedule = Cosine(0.05, 2, each_update=each_update)
    watched = functools.partial(Watched, rate=0.05, momentum=0.9)
    given = recipe(epochs=2, batch_size=20)
    case = Case(tmp_path)
    case.train(dataclasses.replace(given, schedule=schedule, optimizer=watched))

    times = [k / 4 if each_update else k // 4 for k in range(8)]
    assert seen == pytest.approx([schedule.rate(time) for time in times])
    assert case.values("learning_rate") == pytest.approx((0.05, 0.025)), "as an epoch begins"


def test_a_seed_fixes_weights_and_metrics(tmp_path: Path) -> None:
    first, second = Case(tmp_path / "a"), Case(tmp_path / "b")
    one, two = first.train(recipe()), second.train(recipe())

    _assert_equal_states(_state(one), _state(two))
    assert first.values("train_loss") == second.values("train_loss")


@pytest.mark.parametrize("killed_in_epoch", [2, 3])
def test_killed_and_resumed_is_bitwise_the_same_as_never_killed(
    tmp_path: Path, killed_in_epoch: int
) -> None:
    whole = Case(tmp_path / "whole")
    expected = _state(whole.train(recipe(epochs=4)))
    case = Case(tmp_path / "killed")
    # Five batches an epoch: in the middle of the given one.
    with pytest.raises(KeyboardInterrupt):
        case.train(recipe(epochs=4), fail_at=5 * (killed_in_epoch - 1) + 3)
    assert case.row().status is Status.UNFINISHED

    resumed = case.train(recipe(epochs=4), resume=True)

    _assert_equal_states(expected, _state(resumed))
    row = case.row()
    assert row.status is Status.COMPLETE
    assert row.facts["resumed_after_epoch"] == killed_in_epoch - 1
    assert "began_elsewhere" not in row.facts
    for metric in whole.row().metrics:
        values = case.values(metric.name)
        assert len(values) == 4
        if metric.name not in _TIMED:
            assert values == metric.values


def test_killed_twice_and_resumed_twice_is_the_same_too(tmp_path: Path) -> None:
    whole = Case(tmp_path / "whole")
    expected = _state(whole.train(recipe(epochs=5)))
    case = Case(tmp_path / "killed")
    for fail_at, resume in ((8, False), (7, True)):
        with pytest.raises(KeyboardInterrupt):
            case.train(recipe(epochs=5), fail_at=fail_at, resume=resume)

    resumed = case.train(recipe(epochs=5), resume=True)

    _assert_equal_states(expected, _state(resumed))
    assert case.values("train_loss") == whole.values("train_loss")


@pytest.mark.parametrize("killed_in_epoch", [(2,), (2, 3)])
def test_what_was_carried_to_another_host_says_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in_epoch: Tuple[int, ...]
) -> None:
    """Checkpoints without the run's events; weights are the same, and times of two places none."""
    whole = Case(tmp_path / "whole")
    expected = _state(whole.train(recipe(epochs=4)))
    sources = [f"{number}" * 64 for number in range(3)]
    case = Case(tmp_path / "0")
    facts, trained = training_checkpoints.facts, 0
    for number, epoch in enumerate(killed_in_epoch):
        monkeypatch.setattr(facts, "source_hash", lambda at=number: sources[at])
        fail_at = 5 * (epoch - 1 - trained) + 3
        trained = epoch - 1
        with pytest.raises(KeyboardInterrupt):
            case.train(recipe(epochs=4), fail_at=fail_at, resume=bool(number))
        there = Case(tmp_path / f"{number + 1}")
        shutil.copytree(case.out / "checkpoints", there.out / "checkpoints")
        case = there
    last = len(killed_in_epoch)
    monkeypatch.setattr(facts, "source_hash", lambda: sources[last])

    resumed = case.train(recipe(epochs=4), resume=True)

    _assert_equal_states(expected, _state(resumed))
    assert case.row().facts["began_elsewhere"] == [
        f"source {sources[at][:12]} until epoch {epoch - 1}, {sources[at + 1][:12]} from there on"
        for at, epoch in enumerate(killed_in_epoch)
    ]
    assert case.values("test_loss") == whole.values("test_loss")
    assert not {metric.name for metric in case.row().metrics} & _TIMED


def test_a_run_that_was_not_asked_to_resume_starts_anew(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.train(recipe(epochs=3))
    first = case.values("train_loss")
    case = Case(tmp_path / "again")
    case.train(recipe(epochs=3))

    assert "resumed_after_epoch" not in case.row().facts
    assert case.values("train_loss") == first


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path: Path) -> None:
    case = Case(tmp_path, parameters={"lr": 0.05})
    with pytest.raises(KeyboardInterrupt):
        case.train(recipe(), fail_at=8)
    other = Case(tmp_path, parameters={"lr": 0.1})

    with pytest.raises(CheckpointMismatchError, match="another configuration"):
        other.train(recipe(), resume=True)


def test_no_checkpoint_is_due_before_its_time(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.train(recipe(epochs=3, checkpoint_seconds=3600.0))

    assert list(tmp_path.rglob("checkpoint-*")) == []


def test_a_checkpoint_that_takes_long_is_written_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each epoch 2 s and each write 1 s: due every second, and written once in twenty."""
    assert _saved(tmp_path, monkeypatch, itertools.repeat(1.0)) == [1, 11]


def test_one_checkpoint_that_took_long_puts_off_none_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk was busy for half a minute: another save takes a moment, as the first did."""
    took = itertools.chain([0.01, 30.0], itertools.repeat(0.01))
    assert _saved(tmp_path, monkeypatch, took) == list(range(1, 15))


def _saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took: Iterator[float]) -> List[int]:
    """After which of 15 epochs of 2 s a checkpoint is written that is due every second."""
    clock, saved = [0.0], []

    class Slow(Checkpoints):
        def save(self, state: Dict[str, Any]) -> Path:
            clock[0] += next(took)
            saved.append(state["epoch"])
            return self.folder

    def run_epoch(self: training.Training) -> Any:
        clock[0] += 2.0
        return epoch(self)

    epoch = training.Training.run_epoch
    monkeypatch.setattr(training.Training, "run_epoch", run_epoch)
    faked = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr(training, "time", faked)
    monkeypatch.setattr(training_checkpoints, "time", faked)
    monkeypatch.setattr("narrowgauge_lab.context.Checkpoints", Slow)
    Case(tmp_path).train(recipe(epochs=15, checkpoint_seconds=1.0))
    return saved


def test_nothing_is_stepped_once_a_training_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    made = training.Training._stepper

    def keep(self: training.Training) -> Any:
        kept.append(made(self))
        return kept[-1]

    monkeypatch.setattr(training.Training, "_stepper", keep)
    Case(tmp_path).train(recipe(epochs=1))

    with pytest.raises(RuntimeError, match="after the training was over"):
        kept[0](torch.arange(3))


@pytest.mark.parametrize("rate", [1e30, math.inf])
def test_a_diverged_row_is_invalid_and_keeps_what_it_measured(tmp_path: Path, rate: float) -> None:
    case = Case(tmp_path)
    case.train(recipe(epochs=4, rate=rate))

    row = case.row()
    assert row.validity.reasons == ("diverged: loss is NaN/inf at epoch 1",)
    (loss,) = case.values("train_loss")
    assert not math.isfinite(loss)
    assert all(len(metric.values) == 1 for metric in row.metrics)
    assert not list(tmp_path.rglob("checkpoint-*")), "weights that are NaN are not worth resuming"


def test_training_stops_at_the_update_that_diverged_not_at_the_end(tmp_path: Path) -> None:
    """The first of five updates spoils the weights, and the second one's loss says so."""
    model = Case(tmp_path).train(recipe(epochs=4, rate=math.inf), fail_at=99)

    assert model.forwards == 2


def test_another_precision_than_asked_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path)
    linear = torch.nn.functional.linear

    def double(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear(inputs.double(), weight.double(), bias.double()).float()

    # As a library does that changes every model of its process.
    monkeypatch.setattr(torch.nn.functional, "linear", double)
    case.train(recipe(epochs=1))

    row = case.row()
    assert row.facts["precision_ran"] == "fp32+fp64"
    (reason,) = row.validity.reasons
    assert reason.startswith("asked for precision fp32, ran fp32+fp64: ")
    assert "addmm(float64, float64) × 1 on cpu" in reason
    assert "convolution" not in reason, "only what differs is named"
    if torch_compat.has_dispatch_mode():
        assert "aten::mm(float64, float64)" in reason, "the backward pass is seen as well"
    else:
        assert "AddmmBackward(float64, float64) × 1 on cpu" in reason


def test_looking_at_a_step_changes_neither_model_nor_generators(tmp_path: Path) -> None:
    """Two rows, one of which is looked at twice, end with the same weights."""
    states = []
    for looks in (1, 2):
        case = Case(tmp_path / str(looks))
        training_set, test_set = feeds()
        with EventLog(case.out / EVENTS_FILE) as log:
            ctx = RowContext(case.plan, log, case.out, device=CPU, profile="short")
            training.seed_everything(ctx.seed)
            loop = training.Training(ctx, SmallNet(), training_set, test_set, recipe(epochs=2))
            for _ in range(looks):
                loop.prepare()
            assert loop.model.training
            loop.run()
        states.append(_state(loop.model))

    _assert_equal_states(*states)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_reduced_precision_on_cpu_trains_or_says_what_works(tmp_path: Path, name: str) -> None:
    case = Case(tmp_path)
    if name not in precision.available(torch.device("cpu")):
        with pytest.raises(NotApplicableError, match=f"precision {name}") as caught:
            case.train(recipe(precision=name))
        assert "-p precision=fp32" in caught.value.next_step
        return
    case.train(recipe(epochs=8, precision=name))

    row = case.row()
    assert row.validity.valid
    assert row.facts["precision_ran"] == name
    assert case.values("train_loss")[-1] < 0.6 * case.values("train_loss")[0]
    scaled = {metric.name for metric in row.metrics} & set(SCALING_METRICS)
    assert scaled == (set(SCALING_METRICS) if name == "fp16" else set())


def test_reduced_precision_resumes_exactly_with_its_loss_scale(tmp_path: Path) -> None:
    name = "fp16"
    if name not in precision.available(torch.device("cpu")):
        pytest.skip("this torch has no fp16 autocast on CPU")
    whole, case = Case(tmp_path / "whole"), Case(tmp_path / "killed")
    expected = _state(whole.train(recipe(precision=name)))
    with pytest.raises(KeyboardInterrupt):
        case.train(recipe(precision=name), fail_at=13)

    resumed = case.train(recipe(precision=name), resume=True)

    _assert_equal_states(expected, _state(resumed))
    assert case.values("loss_scale") == whole.values("loss_scale")


def test_progress_counts_images_of_all_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowgauge_lab.training._PROGRESS_SECONDS", 0.0)
    Case(tmp_path).train(recipe(epochs=2))

    events = [e for e in read_events(tmp_path / EVENTS_FILE) if e.kind is EventKind.PROGRESS]
    assert [event.data["done"] for event in events] == [16, 32, 48, 64, 70, 86, 102, 118, 134, 140]
    assert {event.data["total"] for event in events} == {140}
    assert [e.data["phase"] for e in events][::5] == ["epoch 1/2", "epoch 2/2"]


def test_unknown_precision_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown precision 'fp61'") as caught:
        precision.enter("fp61", torch.device("cpu"))

    assert "did you mean 'fp16'" in caught.value.next_step


def test_importing_the_loop_draws_nothing(tmp_path: Path) -> None:
    """A row's first draw is the model's initial weights, whatever the parent did before."""
    random.seed(1)
    Case(tmp_path / "a").train(recipe(epochs=1))
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    Case(tmp_path / "b").train(recipe(epochs=1))

    assert Case(tmp_path / "a").values("train_loss") == Case(tmp_path / "b").values("train_loss")
