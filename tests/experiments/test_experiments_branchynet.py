"""The experiment `branchynet`: a row from end to end, its clock, its claims, and bad input."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Dict, Tuple

import numpy as np
import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import BadValueError
from narrowgauge_contract.outcome import Row
from narrowgauge_lab import precision
from narrowgauge_lab.anytime.policies import Entropy
from narrowgauge_lab.anytime.systems.branchynet import NETS, BranchyNet, branchy_net
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.errors import DataCorruptError
from narrowgauge_scores.side_file import read_logits

ROWS = Rows(
    "branchynet",
    (
        "data=synthetic", "width=0.4", "batch_size=64", "train_limit=640", "validation=200",
        "test_limit=100", "trunk_epochs=1", "epochs=1", "lr=0.01", "clock_images=3",
        "save_weights=true",
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Path, Row]:
    out = tmp_path_factory.mktemp("branchynet")
    return out, ROWS.run(out)


def _value(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None, name
    return metric.values[-1]


def test_a_row_is_trained_in_two_stages_and_scored(trained: Tuple[Path, Row]) -> None:
    out, row = trained
    names = {metric.name for metric in row.metrics}

    assert row.validity.valid
    assert {"trunk_test_accuracy", "trunk_train_loss", "exit0_train_loss"} <= names
    assert set(ROWS.spec().headline) <= names
    for drawing in ROWS.spec().drawings:
        assert set(drawing.metrics) <= names
    assert row.facts["variant"] == "b-lenet, twin of width 0.4"
    assert row.facts["split"]["validation"] == 200
    (logits,) = [each for each in row.side_files if each.path.endswith("logits.npz")]
    run = read_logits(out / logits.path)
    assert (run.family, run.exits, run.test.images) == ("branchynet", 2, 100)
    assert run.val is not None
    # The plain network is the trunk as its own training left it.
    assert run.base_accuracy == _value(row, "trunk_test_accuracy")
    assert run.base_macs == run.direct_macs[-1]


@pytest.mark.parametrize(
    ("net", "exits", "published"),
    [("b-alexnet", 3, "entropy_0.01_0.05_accuracy"), ("b-resnet-110", 3, "entropy_0.3_0.2_macs")],
)
def test_the_other_networks_train_a_row_too(
    tmp_path: Path, net: str, exits: int, published: str
) -> None:
    row = ROWS.run(
        tmp_path, f"net={net}", "width=0.1", "train_limit=32", "batch_size=16", "validation=16",
        "test_limit=16", "clock_images=1", "save_weights=false",
    )  # fmt: skip
    run = read_logits(tmp_path / "row-0" / "logits.npz")

    assert row.validity.valid
    assert row.facts["variant"] == f"{net}, twin of width 0.1"
    assert (run.exits, run.exit_names) == (exits, ("branch 1", "branch 2", "trunk"))
    assert run.test.logits.shape == (exits, 16, 10)
    assert np.isfinite(run.test.logits).all()
    assert _value(row, "trunk_train_loss") != _value(row, "train_loss")
    for exit in range(exits):
        assert np.isfinite(_value(row, f"exit{exit}_train_loss"))
    assert set(ROWS.spec().headline) | {published} <= {metric.name for metric in row.metrics}
    assert run.direct_macs[0] <= _value(row, "mean_macs") <= run.cumulative_macs[-1]


def test_the_policy_of_the_row_is_scored_as_its_logits_say(trained: Tuple[Path, Row]) -> None:
    out, row = trained
    run = read_logits(out / "row-0" / "logits.npz")
    thresholds = [float(each) for each in row.facts["policy_ran"].partition(":")[2].split(",")]
    logs = run.test.logits[0] - run.test.logits[0].max(1, keepdims=True)
    shares = np.exp(logs) / np.exp(logs).sum(1, keepdims=True)
    entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum(1)
    early = entropy < thresholds[0]
    answers = np.where(early, run.test.logits[0].argmax(1), run.test.logits[1].argmax(1))
    macs = np.where(early, *run.cumulative_macs)

    assert row.facts["policy_ran"] == row.facts["fitted_policy"] in row.facts["front_policies"]
    assert _value(row, "adaptive_accuracy") == pytest.approx(
        100 * (answers == run.test.labels).mean()
    )
    assert _value(row, "mean_macs") == pytest.approx(macs.mean())
    assert _value(row, "exit0_share") == pytest.approx(100 * early.mean())
    assert _value(row, "macs_gain") == pytest.approx(run.direct_macs[1] / macs.mean())
    assert row.facts["paper_policy"] == "entropy:0.025"
    assert _value(row, "paper_accuracy") == _value(row, "entropy_0.025_accuracy")


def test_what_leaving_early_costs_against_the_trunk_is_paired(trained: Tuple[Path, Row]) -> None:
    out, row = trained
    run = read_logits(out / "row-0" / "logits.npz")

    right = run.test.base_correct
    assert right is not None
    # The trunk of its own stage, not as the second one left it.
    assert 100 * right.mean() == pytest.approx(_value(row, "trunk_test_accuracy"))
    last = run.test.logits[-1].argmax(1) == run.test.labels
    assert (right != last).any()
    value, low, high = (_value(row, f"adaptive_minus_base{end}") for end in ("", "_low", "_high"))
    plain = _value(row, "trunk_test_accuracy")
    assert value == pytest.approx(_value(row, "adaptive_accuracy") - plain)
    assert low <= value <= high
    assert low < high


def test_without_a_trunk_of_its_own_there_is_nothing_to_hold_it_against(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "trunk_epochs=0", "train_limit=64", "clock_images=0")

    assert row.metric("adaptive_minus_base") is None
    assert read_logits(tmp_path / "row-0" / "logits.npz").test.base_correct is None


def test_the_clock_times_every_image_four_ways(trained: Tuple[Path, Row]) -> None:
    row = trained[1]
    sums: Dict[str, float] = {}
    for name in ("whole", "early", "early_trunk", "paper_early_trunk"):
        metric = row.metric(f"{name}_latency")
        assert metric is not None
        assert len(metric.values) == 3
        assert min(metric.values) > 0
        sums[name] = sum(metric.values)
    assert _value(row, "clock_gain") == pytest.approx(sums["whole"] / sums["early"])
    for prefix in ("", "paper_"):
        published = sums["whole"] / sums[f"{prefix}early_trunk"]
        assert _value(row, f"{prefix}published_clock_gain") == pytest.approx(published)


def test_the_published_clock_has_thresholds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = ROWS.module("clock"), []
    net = branchy_net("b-lenet", width=0.2).eval()
    monkeypatch.setattr(clock, "_segments", lambda net, image, exits: asked.append(exits))
    said: Dict[str, float] = {}
    ctx = SimpleNamespace(
        device=CPU,
        fact=lambda *given: None,
        metric=lambda name, value, **_: said.update({name: value}),
    )
    by = clock.Policies(row=Entropy([10.0]), paper=Entropy([0.0]))
    with torch.no_grad():
        clock._record(ctx, net, torch.randn(4, 1, 28, 28), by)

    # The row's own leaves at the branch, Table I's here at the end; both in every turn.
    assert sorted(asked) == [0] * 24 + [1] * 24
    assert said["paper_published_clock_gain"] != said["published_clock_gain"]


def test_the_clock_says_who_decides_and_runs_in_the_precision_of_the_row(
    trained: Tuple[Path, Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = trained[1].facts
    assert facts["clock_exits"] == "host read after each exit"
    assert facts["clock_images"] == 3
    if "bf16" not in precision.available(CPU):
        pytest.skip("no autocast to bf16 here")
    dtypes = set()
    clock = ROWS.module("clock")
    segments = clock._segments

    def noting(net: BranchyNet, image: torch.Tensor, exits: int) -> None:
        dtypes.add(net.segments[0](image).dtype)
        segments(net, image, exits)

    monkeypatch.setattr(clock, "_segments", noting)
    before = torch.get_num_threads()
    weights = trained[0] / "row-0" / "weights.pt"
    row = ROWS.run(tmp_path, f"weights={weights}", "precision=bf16")

    assert row.metric("clock_gain") is not None
    assert dtypes == {torch.bfloat16}
    assert torch.get_num_threads() == before


@pytest.mark.gpu
def test_on_a_gpu_the_clock_leaves_by_the_fastest_way_there_is(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, device=torch.device("cuda"))

    assert row.facts["clock_exits"] != "host read after each exit"
    assert "one kernel decides" in row.facts["clock_exits"]
    sums = {}
    for name in ("whole", "early", "early_trunk", "paper_early_trunk", "launched"):
        metric = row.metric(f"{name}_latency")
        assert metric is not None
        sums[name] = sum(metric.values)
    assert _value(row, "clock_gain") == pytest.approx(sums["whole"] / sums["early"])
    for prefix in ("", "paper_"):
        published = sums["launched"] / sums[f"{prefix}early_trunk"]
        assert _value(row, f"{prefix}published_clock_gain") == pytest.approx(published)
    # One launch for some dozens of kernels.
    assert sums["whole"] < sums["launched"]


def test_one_image_leaves_where_its_entropy_says_and_costs_no_more() -> None:
    leave = ROWS.module("clock").leave
    net = branchy_net("b-alexnet", width=0.1).eval()
    image = torch.randn(1, 3, 32, 32)
    asked = []
    advance = net.advance
    net.advance = lambda exit, *rest: asked.append(exit) or advance(exit, *rest)  # type: ignore[assignment, func-returns-value, method-assign, misc]
    with torch.no_grad():
        assert leave(net, image, Entropy([10.0, 10.0])) == 0
        assert leave(net, image, Entropy([0.0, 10.0])) == 1
        assert leave(net, image, Entropy([0.0, 0.0])) == 2

    assert asked == [0, 0, 1, 0, 1, 2]


def test_weights_of_a_row_serve_another_one_and_no_other_network(
    trained: Tuple[Path, Row], tmp_path: Path
) -> None:
    out, row = trained
    path = out / "row-0" / "weights.pt"
    again = ROWS.run(tmp_path / "again", f"weights={path}", "policy=entropy:0.5", "clock_images=0")

    assert again.metric("train_loss") is None
    assert again.facts["policy_ran"] == "entropy:0.5"
    assert _value(again, "exit1_accuracy") == _value(row, "exit1_accuracy")
    assert again.metric("clock_gain") is None
    with pytest.raises(DataCorruptError, match="BranchyNet"):
        ROWS.run(tmp_path / "other", f"weights={path}", "width=1")


def test_a_diverged_training_is_stopped_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*asked: object) -> BranchyNet:
        net = branchy_net(*asked)  # type: ignore[arg-type]
        with torch.no_grad():
            net.heads[-1].weight.fill_(float("inf"))  # type: ignore[operator, union-attr]
        return net

    monkeypatch.setattr(ROWS.module("run"), "branchy_net", broken)
    row = ROWS.run(tmp_path, "train_limit=64")

    assert not row.validity.valid
    assert "diverged" in row.validity.reasons[0]
    assert row.metric("exit0_train_loss") is None, "the second stage does not happen"
    assert not [each for each in row.side_files if each.path.endswith("logits.npz")]


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("policy=entropy:0.1,0.2,0.3",), BadValueError, "thresholds"),
        (("policy=entropie:0.1",), BadValueError, "'entropie:0.1'"),
        (("policy=entropy:nan",), BadValueError, "nan"),
        (("loss_weights=1,0.3,2",), BadValueError, "weights"),
        (("loss_weights=a",), BadValueError, "does not take 'a'"),
        (("loss_weights=1,-",), BadValueError, "no numbers"),
        (("loss_weights=0",), BadValueError, "weights"),
        (("validation=60000",), BadValueError, "validation"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_is_trained(
    words: Tuple[str, ...], error: type, says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        ROWS.run(tmp_path, *words)
    assert not list(tmp_path.glob("checkpoints/*/*"))


def test_images_of_another_shape_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge_lab.context import RowContext
    from narrowgauge_lab.data import synthetic_data

    splits = ROWS.module("run")._splits
    digits = synthetic_data(0, channels=1, size=28, classes=10, train=20, test=10)
    ctx = object.__new__(RowContext)
    ctx.parameters = {**ROWS.parameters("net=b-alexnet"), "data": "mnist"}
    ctx.device = CPU
    monkeypatch.setattr(RowContext, "data", lambda *_: digits)

    with pytest.raises(BadValueError, match="does not take") as caught:
        splits(ctx)
    assert "3×32×32" in caught.value.why


@pytest.mark.parametrize(
    ("net", "name", "moved"),
    [("b-lenet", "mnist", Augmentation(2)), ("b-alexnet", "cifar10", Augmentation(4, flip=True))],
)
def test_digits_are_moved_and_not_mirrored(
    monkeypatch: pytest.MonkeyPatch, net: str, name: str, moved: Augmentation
) -> None:
    from narrowgauge_lab.context import RowContext
    from narrowgauge_lab.data import synthetic_data

    channels, size = (1, 28) if name == "mnist" else (3, 32)
    images = synthetic_data(0, channels=channels, size=size, classes=10, train=60, test=10)
    ctx = object.__new__(RowContext)
    ctx.device = CPU
    monkeypatch.setattr(RowContext, "data", lambda *_: images)
    for asked, wanted in (("false", Augmentation()), ("true", moved)):
        words = (f"net={net}", f"augment={asked}", "validation=10", "train_limit=0")
        ctx.parameters = {**ROWS.parameters(*words), "data": name}
        splits = ROWS.module("run")._splits(ctx)
        assert splits.training.augmentation == wanted
        assert not splits.test.augmentation.active


def test_loss_weights_of_one_are_the_plain_sum() -> None:
    parse = ROWS.module("run").parse_loss_weights

    assert type(parse("1", 3)).__name__ == "Sum"
    assert parse("1,0.3", 2).weights(2) == (1.0, 0.3)
    assert parse("2", 3).weights(3) == (2.0, 2.0, 2.0)


def test_claims_follow_the_schema_and_name_thresholds_that_are_recorded() -> None:
    claims = load_claims(EXPERIMENTS / "branchynet" / "claims.toml", ROWS.spec())
    recorded = {
        "_".join(["entropy", *(f"{each:g}" for each in thresholds)])
        for listed in ROWS.module("published").THRESHOLDS.values()
        for thresholds in listed
    }
    asked = {
        selection.metric.rsplit("_accuracy")[0].rsplit("_exit0_share")[0]
        for claim in claims
        for selection in claim.selections
        if selection.metric.startswith("entropy_")
    }

    assert asked <= recorded
    bounds = {claim.id: claim.expected["any"] for claim in claims if claim.kind.value == "bound"}
    assert bounds["short-accuracy"].minimum == 98.4
    assert bounds["short-macs"].maximum == 300000
    assert bounds["paper-accuracy"].minimum == 99.2


def test_a_row_has_every_metric_that_claims_on_its_network_name(trained: Tuple[Path, Row]) -> None:
    names = {metric.name for metric in trained[1].metrics}
    claims = load_claims(EXPERIMENTS / "branchynet" / "claims.toml", ROWS.spec())
    asked = {
        selection.metric
        for claim in claims
        for selection in claim.selections
        if selection.where["net"] == "b-lenet"
    }

    assert len(asked) > 10
    assert asked <= names


def test_a_rate_that_falls_is_no_part_of_what_was_published() -> None:
    recipe = ROWS.module("run")._recipe
    rates = [
        recipe(SimpleNamespace(parameters=ROWS.parameters(*words)), None, 10).schedule.rate
        for words in (("lr=0.01",), ("lr=0.01", "falls_at=0.8"))
    ]

    assert [rates[0](epoch) for epoch in (0, 7, 8, 9)] == [0.01] * 4
    assert [rates[1](epoch) for epoch in (0, 7, 8, 9)] == pytest.approx([0.01, 0.01, 1e-3, 1e-3])
    assert ROWS.spec().parameter("falls_at").recipe


def test_profiles_are_as_promised() -> None:
    paper = ROWS.job(profile="paper").parameters
    wanted = {"trunk_epochs": 50, "epochs": 100, "batch_size": 512, "lr": 0.001, "width": 1.0}

    assert {key: paper[key] for key in wanted} == wanted
    assert len(ROWS.job(profile="paper").rows) == 3
    assert tuple(ROWS.spec().parameter("net").choices) == tuple(NETS)
