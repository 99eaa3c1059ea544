"""The experiment `residual-cutting` on made-up images."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.spec import load_toml
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError
from narrowgauge_lab.measure.timing import TimingPlan
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.transforms.residual_links import NoResidual
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

QUICK = (
    "data=synthetic", "depth=18", "training=plain", "width=0.0625", "epochs=1", "train_limit=48",
    "validation=24", "test_limit=40", "batch_size=24", "recalibration=24", "finetune_images=0",
    "greedy=0", "modes=", "cut=",
)  # fmt: skip
ROWS = Rows("residual-cutting", QUICK)
BLOCKS = 8
#: Blocks of ResNet-18 whose shortcut is a projection, by their places.
PROJECTING = [2, 4, 6]


@pytest.fixture(autouse=True)
def _few_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole_row(tmp_path_factory: Any) -> Any:
    """A row with everything but latencies, and its folder."""
    folder = tmp_path_factory.mktemp("residual-cutting")
    words = (
        "modes=no_shortcut,no_residual", "greedy=1",
        "cut=layer4:no_shortcut,layer1.0:scale:2", "save_weights=true",
    )  # fmt: skip
    return ROWS.run(folder, *words), folder / "row-0"


def _values(row: Row, name: str) -> Any:
    metric = row.metric(name)
    assert metric is not None, f"no metric {name}"
    return metric.values


def test_each_block_has_its_figures_in_each_mode(whole_row: Any) -> None:
    row, _ = whole_row

    assert row.validity.valid
    assert row.facts["synthetic"] is True
    assert len(row.facts["blocks"]) == BLOCKS
    assert row.facts["blocks"][0] == "layer1.0"
    for mode in ("no_shortcut", "no_residual"):
        for suffix in ("", "_anew"):
            found = _values(row, f"{mode}_accuracy{suffix}")
            assert len(found) == BLOCKS
            assert all(0 <= each <= 100 for each in found)
    assert row.metric("scale_accuracy") is None
    assert row.metric("no_shortcut_accuracy_tuned") is None
    assert row.metric("no_shortcut_latency") is None
    whole = _values(row, "full_accuracy_anew")[0]
    lost = [whole - each for each in _values(row, "no_residual_accuracy_anew")]
    assert list(_values(row, "no_residual_lost_anew")) == pytest.approx(lost)
    assert row.metric("no_residual_lost_tuned") is None


def test_an_identity_that_is_cut_saves_no_macs_and_the_table_says_so(whole_row: Any) -> None:
    row, _ = whole_row
    saved = np.array(_values(row, "no_shortcut_saved_macs"))

    assert (saved[PROJECTING] > 0).all()
    assert not np.delete(saved, PROJECTING).any()
    assert list(_values(row, "identity_links_saved_macs")) == [0]
    # Of maps of 4 · 32 · 32, 8 · 16 · 16, 16 · 8 · 8 and 32 · 4 · 4, by two blocks each.
    additions = np.repeat([4096, 2048, 1024, 512], 2)
    assert list(_values(row, "no_shortcut_saved_additions")) == additions.tolist()
    assert (np.array(_values(row, "no_residual_saved_macs")) > 0).all()
    left = _values(row, "full_macs")[0] - np.array(_values(row, "no_residual_saved_macs"))
    assert list(_values(row, "no_residual_macs")) == left.tolist()


def test_the_cut_by_name_and_the_highest_links_are_beside_it(whole_row: Any) -> None:
    row, _ = whole_row

    assert row.facts["cut"] == [
        "layer4.0:no_shortcut", "layer4.1:no_shortcut", "layer1.0:scale:2",
    ]  # fmt: skip
    assert _values(row, "highest_link_accuracy") == _values(row, "no_shortcut_accuracy")[-1:]
    assert _values(row, "highest_link_macs") == _values(row, "full_macs")
    saved = _values(row, "no_shortcut_saved_macs")[6]
    assert _values(row, "last_stage_links_macs")[0] == _values(row, "full_macs")[0] - saved
    assert _values(row, "cut_macs") == _values(row, "last_stage_links_macs")


def test_the_greedy_curve_is_a_ladder_that_is_scored(whole_row: Any) -> None:
    row, folder = whole_row
    run = read_logits(folder / LOGITS_FILE)
    macs = list(_values(row, "greedy_macs"))

    assert len(macs) == 2
    assert macs == sorted(macs, reverse=True)
    assert run.names() == (f"1 out: {row.facts['greedy_order'][0]}", "whole")
    assert run.direct_macs.tolist() == macs[::-1]
    assert run.family == "residual-cutting"
    assert "twin of width 0.0625" in run.variant
    assert run.base_accuracy == _values(row, "full_accuracy")[0]
    right = (run.test.logits.argmax(2) == run.test.labels).mean(1) * 100
    assert right.tolist() == pytest.approx(_values(row, "greedy_accuracy")[::-1])


def test_the_map_has_a_line_for_each_mode_and_treatment(whole_row: Any) -> None:
    row, folder = whole_row
    table = json.loads((folder / "lost.json").read_text(encoding="utf-8"))

    assert table["columns"] == row.facts["blocks"]
    modes = ["no shortcut", "no residual"]
    assert table["rows"] == [mode + ending for mode in modes for ending in ("", ", anew")]
    whole = _values(row, "full_accuracy")[0]
    lost = [whole - each for each in _values(row, "no_residual_accuracy")]
    assert table["values"][2] == pytest.approx(lost)


def test_what_a_cut_costs_is_against_the_whole_network_treated_alike() -> None:
    outcome = ROWS.module("variants").Outcome
    whole, one = outcome(90.0, 94.0, 95.0, 100, None), outcome(30.0, 80.0, 93.5, 60, None)
    bare = outcome(30.0, None, None, 60, None)

    assert one.lost(whole) == (("", 60.0), ("_anew", 14.0), ("_tuned", 1.5))
    assert bare.lost(whole) == (("", 60.0),)
    lines = ROWS.module("table")._lost("no_shortcut", [one, one], whole)
    assert lines == {
        "no shortcut": [60.0, 60.0],
        "no shortcut, anew": [14.0, 14.0],
        "no shortcut, tuned": [1.5, 1.5],
    }


def test_claims_of_what_a_cut_costs_are_of_points_lost() -> None:
    """Of accuracies they would hold for a network that is better to begin with."""
    claims = load_claims(EXPERIMENTS / "residual-cutting" / "claims.toml", ROWS.spec())
    costing = [claim for claim in claims if "costs less accuracy" in claim.text]

    assert len(costing) == 2
    assert all("_lost" in each.metric for claim in costing for each in claim.selections)


def test_saved_weights_are_cut_without_training(whole_row: Any, tmp_path: Path) -> None:
    row, folder = whole_row
    shutil.copy(folder / "weights.pt", folder / "weights-0.pt")
    asked = f"weights={folder / 'weights-SEED.pt'}"

    again = ROWS.run(tmp_path, asked)

    assert again.metric("train_loss") is None
    assert again.metric("no_shortcut_accuracy") is None  # no modes, no table
    assert again.facts["weights_from"] == "the file weights-0.pt"
    for name in ("full_accuracy", "full_accuracy_anew", "highest_link_accuracy_anew"):
        assert _values(again, name) == _values(row, name)
    with pytest.raises(DataCorruptError, match="weights of this CifarResNet"):
        ROWS.run(tmp_path / "other", "depth=34", asked)


def test_each_cut_is_timed_in_turns_with_the_whole_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: List[Tuple[torch.Tensor, torch.Tensor]] = []

    def in_turns(first: Any, second: Any, *_given: Any) -> Any:
        answers.append((first(), second()))
        one = types.SimpleNamespace(seconds=(2.0, 4.0, 3.0), source="monotonic")
        return types.SimpleNamespace(first=one, ratios=(1.5, 1.25, 1.0))

    monkeypatch.setattr(ROWS.module("variants"), "interleave", in_turns)
    row = ROWS.run(tmp_path, "latency=true", "recalibration=0", "modes=no_residual")

    (whole, beside), *cuts = answers
    assert torch.equal(whole, beside)
    assert all(torch.equal(other, whole) for _, other in cuts)
    assert not any(torch.equal(one, whole) for one, _ in cuts)
    blocks = len(row.facts["blocks"])
    for name, count in (("full", 1), ("highest_link", 1), ("no_residual", blocks)):
        assert _values(row, f"{name}_latency") == (3.0,) * count
        assert _values(row, f"{name}_speedup") == (1.25,) * count


def test_the_twin_of_stochastic_depth_is_cut_as_a_plain_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = TimingPlan(least_samples=2, limit_s=0.01, warm_up_limit_s=0.01)
    monkeypatch.setattr(ROWS.module("variants"), "_TIMING", quick)
    words = ("training=stochastic-depth", "latency=true", "recalibration=0", "save_weights=true")
    row = ROWS.run(tmp_path, *words)

    assert row.validity.valid
    assert "stochastic-depth" in row.facts["variant"]
    assert "anew" not in row.facts["variant"]
    assert _values(row, "full_latency")[0] > 0
    assert _values(row, "highest_link_latency")[0] > 0
    latency = row.metric("highest_link_latency")
    assert latency is not None
    assert latency.source == "monotonic"
    assert row.metric("highest_link_accuracy_anew") is None
    state = torch.load(tmp_path / "row-0" / "weights.pt")
    assert "layer4.1.conv2.weight" in state
    assert not any("block" in name for name in state)


def test_claims_ask_for_metrics_that_a_row_has(whole_row: Any) -> None:
    row, _ = whole_row
    claims = load_claims(EXPERIMENTS / "residual-cutting" / "claims.toml", ROWS.spec())

    asked = {selection.metric for claim in claims for selection in claim.selections}
    assert asked <= {metric.name for metric in row.metrics}


def test_a_training_that_diverges_is_not_cut(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "lr=100", "epochs=4", "weight_decay=1", "momentum=1")

    assert not row.validity.valid
    assert "diverged" in row.validity.reasons[0]
    assert row.metric("full_accuracy") is None


def test_fine_tuning_comes_after_statistics_and_is_of_the_whole_network_too(
    tmp_path: Path,
) -> None:
    row = ROWS.run(tmp_path, "finetune_images=48", "cut=layer1.0:scale:0.5")

    assert row.validity.valid
    assert "statistics anew, fine-tuned" in row.facts["variant"]
    assert row.metric("full_accuracy_tuned") is not None
    assert row.metric("cut_accuracy_tuned") is not None
    assert _values(row, "cut_macs") == _values(row, "full_macs")


def test_a_fine_tuning_that_diverges_makes_the_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Normalisation keeps so few steps finite at any rate.
    monkeypatch.setattr(ROWS.module("variants"), "fine_tune", lambda *given, **named: False)

    row = ROWS.run(tmp_path, "finetune_images=48")

    assert not row.validity.valid
    assert "fine-tuning diverged" in row.validity.reasons[0]


def test_cifar100_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match="'cifar100' is not here"):
        ROWS.run(tmp_path / "out", "data=cifar100", data=tmp_path)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("cut=layer5.0:no_residual", "block 'layer5.0'"),
        ("cut=layer4.2:no_shortcut", "block 'layer4.2'"),
        (
            "cut=layer1:no_residual,layer2:no_residual,layer3:no_residual,layer4:no_residual",
            "leaves no network",
        ),
        ("cut=layer2.1:no_shortcut,layer2.1:no_residual", "leaves no network"),
        ("modes=full", "does not take 'full'"),
        ("modes=no_link", "does not take 'no_link'"),
        ("factor=0", "no_shortcut"),
        ("factor=1", "whole block"),
        ("survival=0", "survival"),
        ("width=0", "width"),
        ("depth=20", "depth"),
        ("validation=400", "400 images for validation"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_trained(
    tmp_path: Path, word: str, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        ROWS.run(tmp_path, word)

    assert message in str(refused.value)


class _Judged:
    """In place of `Variants`: accuracy and loss on validation images by which blocks are out."""

    def __init__(self, seen: Dict[Tuple[str, ...], Tuple[float, float]]) -> None:
        self.splits = types.SimpleNamespace(validation="validation", test="test")
        self.seen = seen
        self.tested: List[Tuple[str, ...]] = []

    def on(self, feed: str, net: torch.nn.Module) -> Any:
        out = tuple(name for name, module in net.named_modules() if isinstance(module, NoResidual))
        if feed == "test":
            self.tested.append(out)
        accuracy, loss = self.seen.get(out, (10.0, 1.0))
        return types.SimpleNamespace(accuracy=accuracy, loss=loss)

    def settle(self, net: torch.nn.Module) -> bool:
        return True

    tune = settle

    def macs(self, net: torch.nn.Module) -> int:
        return 1


class TestGreedyChoice:
    @staticmethod
    def _order(seen: Dict[Tuple[str, ...], Tuple[float, float]], steps: int) -> Any:
        judged = _Judged(seen)
        said: Dict[str, Any] = {}
        ctx = types.SimpleNamespace(
            fact=said.__setitem__,
            metric=lambda name, values, **_: said.__setitem__(name, values),
            progress=lambda *_, **__: None,
        )
        net = cifar_resnet(18, 0.0625)
        found = ROWS.module("greedy").remove_greedily(ctx, judged, net, steps)
        assert list(found[-1].out) == said["greedy_order"]
        return said["greedy_order"], judged

    def test_the_most_accurate_goes_on_and_the_test_images_choose_nothing(self) -> None:
        seen = {
            ("layer3.1",): (80.0, 1.0),
            ("layer2.0",): (70.0, 0.1),
            ("layer2.0", "layer3.1"): (60.0, 1.0),
            ("layer1.0", "layer2.0"): (99.0, 1.0),
        }
        order, judged = self._order(seen, 2)

        assert order == ["layer3.1", "layer2.0"]
        assert judged.tested == [(), ("layer3.1",), ("layer2.0", "layer3.1")]

    def test_of_equal_ones_that_of_the_least_loss(self) -> None:
        nan = float("nan")
        seen = {("layer1.0",): (80.0, nan), ("layer2.1",): (80.0, 0.5), ("layer4.1",): (80.0, 0.2)}
        order, _ = self._order(seen, 1)

        assert order == ["layer4.1"]

    def test_one_branch_stays(self) -> None:
        order, _ = self._order({}, 99)

        assert len(order) == BLOCKS - 1


class TestDeclarations:
    def test_the_paper_profile_is_the_published_recipe(self) -> None:
        rows = ROWS.job(profile="paper").rows
        published = {
            "training": "plain", "width": 1.0, "epochs": 200, "batch_size": 128, "lr": 0.1,
            "momentum": 0.9, "weight_decay": 5e-4, "train_limit": 0, "test_limit": 0,
            "data": "cifar10",
        }  # fmt: skip

        assert {row.parameters["depth"] for row in rows} == {"18", "50"}
        assert len(rows) == 6
        for row in rows:
            assert {name: row.parameters[name] for name in published} == published

    def test_the_short_profile_is_of_twins_on_a_thousand_images(self) -> None:
        rows = ROWS.job(profile="short").rows

        assert [row.parameters["training"] for row in rows] == ["plain", "stochastic-depth"]
        for row in rows:
            named = {name: row.parameters[name] for name in ("width", "test_limit", "data")}
            assert named == {"width": 0.25, "test_limit": 1000, "data": "cifar10"}

    def test_ratios_are_of_the_figures_that_the_notes_give(self) -> None:
        document = load_toml(EXPERIMENTS / "residual-cutting" / "claims.toml")
        figures = {each["id"]: each["expected"]["any"].get("figure") for each in document["claim"]}

        assert figures["resnet18-links"] == pytest.approx(95.04 / 95.5, abs=5e-5)
        assert figures["resnet50-links"] == pytest.approx(35.45 / 95.88, abs=5e-5)
