"""The image networks: torchvision's names and shapes, random weights that can be used, tracing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch import fx, nn

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.networks import (
    NETWORKS,
    NOTES,
    TINY,
    build,
    network,
    scale_activations,
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
    assert set(NETWORKS) == {*NOTES, *TINY, "resnet50-v1"}


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
    deep = network("resnet50-tiny").construct()
    blocks = [deep.layer1[0], *[type(deep.layer1[0])(32, 8, 1) for _ in range(40)]]
    for block in blocks[1:]:
        for module in block.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    deep.layer1 = nn.Sequential(*blocks)
    deep.eval()
    images = _images("resnet50-tiny", 4)

    assert max(_spreads(deep, images)) > 65504
    scale_activations(deep, images)
    assert max(_spreads(deep, images)) < 100


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
