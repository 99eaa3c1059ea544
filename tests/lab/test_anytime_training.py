"""Training of networks of several exits: what is recorded, that every way of combining trains, that
a stopped row goes on as if it had not been, and what the side file holds."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from anytime_cases import EXITS, AnytimeCase, ThreeExits, made_up, recipe, splits
from torch import nn
from training_cases import CPU, SmallNet, feeds
from training_cases import recipe as plain_recipe

from narrowgauge_contract.errors import BadValueError, UsageError
from narrowgauge_contract.events import EVENTS_FILE, EventLog
from narrowgauge_contract.job import RowPlan
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.placement import BUILTIN, parse_plan
from narrowgauge_lab import checkpoint, precision, training
from narrowgauge_lab.anytime import logits_file
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.feeds import make_splits
from narrowgauge_lab.anytime.gradients import (
    Combination,
    Orthogonalised,
    PCGrad,
    Sum,
    Weighted,
)
from narrowgauge_lab.anytime.objective import ExitLosses, LastExitLoss, Losses, Objective
from narrowgauge_lab.anytime.stepping import ExitStepper
from narrowgauge_lab.anytime.training import Stage
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.distributed import ALONE, Group
from narrowgauge_lab.errors import DataCorruptError
from narrowgauge_lab.evaluation import evaluate
from narrowgauge_lab.optim import SGD, Adam
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

_TIMED = {"images_per_second", "epoch_seconds", "latency"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _assert_same(one: nn.Module, other: nn.Module) -> None:
    mine, its = one.state_dict(), other.state_dict()
    assert [name for name in mine if not torch.equal(mine[name], its[name])] == []


def _assert_same_metrics(one: AnytimeCase, other: AnytimeCase) -> None:
    mine = {metric.name: metric.values for metric in one.row().metrics}
    its = {metric.name: metric.values for metric in other.row().metrics}
    assert mine.keys() == its.keys()
    for name, values in mine.items():
        if not any(timed in name for timed in _TIMED):
            assert np.array_equal(values, its[name], equal_nan=True), name


class _OneExit(nn.Module):
    """A network of one output as one of several with one exit."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallNet()

    def forward(self, images: torch.Tensor) -> List[torch.Tensor]:
        return [self.net(images)]


def _train_plain(out: Path, model: nn.Module, given: training.Recipe) -> nn.Module:
    with EventLog(out / EVENTS_FILE) as log:
        plan = RowPlan(index=0, repeat=0, seed=3, parameters={})
        ctx = RowContext(plan, log, out, device=CPU, profile="short")
        training.seed_everything(3)
        assert training.train(ctx, model, *feeds(), ("a", "b", "c"), given)
    return model


@pytest.mark.parametrize("combination", [Sum(), Orthogonalised(), PCGrad()], ids=str)
def test_one_exit_is_the_plain_loop_bit_for_bit(tmp_path: Path, combination: Combination) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    torch.manual_seed(0)
    plain = _train_plain(tmp_path / "a", SmallNet(), plain_recipe(epochs=2))
    torch.manual_seed(0)
    given = dataclasses.replace(plain_recipe(epochs=2), objective=ExitLosses(1, combination))
    other: Any = _train_plain(tmp_path / "b", _OneExit(), given)

    _assert_same(plain, other.net)


@pytest.mark.parametrize(
    "combination",
    [Sum(), Weighted((1.0, 0.5, 0.3)), PCGrad(), Orthogonalised(), Orthogonalised(momentum=0.9)],
    ids=["sum", "weighted", "pcgrad", "osgd", "osgd-momentum"],
)
def test_every_way_of_combining_learns(tmp_path: Path, combination: Combination) -> None:
    case = AnytimeCase(tmp_path)
    case.run(recipe(ExitLosses(EXITS, combination, cosine_images=32), epochs=6))

    row = case.row()
    assert row.validity.valid
    assert case.trained
    for k in range(EXITS):
        losses = case.values(f"exit{k}_train_loss")
        assert len(losses) == 6
        assert losses[-1] < 0.8 * losses[0]
        assert case.values(f"exit{k}_test_accuracy")[-1] > 50
    for name in ("gradient_cosine_0_1", "gradient_cosine_0_2", "gradient_cosine_1_2"):
        assert all(-1 <= value <= 1 for value in case.values(name))
    weights = combination.weights(EXITS)
    total = sum(w * case.values(f"exit{k}_train_loss")[-1] for k, w in enumerate(weights))
    assert case.values("train_loss")[-1] == pytest.approx(total, rel=1e-6)
    assert case.values("test_accuracy") == case.values(f"exit{EXITS - 1}_test_accuracy")


