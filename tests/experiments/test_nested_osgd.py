"""The experiment `nested-osgd`: each way of combining losses, on made-up images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import ClaimKind, load_claims
from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.outcome import Row
from narrowgauge_lab.anytime import operating, thresholds
from narrowgauge_lab.anytime.gradients import Orthogonalised, PCGrad, Sum, Weighted
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

QUICK = (
    "data=synthetic", "width=0.125", "exits=3", "epochs=1", "train_limit=96", "validation=100",
    "test_limit=64", "batch_size=32", "cosine_images=16",
)  # fmt: skip
ROWS = Rows("nested-osgd", QUICK)


@pytest.fixture(autouse=True)
def _few_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _values(row: Row, name: str) -> Any:
    metric = row.metric(name)
    assert metric is not None, f"no metric {name}"
    return metric.values


def test_a_row_has_what_every_exit_reaches_and_costs(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "optimizer=osgd", "epochs=2")

    assert row.validity.valid
    assert row.facts["synthetic"] is True
    assert row.facts["variant"] == "6 to 24 layers, twin of width 0.125, osgd"
    assert "reconstruction" in row.facts
    assert row.facts["split"]["validation"] == 100
    for k in range(3):
        assert len(_values(row, f"exit{k}_train_loss")) == 2
        (accuracy,) = _values(row, f"exit{k}_accuracy")
        assert accuracy == pytest.approx(_values(row, f"exit{k}_test_accuracy")[-1])
    costs = [_values(row, f"exit{k}_cumulative_macs")[0] for k in range(3)]
    assert 1.9 < costs[1] / costs[0] < 2.3
    assert 1.9 < costs[2] / costs[1] < 2.3
    for pair in ("0_1", "0_2", "1_2"):
        assert all(abs(value) <= 1 for value in _values(row, f"gradient_cosine_{pair}"))
    assert costs[0] <= _values(row, "mean_macs")[0] <= costs[2]
    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    assert run.family == "nested"
    assert run.synthetic
    assert run.test.logits.shape == (3, 64, 10)


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=sum",),
        ("optimizer=weighted", "loss_weights=1,0.5,0.25"),
        ("optimizer=pcgrad", "projection=tensor"),
        ("optimizer=osgd", "project=momentum", "negative_only=true", "priority=last"),
    ],
    ids=lambda words: words[0],
)
def test_each_way_runs(tmp_path: Path, words: Any) -> None:
    row = ROWS.run(tmp_path, *words, "cosine_images=0")

    assert row.validity.valid
    assert row.metric("gradient_cosine_0_1") is None
    assert ("reconstruction" in row.facts) == (words[0] == "optimizer=osgd")


@pytest.mark.parametrize(
    ("network", "exits", "family"),
    [
        ("b-alexnet", 3, "branchynet"),
        ("b-resnet-110", 3, "branchynet"),
        ("iresnext", 8, "iresnext"),
        ("iresnext-incremental", 8, "iresnext"),
    ],
)
def test_other_networks_are_trained_by_it_too(
    tmp_path: Path, network: str, exits: int, family: str
) -> None:
    words = ("optimizer=osgd", "train_limit=64", "lr=0.01", "width=0.25", "exits=4")
    row = ROWS.run(tmp_path, f"network={network}", *words)

    assert row.facts["exits"] == exits
    assert row.validity.valid
    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    assert (run.family, run.exits) == (family, exits)


def test_cifar100_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match="'cifar100' is not here"):
        ROWS.run(tmp_path / "out", "data=cifar100", "optimizer=sum", data=tmp_path)


@pytest.mark.parametrize(
    ("words", "exit"), [(("lose=100",), 0), (("policy=entropy:0",), 2)], ids=["fitted", "asked"]
)
def test_who_leaves_is_fitted_on_the_validation_split_or_asked_for(
    tmp_path: Path, words: Any, exit: int
) -> None:
    row = ROWS.run(tmp_path, "optimizer=sum", *words)

    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    kept = thresholds.fit(
        thresholds.validation_of(run), operating.of_test_split(run)[1], "entropy", "knapsack"
    )
    lose = ROWS.parameters(*words)["lose"]
    assert row.facts["fitted_policy"] == thresholds.choose(kept, lose).policy
    assert "paper_policy" not in row.facts
    # All may be lost: most leave at once. Nobody has an entropy below 0.
    assert _values(row, f"exit{exit}_share")[0] > 90
    assert _values(row, "fitted_macs") <= _values(row, "mean_macs")


def _parameters(*words: str) -> Dict[str, Any]:
    chosen = {word.partition("=")[0]: word for word in (*QUICK, *words)}
    return ROWS.parameters(*chosen.values())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("optimizer=sum",), Sum()),
        (("optimizer=weighted",), Weighted((1.0, 0.75, 0.5, 0.25))),
        (("optimizer=weighted", "loss_weights=1,0,0,2"), Weighted((1.0, 0.0, 0.0, 2.0))),
        (("optimizer=weighted", "loss_weights=0.5"), Weighted((0.5,) * 4)),
        (("network=iresnext", "exits=4", "blocks=2", "optimizer=osgd"), Orthogonalised()),
        (("optimizer=pcgrad",), PCGrad()),
        (("optimizer=pcgrad", "project=momentum", "momentum=0.8"), PCGrad(momentum=0.8)),
        (("optimizer=osgd",), Orthogonalised()),
        (("optimizer=osgd", "rescale=true"), Orthogonalised(rescale=True)),
        (("optimizer=osgd", "projection=tensor"), Orthogonalised(per_tensor=True)),
        (("optimizer=osgd", "priority=last"), Orthogonalised(last_first=True)),
    ],
    ids=str,
)
def test_parameters_say_the_way(words: Any, expected: Any) -> None:
    assert ROWS.module("run").combination(_parameters(*words), 4) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optimizer=sum", "rescale=true"), "rescale=True does nothing with optimizer=sum"),
        (("optimizer=pcgrad", "priority=last"), "priority=last does nothing"),
        (("optimizer=osgd", "loss_weights=1,1,1"), "loss_weights=1,1,1 does nothing"),
        (("network=b-alexnet",), "exits=3 does nothing with network=b-alexnet"),
        (("network=iresnext", "width=0.25"), "exits=3 does nothing with network=iresnext"),
        (("network=b-alexnet", "exits=4", "blocks=3"), "blocks=3 does nothing with network=b-"),
        (("optimizer=weighted", "loss_weights=1,1"), "2 loss weights for 3 exits"),
        (("optimizer=weighted", "loss_weights=1,x,1"), "does not take"),
        (("optimizer=weighted", "loss_weights=1,-,1"), "are no numbers"),
        (("optimizer=weighted", "loss_weights=nan,1,1"), "does not take"),
        (("optimizer=weighted", "loss_weights=-1,1,1"), "loss weights -1"),
        (("optimizer=osgd", "policy=entropy:0.1,0.2,0.3,0.4"), "threshold"),
        (("optimizer=osgd", "policy=guess"), "does not take 'guess'"),
        (("optimizer=osgd", "exits=1"), "with one exit"),
        (("optimizer=pcgrad", "exits=1"), "with one exit"),
        (("optimizer=osgd", "policy=paper"), "does not take 'paper'"),
        (("optimizer=osgd", "validation=600"), "600 images for validation"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_cannot_be_is_said_before_anything_is_trained(
    tmp_path: Path, words: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ROWS.run(tmp_path, *words)


@pytest.mark.parametrize(
    ("words", "undone"),
    [
        (("network=b-alexnet", "exits=4", "blocks=3"), "-p blocks=1"),
        (("optimizer=sum", "rescale=true"), "-p rescale=false"),
        (("optimizer=sum", "loss_weights=1"), "leave loss_weights out"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_an_option_that_does_nothing_says_how_to_undo_it(words: Any, undone: str) -> None:
    """A profile may have set it: leaving it out would bring it back."""
    with pytest.raises(UsageError) as caught:
        ROWS.module("run").combination(_parameters(*words), 3)

    assert caught.value.next_step.endswith(f" or {undone}")


def test_every_exit_is_held_to_the_same_bound() -> None:
    claims = load_claims(EXPERIMENTS / "nested-osgd" / "claims.toml", ROWS.spec())
    bounds = {c.selections[0].metric: c for c in claims if c.kind is ClaimKind.BOUND}

    assert sorted(bounds) == [f"exit{k}_test_accuracy" for k in range(4)]
    for claim in bounds.values():
        assert claim.expected["any"].minimum == 92.0
        assert claim.selections[0].where["optimizer"] == "osgd"


def test_a_diverged_row_is_invalid_and_has_no_answers(tmp_path: Path) -> None:
    words = ("optimizer=osgd", "lr=100", "network=b-alexnet", "exits=4", "epochs=3")
    row = ROWS.run(tmp_path, *words)

    assert not row.validity.valid
    assert "diverged" in row.validity.reasons[0]
    assert not (tmp_path / "row-0" / LOGITS_FILE).exists()


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    ROWS.run(tmp_path / "a", "optimizer=sum", "save_weights=true")
    weights = tmp_path / "a" / "row-0" / "weights.pt"

    again = ROWS.run(tmp_path / "b", "optimizer=sum", f"weights={weights}")
    assert again.metric("train_loss") is None
    assert again.metric("exit2_accuracy") is not None
    with pytest.raises(DataCorruptError, match="NestedNet"):
        ROWS.run(tmp_path / "c", "optimizer=sum", "blocks=2", f"weights={weights}")
