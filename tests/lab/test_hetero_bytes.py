"""Bytes over the bus: ours by hand for ResNet-20 at batch 32, against the original algorithm's."""

from __future__ import annotations

from typing import Tuple

import pytest
import torch
from placed_cases import STAND_IN, loss_of, placed, plan, resnet20
from torch import nn

from narrowgauge_contract.placement import BUILTIN, parse_plan
from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.hetero.backends.faithful import bytes_per_call
from narrowgauge_lab.layers.hetero.convert import convert
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.passes import Problem
from narrowgauge_lab.optim import SGD

#: (input channels and side, output channels and side) of the 19 convolutions, in their order.
_CONVOLUTIONS = (
    ((3, 32), (16, 32)),
    *(((16, 32), (16, 32)),) * 6,
    ((16, 32), (32, 16)),
    *(((32, 16), (32, 16)),) * 5,
    ((32, 16), (64, 8)),
    *(((64, 8), (64, 8)),) * 5,
)


def _by_hand(batch: int, wire: str) -> Tuple[int, int]:
    """Bytes up and down of one step: x and g up, y and gx down, and the weights both ways."""
    value_bytes = {"fp32": 4, "fp16": 2, "int8": 1}[wire]
    up = down = weights = 0
    layers = [(c * s * s, k * t * t, c, k, c * k * 9) for (c, s), (k, t) in _CONVOLUTIONS]
    layers.append((64, 10, 64, 10, 64 * 10 + 10))
    for number, (inputs, outputs, channels, filters, count) in enumerate(layers):
        # The first layer's input has no gradient.
        down += batch * value_bytes * (outputs + (inputs if number else 0))
        up += batch * value_bytes * (inputs + outputs)
        weights += 4 * count
        if wire == "int8":
            up += _scales(channels) + _scales(filters)
            down += _scales(filters) + (_scales(channels) if number else 0)
    return up + weights, down + weights


def _scales(channels: int) -> int:
    """4 bytes per channel, up to the next multiple of 16 where they share a buffer."""
    return -(-4 * channels // 16) * 16 if torch_compat.reinterprets() else 4 * channels


def _faithful_bytes(batch: int) -> int:
    """The original algorithm's bytes of a step at fp32, of convolutions: all that it sends."""
    total = 0
    for number, ((c, s), (k, t)) in enumerate(_CONVOLUTIONS):
        problem = Problem("conv2d", (s // t, s // t), (1, 1))
        moved = bytes_per_call(problem, (batch, c, s, s), (k, c, 3, 3))
        total += sum(sum(each) for key, each in moved.items() if number or key != "input_grad")
    return total


def _step(name: str, wire: str, batch: int) -> Tuple[int, int]:
    """Bytes of a step of ResNet-20; its plan is a built-in's, but for the precision of products,
    which does not travel and may be slow here."""
    document = dict(BUILTIN[name], passes={"device": "accelerator", "precision": "fp32"})
    assert set(document["transfer"]["wire"].values()) == {wire}
    model, ledger = resnet20(), Ledger("bytes", STAND_IN)
    convert(model, parse_plan(document, name), STAND_IN, ledger)
    with deferred_weight_grads():
        loss_of(model, torch.randn(batch, 3, 32, 32)).backward()
    return ledger.bytes_moved()


_PLANS = [("hetero-fp32", "fp32", 7), ("hetero-fp16", "fp16", 14), ("hetero-int8", "int8", 27)]


@pytest.mark.parametrize(("name", "wire", "least"), _PLANS)
def test_a_step_of_resnet20_moves_what_it_must(name: str, wire: str, least: int) -> None:
    assert _step(name, wire, batch=2) == _by_hand(2, wire)
    assert _faithful_bytes(32) / sum(_by_hand(32, wire)) >= least


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wire", "least"), _PLANS)
def test_at_batch_32_too(name: str, wire: str, least: int) -> None:
    assert _step(name, wire, batch=32) == _by_hand(32, wire)


def test_the_original_algorithm_counts_what_its_formula_says() -> None:
    model, ledger = resnet20(), Ledger("bytes", STAND_IN)
    convert(model, parse_plan(BUILTIN["original-fp32"], "original"), STAND_IN, ledger)
    loss_of(model, torch.randn(2, 3, 32, 32)).backward()
    assert sum(ledger.bytes_moved()) == _faithful_bytes(2)


def test_weights_that_share_a_tensor_go_up_in_one_copy() -> None:
    model, ledger = resnet20(), Ledger("bytes", STAND_IN)
    converted = convert(model, parse_plan(BUILTIN["hetero-fp32"], "test"), STAND_IN, ledger)
    optimiser = SGD(model, 0.1)
    converted.watch(optimiser.values)
    with deferred_weight_grads():
        optimiser.differentiate(loss_of(model, torch.randn(2, 3, 32, 32)))

    up, down = ledger.bytes_moved()
    placed_weights = 4 * sum(
        each.numel() for runner in converted.model.modules() if hasattr(runner, "runner")
        for each in runner.parameters()
    )  # fmt: skip
    # Batch norms' parameters are parts of the same tensor, and so are the gaps between parameters.
    whole = 4 * optimiser.values.numel()
    assert up - _by_hand(2, "fp32")[0] == whole - placed_weights < 0.01 * whole
    assert down == _by_hand(2, "fp32")[1]


def test_the_parts_of_a_step_add_up() -> None:
    model = nn.Conv2d(3, 4, 3, bias=True)
    converted = placed(model, mode="overlapped", wire="fp16", pieces=2)
    x = torch.randn(4, 3, 6, 6, requires_grad=True)
    model(x).sum().backward()
    intervals = converted.ledger.intervals()

    moved = {}
    for each in intervals:
        key = (each.pass_, each.stage)
        moved[key] = moved.get(key, 0) + each.to_device + each.from_device
    assert moved[("forward", "refit")] == 4 * (4 * 27 + 4)
    assert moved[("forward", "to_device")] == 2 * 4 * 3 * 36
    assert moved[("forward", "from_device")] == 2 * 4 * 4 * 16
    assert moved[("input_grad", "to_device")] == 2 * 4 * 4 * 16
    assert moved[("input_grad", "from_device")] == 2 * 4 * 3 * 36
    assert moved[("weight_grad", "from_device")] == 4 * (4 * 27 + 4)
    assert sum(moved.values()) == sum(converted.ledger.bytes_moved())
    assert len([each for each in intervals if each.stage == "to_device"]) == 4


def test_what_is_not_resident_and_sent_each_call_moves_again() -> None:
    moved = {}
    for resident, weights in ((True, "dirty"), (False, "each-call")):
        layer = nn.Conv2d(3, 4, 3, bias=False)
        converted = placed(layer, mode="bytes", resident=resident, weights=weights)
        for _ in range(2):
            converted.ledger.clear()
            layer(torch.randn(4, 3, 6, 6, requires_grad=True)).sum().backward()
        moved[resident] = converted.ledger.bytes_moved()
    x, weight = 4 * 4 * 3 * 36, 4 * 4 * 27
    assert moved[False][0] - moved[True][0] == x + 2 * weight
    assert moved[False][1] == moved[True][1]


def test_a_cpu_plan_moves_nothing() -> None:
    model = resnet20()
    converted = convert(model, plan(passes={"device": "cpu"}), STAND_IN, Ledger("bytes"))
    loss_of(model, torch.randn(2, 3, 32, 32)).backward()
    assert converted.ledger.bytes_moved() == (0, 0)
    assert len(converted.runners) == 20
    assert not convert(model, plan(passes={"device": "cpu"}), STAND_IN).runners
