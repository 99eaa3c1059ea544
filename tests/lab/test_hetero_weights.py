"""When weights are sent: by version counters, which optimisers raise, or do not."""

from __future__ import annotations

import pytest
import torch
from placed_cases import images, loss_of, placed, residual
from torch import nn

from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.ledger import ALL_LAYERS
from narrowgauge_lab.optim import SGD

_X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(2))


def _sent(converted: object) -> int:
    """Bytes of weights since the last call."""
    ledger = converted.ledger  # type: ignore[attr-defined]
    total = sum(each.to_device for each in ledger.intervals() if each.stage == "refit")
    ledger.clear()
    return total


def test_the_counters_of_a_flat_optimisers_parameters_do_not_rise() -> None:
    """What `Weights.watch` is there for."""
    layer = nn.Conv2d(3, 4, 3, bias=False)
    optimiser = SGD(layer, 0.1)
    before, whole, value = layer.weight._version, optimiser.values._version, layer.weight.clone()
    optimiser.gradient.fill_(1.0)
    optimiser.step()

    assert layer.weight._version == before
    assert optimiser.values._version > whole
    assert not torch.equal(layer.weight, value)


@pytest.mark.parametrize("write", ["no_grad", "load", "new parameter", "data", "out"])
def test_a_written_weight_is_sent_and_an_unwritten_one_is_not(write: str) -> None:
    layer = nn.Conv2d(3, 4, 3, bias=False)
    converted = placed(layer, mode="serial", pieces=1)
    layer(_X)
    assert _sent(converted) == 4 * 4 * 27
    layer(_X)
    assert _sent(converted) == 0
    new = torch.randn(4, 3, 3, 3)
    if write == "no_grad":
        with torch.no_grad():
            layer.weight.copy_(new)
    elif write == "load":
        layer.load_state_dict({"weight": new})
    elif write == "new parameter":
        layer.weight = nn.Parameter(new.clone())
    elif write == "data":
        layer.weight.data = new.clone()
    else:
        with torch.no_grad():
            torch.add(new, 1, out=layer.weight)
    expected = nn.functional.conv2d(_X, layer.weight)
    assert torch.equal(layer(_X), expected)
    assert _sent(converted) == 4 * 4 * 27


def test_writes_through_data_are_told() -> None:
    layer = nn.Conv2d(3, 4, 3, bias=False)
    converted = placed(layer, mode="serial", pieces=1)
    layer(_X)
    layer.weight.data.mul_(2)
    converted.weights_changed()
    assert torch.equal(layer(_X), nn.functional.conv2d(_X, layer.weight))


@pytest.mark.parametrize("watched", [True, False])
def test_parts_of_one_tensor(watched: bool) -> None:
    model = residual()
    converted = placed(model, mode="serial", pieces=1)
    optimiser = SGD(model, 0.1)
    if watched:
        converted.watch(optimiser.values)
    weights = sum(p.numel() for n, p in model.named_parameters() if "norm" not in n) - 32
    twin = residual()
    own = SGD(twin, 0.1)
    for _ in range(3):
        for each, other in ((model, optimiser), (twin, own)):
            with deferred_weight_grads():
                other.differentiate(loss_of(each, images()))
            other.step()
        sent = [each for each in converted.ledger.intervals() if each.stage == "refit"]
        if watched:
            (one,) = sent
            assert one.layer == ALL_LAYERS
            assert one.to_device == 4 * optimiser.values.numel()
        else:
            # Each layer in its forward pass, and all but the first for the input gradient.
            again = weights - model.stem.weight.numel() - 10
            assert sum(each.to_device for each in sent) == 4 * (weights + again)
        converted.ledger.clear()
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        model.eval()(images())
    assert (_sent(converted) > 0) is True
    with torch.no_grad():
        model(images())
    assert (_sent(converted) == 0) is watched


def test_a_second_flat_tensor_replaces_the_first() -> None:
    model = residual()
    converted = placed(model, mode="serial", pieces=1)
    for _ in range(2):
        optimiser = SGD(model, 0.1)
        converted.watch(optimiser.values)
        optimiser.differentiate(loss_of(model, images()))
        optimiser.step()
        twin = residual(seed=4)
        twin.load_state_dict(model.state_dict())
        assert torch.equal(model.eval()(images()), twin.eval()(images()))
        model.train()
