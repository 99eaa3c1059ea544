"""Products that are captured once and replayed: the bits of products that are launched, by every
plan, through batches that change, layers that are used over, and weights that move."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Iterator, List, Tuple

import pytest
import torch
from placed_cases import (
    Checkpointed,
    Often,
    gradients,
    images,
    loss_of,
    plan,
    residual,
    resnet20,
    same,
)
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_contract.placement import BUILTIN, parse_plan
from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.layers.hetero.convert import Converted, convert
from narrowgauge_lab.layers.hetero.gradients import halves
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.measure.watch import watch
from narrowgauge_lab.optim import SGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.skipif(
        not torch_compat.graphs_available(torch.device("cuda")), reason="torch has no CUDA graphs"
    ),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    tf32_flags.allow_tf32(False)
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def _pair(
    model: nn.Module, said: Any, mode: str = "off"
) -> Tuple[nn.Module, Converted, nn.Module, Converted]:
    """Two placed copies, of which the second captures nothing."""
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    try:
        one, other = (convert(each, said, CUDA, Ledger(mode, CUDA)) for each in (first, second))
    except NotApplicableError as error:
        pytest.skip(error.why)
    other.bus.prepares = False
    return first, one, second, other


_PLANS = ["hetero-fp32", "hetero-tf32", "hetero-bf16", "hetero-fp16", "hetero-int8", "hetero-fp8"]


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", _PLANS)
def test_replayed_steps_have_the_bits_of_launched_ones(name: str, late: bool) -> None:
    model, one, twin, other = _pair(resnet20(), parse_plan(BUILTIN[name], name))
    optimisers = [SGD(model, 0.01), SGD(twin, 0.01)]
    for handle, optimiser in zip((one, other), optimisers):
        handle.watch(optimiser.values)
    for step, batch in enumerate((32, 32, 32, 20, 32, 20, 20, 32)):
        x = images(batch, size=32, seed=step)
        found = []
        for each, optimiser in zip((model, twin), optimisers):
            torch.manual_seed(step)  # of what int8 draws
            with deferred_weight_grads() if late else contextlib.nullcontext():
                optimiser.differentiate(loss_of(each, x) / 320)
            optimiser.step()
            found.append(optimiser.gradient.clone())
        assert bool(torch.isfinite(found[0]).all())
        assert torch.equal(found[0], found[1]), f"step {step}"
    assert not one.bus.notes()
    assert other.facts()["captured"] == 0
    # 19 convolutions: forward, input gradient of 18, weight gradient; the linear layer, which is
    # cuBLAS's at float precisions, is not.
    assert one.facts()["captured"] >= 19 + 18 + 19


@pytest.mark.parametrize("pieces", [2, 5, 8])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_in_pieces_on_four_streams(wire: str, pieces: int) -> None:
    model, one, twin, _ = _pair(resnet20(), plan(wire=wire, pieces=pieces))
    for step in range(20):
        x = images(32, size=32, seed=step)
        with deferred_weight_grads():
            assert same(gradients(model, x), gradients(twin, x)), f"step {step}"
    # Of each piece a forward pass and an input gradient; weight gradients by their parts.
    parts = len(halves([(at, at + 1) for at in range(pieces)]))
    assert one.facts()["captured"] >= pieces * (19 + 18) + parts * 18
    assert not one.bus.notes()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_weight_gradients_in_parts_are_those_of_the_whole(precision: str) -> None:
    """While the rest of the gradient is on its way, of a batch that takes a while to travel: what
    is multiplied too early is wrong."""
    layer = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    models = [copy.deepcopy(layer) for _ in range(3)]
    plans = [plan(precision, precision, pieces=pieces) for pieces in (1, 8, 8)]
    try:
        handles = [convert(model, said, CUDA) for model, said in zip(models, plans)]
    except NotApplicableError as error:
        pytest.skip(error.why)
    handles[2].bus.prepares = False
    x = torch.randn(512, 16, 32, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    above = torch.randn(512, 16, 32, 32, generator=torch.Generator().manual_seed(1))
    for step in range(12):
        found = []
        for model in models:
            torch.manual_seed(step)  # of what int8 draws
            outputs = model(x * (step + 1))
            with deferred_weight_grads() if step % 2 else contextlib.nullcontext():
                found.append(torch.autograd.grad(outputs, [x, model.weight], above)[1])
        assert torch.equal(found[1], found[2]), f"step {step}"
        distance = (found[1].double() - found[0].double()).norm() / found[0].double().norm()
        assert float(distance) < 1e-4, f"step {step}"


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_layer_that_is_used_over_and_over(times: int) -> None:
    model, one, twin, _ = _pair(Often(times, 8), plan(pieces=2))
    for step in range(1, 9):
        x = torch.randn(16, 8, 24, 24, generator=torch.Generator().manual_seed(step))
        with deferred_weight_grads():
            assert same(gradients(model, x), gradients(twin, x))
    assert one.facts()["captured"]


def test_old_losses_keep_their_inputs() -> None:
    model, _, twin, _ = _pair(Often(1, 8), plan())
    inputs = [torch.randn(16, 8, 24, 24) for _ in range(7)]
    losses = [(loss_of(model, x), loss_of(twin, x)) for x in inputs]
    for again in (True, False):
        for pair in reversed(losses):
            found = [
                torch.autograd.grad(loss, list(each.parameters()), retain_graph=again)
                for loss, each in zip(pair, (model, twin))
            ]
            assert same(*found)


def test_a_pass_inside_of_a_pass() -> None:
    model, _, twin, _ = _pair(Checkpointed(8), plan())
    for step in range(1, 7):
        x = torch.randn(16, 8, 24, 24, generator=torch.Generator().manual_seed(step))
        for each in (model, twin):
            each.zero_grad(set_to_none=True)
            with deferred_weight_grads():
                loss_of(each, x).backward()
        assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_weights_that_move_and_flags_that_change() -> None:
    model, one, twin, _ = _pair(residual(), plan())
    for step in range(9):
        if step == 3:
            optimiser = SGD(model, 0.1)
            one.watch(optimiser.values)
        if step == 6:
            torch.backends.cudnn.benchmark = True
        try:
            assert same(gradients(model, images(size=16)), gradients(twin, images(size=16)))
        finally:
            torch.backends.cudnn.benchmark = False
    assert not one.bus.notes()


@pytest.mark.parametrize("mode", ["bytes", "serial", "overlapped"])
def test_accounts_are_those_of_launched_steps(mode: str) -> None:
    model, one, twin, other = _pair(residual(), plan(wire="bf16", pieces=2), mode)
    seen: List[Any] = []
    for _ in range(4):
        seen = []
        for each, handle in ((model, one), (twin, other)):
            torch.cuda.synchronize()
            handle.ledger.clear()
            gradients(each, images(size=16))
            stages = [(e.layer, e.pass_, e.stage, e.lane, e.to_device, e.from_device)
                      for e in handle.ledger.intervals()]  # fmt: skip
            seen.append((handle.ledger.bytes_moved(), stages))
    assert one.facts()["captured"]
    assert seen[0] == seen[1]


def test_whoever_watches_sees_every_product() -> None:
    model, one, twin, _ = _pair(residual(), plan())
    x = images(size=16)
    for _ in range(3):
        gradients(model, x)
        gradients(twin, x)
    assert one.facts()["captured"]
    assert len(watch(lambda: gradients(model, x))) == len(watch(lambda: gradients(twin, x))) > 0


def test_the_devices_memory_does_not_grow() -> None:
    model, _, _, _ = _pair(resnet20(), plan())
    for step in range(6):
        gradients(model, images(32, size=32, seed=step))
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for step in range(20):
        gradients(model, images(32, size=32, seed=step))
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before
