"""The experiment `ensembles`: each method on made-up images, and members that diverge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from one_row import EXPERIMENTS, Rows
from torch import nn

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import NotApplicableError, UsageError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.outcome import Fold, Row
from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.anytime.feeds import make_splits
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.data import synthetic_data
from narrowgauge_lab.experiments import load_run
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.optim import Adam
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

QUICK = (
    "data=synthetic", "members=3", "epochs=1", "train_limit=64", "validation=30",
    "test_limit=40", "batch_size=32", "width=0.5",
)  # fmt: skip
ROWS = Rows("ensembles", QUICK)
CPU = torch.device("cpu")


def _values(row: Row, name: str) -> Any:
    metric = row.metric(name)
    assert metric is not None, f"no metric {name}"
    return metric.values


def _answers(out: Path) -> Any:
    return read_logits(out / "row-0" / LOGITS_FILE)


@pytest.mark.parametrize("method", ["voting", "bagging", "boosting"])
def test_members_become_a_cumulative_ladder(tmp_path: Path, method: str) -> None:
    row = ROWS.run(tmp_path, f"method={method}", "epochs=2")

    assert row.validity.valid
    assert row.facts["members"] == 3
    assert row.facts["variant"] == f"{method} of 3 lenet5, twin of width 0.5"
    one = _values(row, "exit0_macs")[0]
    for k in range(3):
        assert _values(row, f"exit{k}_macs") == ((k + 1) * one,)
        assert _values(row, f"exit{k}_cumulative_macs") == ((k + 1) * one,)
        assert len(_values(row, f"member{k}_train_loss")) == 2
    run = _answers(tmp_path)
    assert run.names() == ("1 of 3 members", "2 of 3 members", "3 of 3 members")
    assert run.val.images == 30
    # The first rung is the first member, and members are different networks.
    assert _values(row, "exit0_accuracy")[0] == pytest.approx(
        _values(row, "member0_test_accuracy")[-1]
    )
    assert not np.allclose(run.test.logits[0], run.test.logits[1])
    if method == "boosting":  # which is tested as the sum so far, while it is trained
        assert _values(row, "exit2_accuracy")[0] == pytest.approx(
            _values(row, "member2_test_accuracy")[-1]
        )
    assert _values(row, "training_seconds")[0] > 0


@pytest.mark.parametrize("method", ["bagging", "boosting"])
def test_members_learn_the_same_in_either_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    members, seen = ROWS.module("members"), set()
    forward = members.LeNet5.forward

    def looked_at(self: nn.Module, images: torch.Tensor) -> torch.Tensor:
        seen.add(images.is_contiguous(memory_format=torch.channels_last))
        return forward(self, images)

    monkeypatch.setattr(members.LeNet5, "forward", looked_at)
    logits = []
    for layout in ("nchw", "nhwc"):
        seen.clear()
        ROWS.run(tmp_path / layout, f"method={method}", f"layout={layout}", "members=2")
        assert seen == {layout == "nhwc"}
        logits.append(_answers(tmp_path / layout).test.logits)
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["voting", "fusion", "boosting"])
@pytest.mark.parametrize("network", [(), ("network=resnet18", "width=0.0625")], ids=str)
def test_what_is_compiled_of_one_member_serves_all_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: Any, method: str
) -> None:
    """In whole graphs, of which there are as many for three members as for two; here without making
    kernels of them."""
    dynamo = pytest.importorskip("torch._dynamo")
    graphs: List[Any] = []

    def kept(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(call: Any, mode: str, *, whole: bool = False) -> Any:
        return torch.compile(call, backend=kept, dynamic=False, fullgraph=whole)

    monkeypatch.setattr(torch_compat, "compiled", compiled)
    counts = []
    for members in (2, 3):
        dynamo.reset()
        graphs.clear()
        out = tmp_path / f"{members}"
        row = ROWS.run(out, f"method={method}", "compile=true", f"members={members}", *network)
        parts = "" if method == "voting" else ", part by part"
        stage = "fusion" if method == "fusion" else "member1"
        assert row.facts[f"{stage}_compiled"] == f"torch.compile, inductor: full batches{parts}"
        counts.append(len(graphs))
    # Of boosting one more, of members that are frozen and learn no more.
    assert counts == [2, 2] if method == "boosting" else [1, 1]

    ROWS.run(tmp_path / "plain", f"method={method}", *network)
    found, plain = (_answers(tmp_path / each).test.logits for each in ("3", "plain"))
    np.testing.assert_allclose(found, plain, rtol=1e-3, atol=1e-3)


def test_a_member_may_be_the_resnet_of_large_images(tmp_path: Path) -> None:
    members = ROWS.module("members")
    whole = members.make_member("resnet50-imagenet-form", 1.0, 10)
    assert sum(each.numel() for each in whole.parameters()) == 23_528_522
    assert count(whole, torch.zeros(1, 3, 32, 32)).macs == 83_431_424

    row = ROWS.run(tmp_path, "network=resnet50-imagenet-form", "width=0.0625", "members=2")
    assert row.validity.valid
    assert row.facts["variant"] == "voting of 2 resnet50-imagenet-form, twin of width 0.0625"
    assert len(_values(row, "member1_train_loss")) == 1


@pytest.mark.parametrize("batch_size", [1, 21])  # of 64 images: three batches of 21, and one image
def test_the_resnet_of_large_images_takes_no_batch_of_one(tmp_path: Path, batch_size: int) -> None:
    given = ("network=resnet50-imagenet-form", "width=0.0625", f"batch_size={batch_size}")
    with pytest.raises(UsageError, match="would hold one image"):
        ROWS.run(tmp_path, *given)


def test_fusion_trains_all_members_as_one(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "method=fusion")

    assert row.metric("member0_train_loss") is None
    assert _values(row, "exit2_accuracy")[0] == pytest.approx(
        _values(row, "fusion_test_accuracy")[-1]
    )
    assert _values(row, "exit2_macs")[0] == 3 * _values(row, "exit0_macs")[0]


def test_snapshots_are_one_network_at_the_ends_of_cycles(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "method=snapshot", "members=2", "epochs=4", "lr=0.01")

    rates = [_values(row, f"member{k}_learning_rate") for k in range(2)]
    assert rates == [pytest.approx((0.01, 0.005))] * 2
    # Each cycle goes on with the weights of the one before: where nothing learns, all are alike.
    ROWS.run(tmp_path / "still", "method=snapshot", "members=2", "epochs=2", "lr=0")
    logits = _answers(tmp_path / "still").test.logits
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-6)
    assert not np.allclose(*_answers(tmp_path).test.logits, atol=1e-6)


def test_the_rate_falls_within_cycles_and_moments_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cycles of one epoch, which is two updates: 64 images in batches of 32."""
    seen: List[Tuple[float, float]] = []
    step = Adam.step

    def watched(self: Adam, skip: Any = None) -> None:
        seen.append((self.rate.item(), self.state["steps"].item()))
        step(self, skip)

    monkeypatch.setattr(Adam, "step", watched)
    words = ("method=snapshot", "members=2", "epochs=2", "lr=0.01")
    ROWS.run(tmp_path, *words)

    rates, updates = zip(*seen)
    assert rates == pytest.approx([0.01, 0.005] * 2)
    assert updates == (0, 1, 2, 3)


