"""The two training experiments: published sizes, valid declarations, a row run from end to end."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from one_row import EXPERIMENTS, Rows
from torch import nn

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.spec import ExperimentSpec

NAMES = ("mnist", "resnet")


def _module(experiment: str, name: str) -> types.ModuleType:
    return Rows(experiment).module(name)


def _spec(name: str) -> ExperimentSpec:
    return Rows(name).spec()


def _job(name: str, *words: str, profile: str = "smoke") -> Job:
    return Rows(name).job(*words, profile=profile)


def _run(name: str, out: Path, *words: str) -> Row:
    return Rows(name).run(out, *words)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _macs(model: nn.Module, images: torch.Tensor) -> int:
    """Multiply-accumulates of convolutions and linear layers for one image."""
    total = []

    def count(module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        per_output = module.weight[0].numel()
        total.append(per_output * output[0].numel())

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(count)
    model.eval()
    with torch.no_grad():
        model(images)
    return sum(total)


def test_the_mnist_network_has_the_published_size() -> None:
    net = _module("mnist", "model").Net()

    assert _parameters(net) == 431080
    assert _macs(net, torch.zeros(1, 1, 28, 28)) == 24 * 24 * 20 * 25 + 8 * 8 * 50 * 500 + 405000
    shapes = [tuple(parameter.shape) for parameter in net.parameters() if parameter.dim() > 1]
    assert shapes == [(20, 1, 5, 5), (50, 20, 5, 5), (500, 800), (10, 500)]


def test_pooling_first_gives_what_the_original_order_gives() -> None:
    functional = torch.nn.functional
    net = _module("mnist", "model").Net()
    images = torch.randn(3, 1, 28, 28)
    hidden = functional.max_pool2d(functional.relu(net.conv1(images)), 2)
    hidden = functional.max_pool2d(functional.relu(net.conv2(hidden)), 2)
    expected = net.fc2(functional.relu(net.fc1(hidden.flatten(1))))

    assert torch.equal(net(images), expected)


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [(20, 269722), (32, 464154), (44, 658586), (56, 853018), (110, 1727962)],
)
def test_resnets_have_the_published_sizes(depth: int, parameters: int) -> None:
    net = _module("resnet", "model").ResNet(depth)

    assert _parameters(net) == parameters
    weighted = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(weighted) == depth


def test_resnet_20_has_the_published_cost() -> None:
    """40.55 million multiply-accumulates, and maps of 32, 16 and 8 pixels."""
    net = _module("resnet", "model").ResNet(20)
    images = torch.zeros(1, 3, 32, 32)
    stage = 6 * 16 * 16 * 9 * 1024
    first = [16 * 3 * 9 * 1024, stage, stage - 16 * 16 * 9 * 512, stage - 16 * 16 * 9 * 512, 640]

    assert _macs(net, images) == sum(first) == 40551040
    with torch.no_grad():
        hidden = net.blocks(torch.zeros(2, 16, 32, 32))
    assert hidden.shape == (2, 64, 8, 8)


def test_the_shortcut_is_option_a() -> None:
    """With both normalisations silent the block is its shortcut: strided pixels, zero channels."""
    block = _module("resnet", "model").Block(16, 32, 2).eval()
    nn.init.zeros_(block.bn2.weight)
    images = torch.rand(2, 16, 8, 8)
    with torch.no_grad():
        result = block(images)

    assert torch.equal(result[:, 8:24], images[:, :, ::2, ::2])
    assert not result[:, :8].any()
    assert not result[:, 24:].any()


@pytest.mark.parametrize("depth", [18, 3, 2, 21])
def test_a_depth_that_is_not_6n_plus_2_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match="6n \\+ 2"):
        _module("resnet", "model").ResNet(depth)


def test_only_depth_110_warms_up() -> None:
    schedule = _module("resnet", "run").schedule

    assert schedule(200, 0.1, 20).rate(0) == pytest.approx(0.1)
    assert [schedule(200, 0.1, 110).rate(e) for e in (0, 1, 100, 150)] == pytest.approx(
        [0.01, 0.1, 0.01, 0.001]
    )


def test_declared_depths_are_the_models() -> None:
    declared = _spec("resnet").parameter("depth").choices

    assert tuple(map(int, declared)) == _module("resnet", "model").DEPTHS


@pytest.mark.parametrize("name", NAMES)
def test_claims_follow_the_schema(name: str) -> None:
    claims = load_claims(EXPERIMENTS / name / "claims.toml", _spec(name))

    assert claims
    for claim in claims:
        assert claim.statistic == "last-mean", "never the best epoch on the test set"
        assert all(selection.metric == "test_accuracy" for selection in claim.selections)


def test_the_accuracy_bounds_are_those_promised() -> None:
    bounds = {}
    for name in NAMES:
        for claim in load_claims(EXPERIMENTS / name / "claims.toml", _spec(name)):
            if claim.kind.value == "bound":
                bounds[claim.id] = (claim.expected["any"].minimum, claim.minimum_repeats)

    assert bounds == {"mnist-fp32-accuracy": (99.0, 3), "resnet20-accuracy": (91.3, 3)}


@pytest.mark.parametrize("name", NAMES)
def test_drawings_and_headline_name_what_a_row_records(name: str, tmp_path: Path) -> None:
    row = _run(name, tmp_path, "data=synthetic", "train_limit=96")

    recorded = {metric.name for metric in row.metrics}
    files = {Path(side_file.path).name for side_file in row.side_files}
    spec = _spec(name)
    assert set(spec.headline) <= recorded
    kinds = {drawing.name: drawing.kind for drawing in spec.drawings}
    assert kinds == {"loss": "curve", "accuracy": "curve", "confusion": "confusion"}
    for drawing in spec.drawings:
        assert set(drawing.metrics) <= recorded
        assert not drawing.side_file or drawing.side_file in files


@pytest.mark.parametrize("name", NAMES)
def test_a_synthetic_row_says_so_and_takes_the_limit(name: str, tmp_path: Path) -> None:
    assert _job(name, "data=synthetic").synthetic
    row = _run(name, tmp_path, "data=synthetic", "train_limit=70", "batch_size=32")

    facts = row.facts
    assert facts["synthetic"] is True
    assert facts["training_images"] == 70
    assert facts["precision_ran"] == "fp32"
    assert row.validity.valid


def test_mnist_learns_made_up_digits(tmp_path: Path) -> None:
    row = _run("mnist", tmp_path, "data=synthetic", "train_limit=0", "epochs=3")

    losses = row.metric("train_loss").values
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_left_when_asked_for_and_load_again(name: str, tmp_path: Path) -> None:
    row = _run(name, tmp_path, "data=synthetic", "train_limit=40", "save_weights=true")

    (side_file,) = [found for found in row.side_files if found.path.endswith("/weights.pt")]
    state = torch.load(str(tmp_path / side_file.path))
    made = {"mnist": lambda m: m.Net(), "resnet": lambda m: m.ResNet(20)}
    model = made[name](_module(name, "model"))
    model.load_state_dict(state)
    # Not the flat tensor that training kept all parameters in, once per parameter.
    assert side_file.bytes < 4 * 1.1 * row.facts["parameter_count"] + 40000


def test_channels_last_trains_the_same_network(tmp_path: Path) -> None:
    """Another order of summation, so not bitwise: the first epoch's loss agrees to a percent."""
    losses: Dict[str, float] = {}
    for layout in ("nchw", "nhwc"):
        out = tmp_path / layout
        out.mkdir()
        words = ("data=synthetic", "train_limit=64", "batch_size=32", f"layout={layout}")
        (losses[layout],) = _run("resnet", out, *words).metric("train_loss").values

    assert losses["nhwc"] == pytest.approx(losses["nchw"], rel=1e-2)


def test_profiles_are_as_promised() -> None:
    paper = _job("resnet", profile="paper")
    assert len(paper.rows) == 3
    assert [row.seed for row in paper.rows] == [0, 1, 2]
    assert paper.parameters["epochs"] == 200
    assert paper.parameters["batch_size"] == 128
    published = _job("mnist", profile="paper").parameters
    assert {key: published[key] for key in ("epochs", "batch_size", "lr", "gamma")} == {
        "epochs": 5,
        "batch_size": 64,
        "lr": 1.0,
        "gamma": 0.1,
    }
    for name in NAMES:
        assert len(_job(name).rows) == 1
    assert len(_job("mnist", profile="short").rows) == 3