def test_looking_at_cosines_changes_nothing(tmp_path: Path) -> None:
    one = AnytimeCase(tmp_path / "a").run(recipe(ExitLosses(EXITS)))
    other = AnytimeCase(tmp_path / "b").run(recipe(ExitLosses(EXITS, cosine_images=16)))

    _assert_same(one, other)


def _two_stages() -> Tuple[Stage, ...]:
    return (Stage("trunk", recipe(LastExitLoss(EXITS - 1), epochs=3)),)


def test_the_first_stage_trains_the_trunk_and_leaves_other_heads_alone(tmp_path: Path) -> None:
    """Weight decay included; they are trained afterwards."""
    torch.manual_seed(3)
    training.seed_everything(3)
    fresh = ThreeExits()
    case = AnytimeCase(tmp_path)
    seen: dict = {}

    class Watched(ExitLosses):
        def begin_epoch(self, epoch: int, model: nn.Module) -> None:
            seen.setdefault(epoch, {k: v.clone() for k, v in model.state_dict().items()})

    net = case.run(recipe(Watched(EXITS), epochs=2), stages=_two_stages())

    between = seen[0]
    start = fresh.state_dict()
    for name in ("heads.0.weight", "heads.1.bias"):
        assert torch.equal(between[name], start[name])
        assert not torch.equal(between[name], net.state_dict()[name])
    for name in ("heads.2.weight", "convs.0.weight", "norms.1.running_mean"):
        assert not torch.equal(between[name], start[name])
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert case.row().metric("trunk_exit2_train_loss") is not None
    assert case.row().metric("trunk_exit0_train_loss") is None
    assert len(case.values("trunk_train_loss")) == 3
    assert len(case.values("train_loss")) == 2


def test_no_graph_from_before_a_stage_lives_on_in_it(tmp_path: Path) -> None:
    """Its nodes would belong to another stream than the steps that are captured."""
    alive: List[int] = []

    class Watched(ExitLosses):
        def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
            if model.training and not alive:
                gc.collect()
                known = [each for each in gc.get_objects() if type(each) is torch.Tensor]
                alive.append(sum(each.grad_fn is not None for each in known))
            return super().losses(model, images, labels)

    stage = dataclasses.replace(_two_stages()[0], recipe=recipe(Watched(EXITS), epochs=1))
    AnytimeCase(tmp_path).run(recipe(ExitLosses(EXITS), epochs=1), stages=(stage,))

    assert alive == [0]