class _Counted(nn.Module):
    def __init__(self, logits: List[float]) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.logits] * len(images))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("probabilities", [0.5 * (0.75 + 0.5), 0.5 * (0.25 + 0.5)]),
        ("mean", [0.75**0.5, 0.25**0.5]),
        ("sum", [0.75, 0.25]),
    ],
)
def test_members_answer_together(how: str, expected: List[float]) -> None:
    members = ROWS.module("members")
    nets = [_Counted([float(np.log(0.75)), float(np.log(0.25))]), _Counted([-3.0, -3.0])]
    found = members.Joined(nets, how)(torch.zeros(2, 3, 4, 4))

    wanted = torch.tensor(expected) / sum(expected)
    assert torch.allclose(found.softmax(1), wanted.expand(2, 2), atol=1e-6)


def test_shrinkage_is_of_the_sum_alone() -> None:
    combine = ROWS.module("members").combine
    answers = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]])]

    assert combine(answers, "sum", 0.5).tolist() == [[2.0, 3.5]]
    assert combine(answers, "mean", 0.5).tolist() == [[2.0, 3.5]]


def test_a_new_member_is_fitted_to_what_is_left_over() -> None:
    boosting = ROWS.module("boosting")
    images, labels = torch.zeros(2, 3, 4, 4), torch.tensor([0, 1])
    before, member = _Counted([2.0, -1.0]), _Counted([0.25, 0.5])
    model = boosting.Boosted(member, [before], 0.5, 2)

    losses = boosting.Residual(16).losses(model, images, labels)

    target = F.one_hot(labels, 2) - torch.tensor([[1.0, -0.5]] * 2).softmax(1)
    expected = (torch.tensor([[0.25, 0.5]] * 2) - target).pow(2).sum(1).mean()
    assert losses.per_exit[0] is not None
    assert losses.per_exit[0].item() == pytest.approx(expected.item())
    assert losses.logits.tolist() == [[1.125, -0.25]] * 2
    assert model(images).tolist() == [[1.125, -0.25]] * 2
    assert boosting.Residual(16).weights == (16.0,)


