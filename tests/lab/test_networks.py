"""The image networks: torchvision's names and shapes, random weights that can be used, tracing."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch import fx, nn

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.networks import (
    EARLY_STRIDE,
    NETWORKS,
    NOTES,
    TINY,
    build,
    network,
    scale_activations,
    scaling,
)

GOLDEN = Path(__file__).parents[1] / "data" / "networks" / "torchvision.json"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No random numbers: VGG's 140 million take seconds."""
    for name in ("kaiming_uniform_", "kaiming_normal_", "normal_", "uniform_"):
        monkeypatch.setattr(nn.init, name, lambda tensor, *_, **__: tensor)


def test_the_notes_have_21_networks_in_their_order() -> None:
    assert len(NOTES) == 21
    assert NOTES[:4] == ("alexnet", "squeezenet1_0", "squeezenet1_1", "resnet18")
    assert NOTES[-2:] == ("vgg19_bn", "mobilenet_v2")
    assert set(NETWORKS) == {*NOTES, *TINY, *EARLY_STRIDE}


@pytest.mark.usefixtures("undrawn")
def test_names_and_shapes_are_torchvisions() -> None:
    golden: Dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))

    found = {}
    for name in NOTES:
        model = network(name).construct()
        state = model.state_dict()
        lines = [f"{key} {'x'.join(map(str, t.shape)) or 'scalar'}" for key, t in state.items()]
        found[name] = {
            "parameters": sum(each.numel() for each in model.parameters()),
            "tensors": len(lines),
            "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        }
    assert found == golden


def test_a_seed_gives_the_same_weights_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = build("resnet18-tiny", 3), build("resnet18-tiny", 3), build("vgg-tiny")

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.conv1.weight, again.conv1.weight)
    assert not torch.equal(first.conv1.weight, build("resnet18-tiny", 4).conv1.weight)
    torch.manual_seed(0)
    assert torch.equal(other.features[0].weight, network("vgg-tiny").build().features[0].weight)
    assert not any(module.training for module in first.modules())


def test_an_unknown_network_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'resnet50'"):
        build("resnet5O")


@pytest.mark.parametrize("name", TINY)
def test_networks_can_be_traced_and_compute_the_same(name: str) -> None:
    model, images = build(name), _images(name, 2)

    traced = fx.symbolic_trace(model)
    with torch.no_grad():
        logits = model(images)
        assert torch.equal(traced(images), logits)
    assert logits.shape == (2, network(name).classes)


@pytest.mark.parametrize("name", TINY)
def test_scaled_weights_keep_activations_of_order_one_at_every_depth(name: str) -> None:
    model = scale_activations(build(name), _images(name, 4))

    spreads = _spreads(model, _images(name, 8, seed=1))
    # What ends in ReLU and a pool is smaller; residuals add up.
    assert all(0.05 < spread < 10 for spread in spreads), spreads


def test_without_scaling_a_deep_network_grows_and_with_it_float16_can_hold_it() -> None:
    deep, images = _deep(40), _images("resnet50-tiny", 4)

    assert max(_spreads(deep, images)) > 65504
    scale_activations(deep, images)
    assert max(_spreads(deep, images)) < 100


def test_rounding_to_float16_stays_small_in_a_deep_network(monkeypatch: pytest.MonkeyPatch) -> None:
    images = _images("resnet50-tiny", 4)
    found = []
    for branch in (scaling._BRANCH, 1.0):
        monkeypatch.setattr(scaling, "_BRANCH", branch)
        deep = scale_activations(_deep(40), images)
        found.append(_rounding(deep, images[:1]))

    assert found[0] < 0.02
    assert found[1] > 5 * found[0]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("resnet18-tiny", [r"layer\d\.\d\.bn2"]), ("resnet50-tiny", [r"layer\d\.\d\.bn3"]),
        ("densenet-tiny", []), ("vgg_bn-tiny", []),
    ],
)  # fmt: skip
def test_only_the_ends_of_residual_branches_are_damped(name: str, ends: List[str]) -> None:
    model = scale_activations(build(name), _images(name, 4))
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    damped = {n for n, m in norms.items() if float(m.weight.detach().max()) < 1}

    assert damped == {n for n in norms if any(re.fullmatch(end, n) for end in ends)}


def _deep(count: int) -> nn.Module:
    deep = network("resnet50-tiny").construct()
    blocks = [deep.layer1[0], *[type(deep.layer1[0])(32, 8, 1) for _ in range(count)]]
    generator = torch.Generator().manual_seed(0)
    for block in blocks[1:]:
        for module in block.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.data.normal_(generator=generator)
                module.weight.data.mul_((2 / module.weight[:, 0].numel()) ** 0.5)
    deep.layer1 = nn.Sequential(*blocks)
    return deep.eval()


def _rounding(model: nn.Module, images: torch.Tensor) -> float:
    """How far logits move, in norm, when all layers' outputs and weights are rounded to float16."""
    exact = copy.deepcopy(model).double()
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.BatchNorm2d)):
            module.register_forward_hook(lambda m, i, output: output.half().float())
    with torch.no_grad():
        wanted = exact(images.double())
        return float((model(images).double() - wanted).norm() / wanted.norm())


def test_scaling_is_deterministic_and_leaves_no_hooks() -> None:
    images = _images("mobilenet-tiny", 4)
    first, again = (scale_activations(build("mobilenet-tiny"), images) for _ in range(2))

    for one, other in zip(first.state_dict().values(), again.state_dict().values()):
        assert torch.equal(one, other)
    assert not any(module._forward_hooks for module in first.modules())


def test_one_value_per_channel_gives_no_zero_variance() -> None:
    """At the end of a network for 32×32 one image has one value per channel."""
    model = scale_activations(build("resnet50-tiny"), _images("resnet50-tiny", 1))

    assert max(_spreads(model, _images("resnet50-tiny", 8, seed=1))) < 30
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(bool((norm.running_var > 1e-4).all()) for norm in norms)


def _images(name: str, count: int, seed: int = 0) -> torch.Tensor:
    size = network(name).size
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def _spreads(model: nn.Module, images: torch.Tensor) -> List[float]:
    """The standard deviation of what each layer gives."""
    found: List[float] = []
    layers = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
    handles = [
        module.register_forward_hook(lambda _, __, output: found.append(float(output.std())))
        for module in model.modules()
        if isinstance(module, layers)
    ]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return found