#: 5 updates an epoch; 3 epochs of the first stage, 3 of the second. A pass of the network is also
#: made of what looks at it, but not in training mode.
@pytest.mark.parametrize("fail_at", [8, 15 + 2, 15 + 8], ids=["first", "between", "second"])
def test_a_row_stopped_in_either_stage_goes_on_as_if_it_had_not_been(
    tmp_path: Path, fail_at: int
) -> None:
    objective = ExitLosses(EXITS, Orthogonalised(), cosine_images=16)
    whole = AnytimeCase(tmp_path / "whole")
    expected = whole.run(recipe(objective), stages=_two_stages())
    case = AnytimeCase(tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        case.run(recipe(objective), stages=_two_stages(), fail_at=fail_at)
    assert case.row().status is Status.UNFINISHED

    resumed = case.run(recipe(objective), stages=_two_stages(), resume=True)

    _assert_same(expected, resumed)
    _assert_same_metrics(whole, case)
    facts = case.row().facts
    assert facts["trunk_resumed_after_epoch"] == (1 if fail_at == 8 else 3)
    assert facts.get("resumed_after_epoch") == {8: None, 17: None, 23: 1}[fail_at]
    for name in ("trunk_graphs_ran", "graphs_ran"):
        assert facts[name] == whole.row().facts[name]
    one, other = (read_logits(c.out / "row-0" / LOGITS_FILE) for c in (whole, case))
    assert np.array_equal(one.test.logits, other.test.logits)


@pytest.mark.parametrize(
    ("where", "name"),
    [(logits_file, "write_logits"), (RowContext, "finish")],
    ids=["by its answers", "after train_anytime"],
)
def test_a_row_stopped_after_its_training_trains_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    case = AnytimeCase(tmp_path / "killed")
    with monkeypatch.context() as patch:
        patch.setattr(where, name, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            case.run(recipe(), stages=_two_stages())

    resumed: Any = case.run(recipe(), stages=_two_stages(), resume=True)

    assert resumed.passes == 0
    whole = AnytimeCase(tmp_path / "whole")
    _assert_same(whole.run(recipe(), stages=_two_stages()), resumed)
    _assert_same_metrics(whole, case)
    before, after = whole.row().facts, case.row().facts
    assert {name: after.get(name) for name in before} == before
    names = {Path(each.path).name for each in case.row().side_files}
    assert names == {"confusion.json", LOGITS_FILE}


def test_a_checkpoint_that_does_not_know_how_steps_ran_is_taken_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older version."""
    case = AnytimeCase(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(logits_file, "write_logits", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            case.run(recipe())
    store = checkpoint.Checkpoints(tmp_path / "checkpoints" / "row-0", resume=True)
    state = store.load()
    assert state is not None
    del state["graphs_ran"]
    store.save(state)

    resumed: Any = case.run(recipe(), resume=True)

    assert resumed.passes == 0
    assert case.row().facts["resumed_after_epoch"] == 3
    assert "graphs_ran" not in case.row().facts


def _interrupt(*given: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("rate", [0.05, 1e30], ids=["trained", "diverged"])
def test_no_stage_keeps_a_checkpoint_once_the_row_clears_its_own(
    tmp_path: Path, rate: float
) -> None:
    """As a row does after its end is recorded, also where its main training diverged."""
    AnytimeCase(tmp_path).run(recipe(rate=rate), stages=_two_stages())
    kept = [path.parent.name for path in tmp_path.rglob("checkpoint-*.pt")]
    checkpoint.Checkpoints(tmp_path / "checkpoints" / "row-0").clear()

    assert "trunk" in kept
    assert list(tmp_path.rglob("checkpoint-*.pt")) == []


def test_a_stage_leaves_no_confusion_matrix_of_the_row(tmp_path: Path) -> None:
    case = AnytimeCase(tmp_path)
    case.run(recipe(rate=1e30), stages=_two_stages())

    assert not case.trained
    assert case.row().metric("trunk_test_accuracy") is not None
    assert case.row().side_files == ()
    assert list(tmp_path.rglob("confusion.json")) == []


def test_the_side_file_has_what_every_exit_says_of_every_image(tmp_path: Path) -> None:
    case = AnytimeCase(tmp_path)
    net = case.run(recipe())

    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    sets = splits()
    for split, feed in ((run.test, sets.test), (run.val, sets.validation)):
        assert split is not None
        images, labels = feed.batch(torch.arange(len(feed)))
        with torch.no_grad():
            expected = torch.stack(net(images)).numpy()
        assert np.allclose(split.logits, expected, atol=1e-5)
        assert np.array_equal(split.labels, labels.numpy())
        assert split.macs is None
    assert np.array_equal(run.test.samples, np.arange(40))
    costs = exit_costs(net, torch.zeros(1, 3, 8, 8))
    assert run.cumulative_macs.tolist() == list(costs.cumulative)
    assert run.direct_macs.tolist() == list(costs.direct)
    assert case.row().facts["latency_images"] == 30
    held = sum(each.numel() * each.element_size() for each in net.state_dict().values())
    assert case.values("weights_bytes") == (held,)
    assert held > 4 * sum(each.numel() for each in net.parameters()), "buffers are saved too"
    assert (run.base_accuracy, run.base_macs) == (None, None)
    assert run.latency is not None
    assert (np.diff(run.latency, axis=0) > 0).all(), "a later answer comes later"
    assert run.family == "three-exits"
    assert run.synthetic
    for k in range(EXITS):
        accuracy = 100 * (run.test.logits[k].argmax(1) == run.test.labels).mean()
        assert case.values(f"exit{k}_test_accuracy")[-1] == pytest.approx(accuracy)
        assert case.values(f"exit{k}_accuracy") == pytest.approx((accuracy,))


class _Depends(ThreeExits):
    """Says that brighter images cost more."""

    def advance(self, exit: int, state: Any, head: bool = True) -> Any:
        answer = super().advance(exit, state, head)
        own = state[-1] if exit else state[0].mean((1, 2, 3)).double()
        work = 1000.0 * (exit + 1) + own
        return dataclasses.replace(answer, state=(*answer.state, own), macs=work)


class _Seen(ThreeExits):
    """Notes the first value of each image that it begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: List[Tuple[int, float]] = []

    def begin(self, images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        self.begun.append((len(images), float(images[0, 0, 0, 0])))
        return super().begin(images)


def test_latencies_are_of_several_images_in_turn_one_at_a_time() -> None:
    net = _Seen()
    images = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 3, 8, 8)
    taken = logits_file.latencies(net, images, precision.enter("fp32", CPU), 7)

    assert taken.shape == (EXITS, 7)
    assert net.begun[-7:] == [(1, float(number % 3)) for number in range(7)]
    assert len(net.begun) > 7, "some are warm-ups"


def test_macs_of_each_image_are_kept_where_they_depend_on_it(tmp_path: Path) -> None:
    AnytimeCase(tmp_path).run(recipe(epochs=1), net=_Depends())

    macs = read_logits(tmp_path / "row-0" / LOGITS_FILE).test.macs
    images, _ = splits().test.batch(torch.arange(40))
    own = images.mean((1, 2, 3)).double().numpy()
    assert macs is not None
    assert np.allclose(macs, np.stack([1000 + own, 3000 + 2 * own, 6000 + 3 * own]))


@pytest.mark.parametrize("combination", [Sum(), Orthogonalised()], ids=["sum", "osgd"])
@pytest.mark.parametrize("where", ["trunk", "main"])
def test_a_diverged_training_stops_and_leaves_no_answers(
    tmp_path: Path, where: str, combination: Combination
) -> None:
    wild = recipe(ExitLosses(EXITS, combination), rate=1e30)
    stages = (Stage("trunk", wild),) if where == "trunk" else _two_stages()
    case = AnytimeCase(tmp_path)
    case.run(recipe() if where == "trunk" else wild, stages=stages)

    assert not case.trained
    assert case.row().validity.reasons == ("diverged: loss is NaN/inf at epoch 1",)
    assert (case.row().metric("train_loss") is None) == (where == "trunk")
    assert not (tmp_path / "row-0" / LOGITS_FILE).exists()


def test_weights_of_a_file_are_taken_and_nothing_is_trained(tmp_path: Path) -> None:
    first = AnytimeCase(tmp_path / "a")
    trained = first.run(recipe())
    checkpoint.write_weights(tmp_path / "weights.pt", trained)
    case = AnytimeCase(tmp_path / "b")
    net: Any = case.run(recipe(), weights=tmp_path / "weights.pt")

    assert net.passes == 0
    assert case.values("exit2_accuracy") == first.values("exit2_accuracy")
    assert case.row().metric("train_loss") is None
    assert case.row().facts["weights_from"] == "the file weights.pt"


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    checkpoint.write_weights(tmp_path / "weights.pt", SmallNet())

    with pytest.raises(DataCorruptError, match="not hold weights of this ThreeExits"):
        AnytimeCase(tmp_path / "row").run(recipe(), weights=tmp_path / "weights.pt")


def test_a_recipe_without_objective_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="3 exits and is to be trained without an objective"):
        AnytimeCase(tmp_path).run(dataclasses.replace(recipe(), objective=None))


class _Leaving(Objective):
    """Trains two exits of three, and a cost beside them."""

    exits = EXITS
    extra = "ponder_loss"

    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        answers = model(images)
        found = [F.cross_entropy(each, labels) for each in answers]
        return Losses((found[0], None, found[2]), answers[-1], extra=answers[0].pow(2).mean())


@pytest.mark.parametrize("combination", [Sum(), Orthogonalised()], ids=["sum", "osgd"])
def test_an_objective_may_leave_exits_out_and_add_a_cost(
    tmp_path: Path, combination: Combination
) -> None:
    objective = _Leaving()
    objective.combination = combination
    objective.cosine_images = 16
    case = AnytimeCase(tmp_path)
    case.run(recipe(objective, epochs=2))

    assert all(math.isnan(value) for value in case.values("exit1_train_loss"))
    assert all(math.isnan(value) for value in case.values("gradient_cosine_0_1"))
    assert all(math.isfinite(value) for value in case.values("gradient_cosine_0_2"))
    assert all(value > 0 for value in case.values("ponder_loss"))
    parts = [case.values(name)[-1] for name in ("exit0_train_loss", "exit2_train_loss")]
    assert case.values("train_loss")[-1] == pytest.approx(
        sum(parts) + case.values("ponder_loss")[-1], rel=1e-6
    )


def test_adam_goes_with_projections(tmp_path: Path) -> None:
    adam = functools.partial(Adam, rate=1e-2, betas=(0.99, 0.999))
    given = dataclasses.replace(recipe(ExitLosses(EXITS, PCGrad()), epochs=4), optimizer=adam)
    case = AnytimeCase(tmp_path)
    case.run(given)

    assert case.values("train_loss")[-1] < case.values("train_loss")[0]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_reduced_precision_trains_with_projections(tmp_path: Path, name: str) -> None:
    if name not in precision.available(CPU):
        pytest.skip(f"no {name} on this CPU with torch {torch.__version__}")
    given = recipe(ExitLosses(EXITS, Orthogonalised()), epochs=4)
    case = AnytimeCase(tmp_path)
    case.run(dataclasses.replace(given, precision=name))

    assert case.row().validity.valid
    assert case.values("train_loss")[-1] < case.values("train_loss")[0]


class _Faint(ExitLosses):
    """Losses whose gradients are 0 in fp16 unless they are scaled."""

    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        found = super().losses(model, images, labels)
        return Losses(tuple(each * 1e-7 for each in found.per_exit), found.logits)


def test_cosines_in_fp16_are_of_scaled_losses() -> None:
    if "fp16" not in precision.available(CPU):
        pytest.skip(f"no fp16 on this CPU with torch {torch.__version__}")
    objective = _Faint(EXITS, cosine_images=20)

    def values(name: str) -> Any:
        torch.manual_seed(0)
        net = ThreeExits()
        optimizer = objective.combination.optimizer(SGD(net, 0.5), EXITS)
        mode, feed = precision.enter(name, CPU), splits().validation
        return ExitStepper(net, optimizer, feed, mode, ALONE, 8, "off", objective).cosines()

    expected = values("fp32")
    assert len(expected) == 3
    assert values("fp16") == pytest.approx(expected, abs=0.01)


class _Plain(ThreeExits):
    """No normalisation, no dropout: the mean gradient of a batch is that of its parts."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.norms = nn.ModuleList(nn.Identity() for _ in range(EXITS))


@dataclasses.dataclass(frozen=True)
class _Pair(Group):
    """One of two processes; what the other has is added where they talk."""

    size: int = 2
    other: Any = None

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        tensor.add_(self.other.optimizer.gradient)


def test_processes_project_the_gradients_of_the_whole_batch() -> None:
    """Not the sum of what each projects: 8 images in parts of 5 and 3 are the step of all 8."""
    objective = ExitLosses(EXITS, Orthogonalised())

    def stepper(group: Group) -> ExitStepper:
        torch.manual_seed(0)
        net = _Plain()
        optimizer = objective.combination.optimizer(SGD(net, 0.5, momentum=0.0), EXITS)
        feed = splits().validation
        mode = precision.enter("fp32", CPU)
        return ExitStepper(net, optimizer, feed, mode, group, 4, "off", objective)

    alone, second = stepper(ALONE), stepper(_Pair(rank=1))
    first = stepper(_Pair(rank=0, other=second))
    indices = torch.arange(7)
    alone(indices)
    mine = second.group.shard(indices)
    second._set_part(len(mine) / len(indices))
    second._gradients(mine)
    first(indices)

    assert torch.allclose(first.optimizer.values, alone.optimizer.values, atol=1e-6)
    assert not torch.allclose(alone.optimizer.values, stepper(ALONE).optimizer.values, atol=1e-3)


_EVERY_WAY = [
    Sum(), Weighted((1.0, 0.5, 0.3)), PCGrad(), Orthogonalised(),
    Orthogonalised(per_tensor=True, rescale=True), Orthogonalised(momentum=0.9, negative_only=True),
]  # fmt: skip


@pytest.mark.parametrize("combination", _EVERY_WAY, ids=str)
def test_an_update_asks_the_device_for_nothing(
    monkeypatch: pytest.MonkeyPatch, combination: Combination
) -> None:
    """Or it could not be captured in a CUDA graph."""
    objective = ExitLosses(EXITS, combination)
    net = ThreeExits().train()
    optimizer = objective.combination.optimizer(SGD(net, 0.5), EXITS)
    mode = precision.enter("fp32", CPU)
    stepper = ExitStepper(net, optimizer, splits().validation, mode, ALONE, 8, "off", objective)

    def asked(*given: Any) -> Any:
        raise AssertionError("the device was asked")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, asked)
    stepper(torch.arange(8))
    monkeypatch.undo()

    assert torch.isfinite(optimizer.values).all()


@dataclasses.dataclass(frozen=True)
class _WithoutImages(Group):
    """A process for which none of the test images is left; the others counted 5, 6 and 7 right."""

    size: int = 2

    def shard(self, indices: torch.Tensor) -> torch.Tensor:
        return indices[:0]

    def largest(self, value: float) -> float:
        return max(value, 3.0)

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        if tensor.shape == (3,):
            tensor.add_(torch.tensor([5, 6, 7]))


def test_a_process_without_test_images_takes_part_in_the_count_of_exits() -> None:
    """Or the others would wait for it."""
    mode = precision.enter("fp32", CPU)
    found = evaluate(ThreeExits(), splits().test, mode, 16, _WithoutImages())

    assert found.exits == pytest.approx((12.5, 15.0, 17.5))


def test_splits_share_no_image_and_are_always_the_same() -> None:
    data = made_up()
    one, other = splits(data=data), splits(data=data)

    assert len(one.training) == 70
    assert not set(one.training_samples) & set(one.validation_samples)
    assert len(set(one.training_samples) | set(one.validation_samples)) == 90
    assert np.array_equal(one.validation_samples, other.validation_samples)
    for feed, samples in (
        (one.training, one.training_samples), (one.validation, one.validation_samples)
    ):  # fmt: skip
        assert np.array_equal(feed.images.numpy(), data.train_images[samples])
        assert np.array_equal(feed.labels.numpy(), data.train_labels[samples])
    assert one.training.augmentation.active
    assert not one.validation.augmentation.active
    assert one.test_whole


def test_limits_cut_training_and_test_not_validation() -> None:
    whole = splits()
    cut = make_splits(made_up(), CPU, validation=20, train_limit=30, test_limit=8)

    assert (len(cut.training), len(cut.validation), len(cut.test)) == (30, 20, 8)
    assert np.array_equal(cut.validation_samples, whole.validation_samples)
    assert np.array_equal(cut.training_samples, whole.training_samples[:30])
    assert not cut.test_whole


def test_another_seed_holds_other_images_out() -> None:
    one, other = (make_splits(made_up(), CPU, validation=20, seed=seed) for seed in (1, 2))

    assert not np.array_equal(one.validation_samples, other.validation_samples)


def test_the_record_says_which_images_were_held_out(tmp_path: Path) -> None:
    case = AnytimeCase(tmp_path)
    case.run(recipe(epochs=1))

    split = case.row().facts["split"]
    assert (split["training"], split["validation"], split["test"]) == (70, 20, 40)
    assert split["seed"] == splits().seed
    assert len(split["validation_sha256"]) == 64


@pytest.mark.parametrize("count", [0, -1, 90, 5000])
def test_a_validation_split_that_leaves_nothing_is_refused(count: int) -> None:
    with pytest.raises(BadValueError, match="images for validation"):
        make_splits(made_up(), CPU, validation=count)


def test_a_plan_goes_with_one_output_only(tmp_path: Path) -> None:
    given = dataclasses.replace(recipe(), plan=parse_plan(BUILTIN["hetero-fp32"], "a plan"))
    with pytest.raises(UsageError, match="networks of one output"):
        AnytimeCase(tmp_path).run(given)