def test_members_before_are_neither_trained_nor_kept() -> None:
    boosting, members = ROWS.module("boosting"), ROWS.module("members")
    before, member = members.LeNet5(0.5), members.LeNet5(0.5)
    model = boosting.Boosted(member, [before.train()], 1.0, 10)

    assert len(list(model.parameters())) == len(list(member.parameters()))
    assert all(name.startswith("member.") for name in model.state_dict())
    assert not before.training


def test_a_bootstrap_draws_with_replacement() -> None:
    data = synthetic_data(0, channels=3, size=8, classes=4, train=220, test=10)
    feed = make_splits(data, CPU, validation=20).training
    feed.images[:, 0, 0, 0] = torch.arange(200, dtype=torch.uint8)

    drawn = ROWS.module("fitting").bootstrapped(feed, 3)

    which = drawn.images[:, 0, 0, 0].long()
    assert len(drawn) == 200
    assert torch.equal(drawn.labels, feed.labels[which])
    assert 100 < len(which.unique()) < 150  # 126 of 200 on average
    again = ROWS.module("fitting").bootstrapped(feed, 4)
    assert not torch.equal(again.images, drawn.images)


def _poison(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Members of these numbers begin with NaN."""
    fitting, made = ROWS.module("fitting"), []
    make = fitting.make_member

    def poisoned(*given: Any) -> nn.Module:
        member: nn.Module = make(*given)
        if len(made) in numbers:
            next(member.parameters()).data.fill_(float("nan"))
        made.append(member)
        return member

    monkeypatch.setattr(fitting, "make_member", poisoned)


@pytest.mark.parametrize("method", ["voting", "boosting"])
def test_a_member_that_diverges_stops_the_row_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    _poison(monkeypatch, 1)
    row = ROWS.run(tmp_path, f"method={method}")

    (reason,) = row.validity.reasons
    assert reason.startswith("member 2 of 3: diverged")
    assert row.metric("member2_train_loss") is None
    assert not (tmp_path / "row-0" / LOGITS_FILE).exists()


def test_a_snapshot_cycle_that_diverges_stops_the_row_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members are one network: what follows a cycle that diverged would be NaN as well."""
    fitting, cycles = ROWS.module("fitting"), []
    train = fitting.training.train

    def poisoned(stage: Any, model: nn.Module, *rest: Any) -> bool:
        cycles.append(stage)
        if len(cycles) == 2:
            next(model.parameters()).data.fill_(float("nan"))
        return bool(train(stage, model, *rest))

    monkeypatch.setattr(fitting.training, "train", poisoned)
    row = ROWS.run(tmp_path, "method=snapshot", "epochs=3")

    (reason,) = row.validity.reasons
    assert reason.startswith("member 2 of 3: diverged")
    assert len(cycles) == 2
    assert row.metric("member0_train_loss") is not None
    assert not (tmp_path / "row-0" / LOGITS_FILE).exists()


@pytest.mark.parametrize("method", ["bagging", "boosting"])
def test_a_member_that_diverges_can_be_left_out_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    _poison(monkeypatch, 0)
    row = ROWS.run(tmp_path, f"method={method}", "diverged=exclude")

    assert row.validity.valid
    assert row.facts["members_excluded"] == [1]
    assert row.facts["members"] == 2
    assert row.facts["variant"].startswith(f"{method} of 2 lenet5")
    assert _answers(tmp_path).names() == ("1 of 2 members", "2 of 2 members")


def test_no_member_that_is_left_is_no_ensemble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, 0, 1, 2)
    row = ROWS.run(tmp_path, "method=voting", "diverged=exclude")

    assert row.validity.reasons == ("no member is left: all diverged",)


def test_fusion_that_diverges_says_that_it_was_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, 2)
    row = ROWS.run(tmp_path, "method=fusion")

    assert "all 3 members, which are trained together: diverged" in row.validity.reasons[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("method=snapshot", "epochs=4"), "4 epochs are not 3 cycles"),
        (("method=snapshot", "epochs=3", "diverged=exclude"), "diverged=exclude does nothing"),
        (("method=fusion", "diverged=exclude"), "diverged=exclude does nothing"),
        (("method=voting", "shrinkage=0.5"), "shrinkage=0.5 does nothing"),
        (("method=bagging", "implementation=torchensemble"), "not run by torchensemble"),
        (("implementation=torchensemble", "diverged=exclude"), "leaves no member out"),
        (("implementation=torchensemble", "compile=true"), "compiles nothing"),
        (("method=snapshot", "epochs=6", "implementation=torchensemble"), "cycles of 2 epochs"),
        (("width=0.05",), "leaves no channel"),
        (("validation=600",), "600 images for validation"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_said_before_anything_is_trained(
    tmp_path: Path, words: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ROWS.run(tmp_path, *words)


def _resumable(out: Path, resume: bool, method: str = "boosting") -> RowContext:
    words = (*QUICK, f"method={method}", "members=2", "epochs=2")
    chosen = {word.partition("=")[0]: word for word in words}
    plan = ROWS.job(*chosen.values()).rows[0]
    log = EventLog(out / EVENTS_FILE)
    log.emit(EventKind.ROW_START, 0, repeat=0, seed=plan.seed, parameters=plan.parameters)
    return RowContext(plan, log, out, device=CPU, profile="smoke", resume=resume)


@pytest.mark.parametrize("method", ["boosting", "snapshot"])
def test_a_row_that_was_stopped_goes_on_with_its_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    run = load_run(EXPERIMENTS, "ensembles")
    run(_resumable(whole, False, method))
    fitting = ROWS.module("fitting")
    train, trained = fitting.training.train, []

    def stopped(ctx: Any, *given: Any) -> bool:
        if trained:
            raise KeyboardInterrupt
        trained.append(ctx)
        return bool(train(ctx, *given))

    monkeypatch.setattr(fitting.training, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(_resumable(cut, False, method))
    monkeypatch.setattr(fitting.training, "train", train)
    run(_resumable(cut, True, method))

    np.testing.assert_array_equal(_answers(cut).test.logits, _answers(whole).test.logits)


def test_only_a_row_that_goes_on_from_a_checkpoint_has_no_seconds(tmp_path: Path) -> None:
    """A sliced run resumes rows that have not begun, too."""

    def timed(resume: bool) -> bool:
        load_run(EXPERIMENTS, "ensembles")(_resumable(tmp_path, resume))
        events = read_events(tmp_path / EVENTS_FILE)
        (row,) = Fold().add_all(events).rows()
        return row.metric("training_seconds") is not None

    assert timed(True)
    assert not timed(True)


class _Library:
    """In place of torchensemble: what arithmetic it is called in."""

    __version__ = "0"

    def __init__(self) -> None:
        self.tf32: Any = None

    def VotingClassifier(self, estimator: Any, **given: Any) -> Any:  # noqa: N802
        made = [estimator(**given["estimator_args"]) for _ in range(given["n_estimators"])]
        self.estimators_ = made
        return self

    def set_optimizer(self, name: str, **given: Any) -> None:
        pass

    def fit(self, batches: Any, **given: Any) -> None:
        self.tf32 = tf32_flags.tf32_allowed()


class _Diverging(_Library):
    """The second of its members ends with a weight that is no number, or without bound."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def fit(self, batches: Any, **given: Any) -> None:
        super().fit(batches, **given)
        next(self.estimators_[1].parameters()).data.view(-1)[0] = self.weight


class TestPeer:
    def test_it_trains_in_the_precision_that_the_row_says(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = _Library()
        monkeypatch.setattr(ROWS.module("peer"), "_library", lambda: library)
        with tf32_flags.tf32_set_to(True):
            row = ROWS.run(tmp_path, "implementation=torchensemble")

        assert row.validity.valid
        assert library.tf32 == {"matmul": False, "conv": False}

    @pytest.mark.parametrize("weight", [float("nan"), float("inf")], ids=str)
    def test_a_member_that_diverges_makes_the_row_invalid_and_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: float
    ) -> None:
        monkeypatch.setattr(ROWS.module("peer"), "_library", lambda: _Diverging(weight))
        row = ROWS.run(tmp_path, "implementation=torchensemble")

        assert row.validity.reasons == ("member 2 of 3: diverged: weights are NaN/inf",)
        assert row.metric("exit0_accuracy") is None
        assert not (tmp_path / "row-0" / LOGITS_FILE).exists()

    def test_where_it_is_missing_it_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "torchensemble", None)
        with pytest.raises(NotApplicableError, match="torchensemble is not here"):
            ROWS.run(tmp_path, "implementation=torchensemble")

    @pytest.mark.parametrize(
        ("method", "epochs"), [("voting", 1), ("fusion", 1), ("boosting", 1), ("snapshot", 9)]
    )
    def test_where_it_is_here_its_members_are_a_ladder_too(
        self, tmp_path: Path, method: str, epochs: int
    ) -> None:
        pytest.importorskip("torchensemble")
        words = (f"method={method}", f"epochs={epochs}", "implementation=torchensemble")
        row = ROWS.run(tmp_path, *words)

        assert row.validity.valid
        assert row.facts["variant"].endswith("by torchensemble")
        run = _answers(tmp_path)
        assert run.exits == 3
        assert not np.allclose(run.test.logits[0], run.test.logits[2])


class TestDeclarations:
    def test_the_paper_profile_is_the_published_configuration(self) -> None:
        rows = ROWS.job(profile="paper").rows
        published = {
            "network": "lenet5", "width": 1.0, "members": 10, "epochs": 100, "batch_size": 128,
            "optimizer": "adam", "lr": 1e-3, "weight_decay": 5e-4, "data": "cifar10",
            "shrinkage": 1.0, "implementation": "own", "train_limit": 0, "test_limit": 0,
        }  # fmt: skip

        assert len(rows) == 15
        for row in rows:
            assert {name: row.parameters[name] for name in published} == published

    def test_lenet_is_the_published_one(self) -> None:
        net = ROWS.module("members").make_member("lenet5", 1.0, 10)

        assert sum(each.numel() for each in net.parameters()) == 62_006
        assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)

    def test_claims_ask_for_what_rows_have(self) -> None:
        claims = load_claims(EXPERIMENTS / "ensembles" / "claims.toml", ROWS.spec())
        asked = {selection.metric for claim in claims for selection in claim.selections}

        assert asked == {"exit9_accuracy", "training_seconds"}
