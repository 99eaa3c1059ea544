"""Placed layers against float64 autograd, and whole networks against themselves unplaced."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, Optional, Tuple

import pytest
import torch
from placed_cases import gradients, images, loss_of, placed, residual, twins
from torch import nn

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.modules import HeteroConv2d, HeteroLinear
from narrowgauge_lab.layers.hetero.wire import Codec

CPU = torch.device("cpu")

#: Of the largest value: float32 sums; a float type's rounding; int8's steps of a 127th.
_TOLERANCE = {"fp32": 2e-6, "fp16": 5e-3, "bf16": 4e-2, "int8": 5e-2}

_LAYERS = {
    "plain": (lambda: nn.Conv2d(4, 6, 3, padding=1), (3, 4, 9, 7)),
    "stride 2": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (3, 4, 9, 8)),
    "groups": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=2), (2, 4, 6, 6)),
    "dilation": (lambda: nn.Conv2d(4, 6, 3, dilation=2, bias=False), (2, 4, 9, 8)),
    "not square": (
        lambda: nn.Conv2d(3, 5, (1, 5), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
        (2, 3, 8, 13),
    ),
    "1x1": (lambda: nn.Conv2d(5, 3, 1, bias=False), (2, 5, 4, 4)),
    "batch 1": (lambda: nn.Conv2d(4, 6, 3), (1, 4, 6, 6)),
    "linear": (lambda: nn.Linear(12, 7), (5, 12)),
    "linear, more dimensions": (lambda: nn.Linear(12, 7, bias=False), (2, 3, 12)),
}


def _exact(layer: nn.Module, x: torch.Tensor, above: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """Output, gradients by input, weight and bias, in float64 by autograd."""
    wide = copy.deepcopy(layer).double()
    image = x.detach().double().requires_grad_()
    y = wide(image)
    return (y.detach(), *torch.autograd.grad(y, [image, *wide.parameters()], above.double()))


def _check(layer: nn.Module, x: torch.Tensor, tolerance: float, **said: Any) -> None:
    """`layer`, placed, against its own float64 twin, by all its results."""
    exact_layer = copy.deepcopy(layer)
    placed(layer, **said)
    assert isinstance(layer, (HeteroConv2d, HeteroLinear))
    x = x.detach().requires_grad_()
    y = layer(x)
    above = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    exact = _exact(exact_layer, x, above)
    found = (y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], above))
    for ours, theirs in zip(found, exact):
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
        off = float((ours.double() - theirs).abs().max())
        assert off <= tolerance * float(theirs.abs().max())


def _input(shape: Tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("pieces", [0, 2])
@pytest.mark.parametrize("name", _LAYERS)
def test_every_pass_agrees_with_float64(name: str, pieces: int) -> None:
    make, shape = _LAYERS[name]
    torch.manual_seed(1)
    _check(make(), _input(shape), _TOLERANCE["fp32"], pieces=pieces)


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("name", ["plain", "stride 2", "groups", "linear"])
def test_what_travels_rounded_is_right_to_its_rounding(name: str, wire: str) -> None:
    make, shape = _LAYERS[name]
    torch.manual_seed(1)
    layer = make()
    _check(copy.deepcopy(layer), _input(shape), _TOLERANCE[wire], wire=wire)
    _check(layer, _input(shape), _TOLERANCE[wire], wire=wire, pieces=3, policy="pinned")


@pytest.mark.parametrize("policy", ["pageable", "pinned", "mapped"])
def test_every_policy_and_unkept_inputs_give_the_same(policy: str) -> None:
    make, shape = _LAYERS["stride 2"]
    torch.manual_seed(1)
    _check(
        make(), _input(shape), _TOLERANCE["fp32"], policy=policy, resident=False,
        weights="each-call",
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["channels_last", "a view with gaps"])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_layouts(layout: str, wire: str) -> None:
    torch.manual_seed(1)
    x = _input((3, 4, 9, 16))
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    else:
        x = x[:, :, :, ::2]
    _check(nn.Conv2d(4, 6, 3, padding=1), x, _TOLERANCE[wire], wire=wire, pieces=2)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])
def test_an_empty_batch(wire: str) -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1)
    placed(layer, wire=wire)
    x = torch.zeros(0, 4, 5, 5, requires_grad=True)
    y = layer(x)
    by_input, by_weight, by_bias = torch.autograd.grad(y.sum(), [x, layer.weight, layer.bias])

    assert y.shape == (0, 6, 5, 5)
    assert by_input.shape == x.shape
    assert not by_weight.any()
    assert by_weight.shape == layer.weight.shape
    assert not by_bias.any()


@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("shape", [(3, 5, 4, 6), (1, 5, 1, 1), (4, 7)], ids=str)
def test_a_gradient_on_the_wire_has_one_scale(shape: Tuple[int, ...], last: bool) -> None:
    x = torch.randn(shape)
    x[:, 2] *= 100
    if last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    values, scale = torch.empty_like(x, dtype=torch.int8), torch.empty(shape[1])

    Codec(CPU).pack(values, scale, x, 3, whole=True)

    assert torch.equal(scale, scale[:1].expand_as(scale))
    assert float(scale[0]) == pytest.approx(float(x.abs().max()) / 127, rel=1e-6)
    assert float((values.float() * scale[0] - x).abs().max()) <= float(scale[0]) * 1.001
    assert values.stride() == x.stride()


def test_int8_gradients_are_rounded_by_torchs_generator_and_values_to_the_nearest() -> None:
    """Stochastic rounding repeats with the generator's state, which checkpoints keep."""
    torch.manual_seed(1)
    layer = nn.Conv2d(4, 6, 3)
    placed(layer, wire="int8")
    x = _input((2, 4, 8, 8)).requires_grad_()
    above = _input((2, 6, 6, 6))

    def once(seed: int) -> Tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        y = layer(x)
        return (y.detach(), *torch.autograd.grad(y, [x, layer.weight], above))

    first, again, other = once(7), once(7), once(8)
    for one, two in zip(first, again):
        assert torch.equal(one, two)
    assert torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])
    assert not torch.equal(first[2], other[2])
    # Unbiased: the mean of many roundings is what was rounded, where rounding to the nearest errs.
    placed(exact := copy.deepcopy(layer), wire="fp32")
    image = x.detach().requires_grad_()
    (theirs,) = torch.autograd.grad(exact(image), image, above)
    mean = torch.stack([once(seed)[1] for seed in range(40)]).mean(0)
    assert float((mean - theirs).abs().mean()) < 0.4 * float((first[1] - theirs).abs().mean())


@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])
def test_nan_stays_nan(wire: str) -> None:
    torch.manual_seed(1)
    layer = nn.Conv2d(2, 3, 3, padding=1)
    x = _input((2, 2, 5, 5))
    x[0, 1, 2, 2] = float("nan")
    exact = layer(x).isnan()
    placed(layer, wire=wire)
    y = layer(x)

    assert bool(y.isnan()[exact].all())
    if wire != "int8":  # where a channel with a NaN is NaN
        assert torch.equal(y.isnan(), exact)


@pytest.mark.parametrize(
    "passes",
    [
        {"forward": {"device": "cpu"}},
        {"input_grad": {"device": "cpu"}},
        {"weight_grad": {"device": "cpu"}},
        {"input_grad": {"device": "cpu"}, "weight_grad": {"device": "cpu"}},
        {"input_grad": {"backend": "faithful"}},
        {"forward": {"backend": "faithful"}, "weight_grad": {"backend": "faithful"}},
    ],
    ids=str,
)
def test_passes_at_different_places(passes: Any) -> None:
    make, shape = _LAYERS["stride 2"]
    torch.manual_seed(1)
    _check(make(), _input(shape), _TOLERANCE["fp32"], passes=passes)


def test_everything_on_the_accelerator() -> None:
    make, shape = _LAYERS["plain"]
    torch.manual_seed(1)
    layer = make()
    _check(copy.deepcopy(layer), _input(shape), _TOLERANCE["int8"], elsewhere="accelerator",
           precision="int8")  # fmt: skip
    _check(layer, _input(shape), _TOLERANCE["fp32"], elsewhere="accelerator",
           passes={"weight_grad": {"device": "cpu"}, "input_grad": {"device": "cpu"}})  # fmt: skip


@pytest.mark.parametrize("batch", [4, 3])
def test_a_placed_network_has_the_same_gradients_bit_for_bit(batch: int) -> None:
    model, other, _ = twins(residual(), pieces=1)
    x = images(batch)

    with deferred_weight_grads():
        found = gradients(other, x)

    assert torch.equal(model(x), other(x))
    for ours, theirs in zip(found, gradients(model, x)):
        assert torch.equal(ours, theirs)


def test_batches_of_changing_size() -> None:
    model, other, _ = twins(residual(), wire="fp16")
    model.eval(), other.eval()
    for batch in (4, 1, 7, 4):
        x = images(batch, size=8 if batch != 7 else 10)
        assert float((other(x) - model(x)).detach().abs().max()) < 2e-2


def test_training_steps_of_an_optimiser_made_before() -> None:
    """torch's own optimisers write their parameters in place; so does this one line of one."""
    model = residual()
    other = copy.deepcopy(model)
    optimised = [list(each.parameters()) for each in (model, other)]
    placed(other, pieces=1)
    x = images()
    for _ in range(3):
        for each, parameters in zip((model, other), optimised):
            with deferred_weight_grads():
                loss_of(each, x).backward()
            for parameter in parameters:
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

    for ours, theirs in zip(other.parameters(), model.parameters()):
        assert torch.equal(ours, theirs)


def test_only_what_is_asked_for_is_computed() -> None:
    layer = nn.Conv2d(3, 4, 3)
    converted = placed(layer, mode="serial")
    x = _input((2, 3, 6, 6))

    def passes() -> set:
        found = {each.pass_ for each in converted.ledger.intervals()}
        converted.ledger.clear()
        return found

    with torch.no_grad():
        assert not layer(x).requires_grad
    assert passes() == {"forward"}
    layer(x).sum().backward()
    assert passes() == {"forward", "weight_grad"}
    for each in layer.parameters():
        each.requires_grad_(False)
    image = x.clone().requires_grad_()
    layer(image).sum().backward()
    assert passes() == {"forward", "input_grad"}
    assert image.grad is not None
    layer.bias.requires_grad_(True)
    layer(x).sum().backward()
    assert passes() == {"forward", "weight_grad"}
    assert layer.bias.grad is not None
    assert layer.weight.grad is not None


def _kept(y: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
    return tuple(y.grad_fn.saved_tensors)  # type: ignore[union-attr]


def test_a_forward_pass_that_nobody_differentiates_keeps_nothing() -> None:
    layer = nn.Conv2d(3, 4, 3)
    placed(layer)
    x = _input((2, 3, 6, 6)).requires_grad_()

    assert len([each for each in _kept(layer(x)) if each is not None]) == 3
    layer.weight.requires_grad_(False)
    assert len([each for each in _kept(layer(x)) if each is not None]) == 2
    with torch.no_grad():
        assert layer(x).grad_fn is None


def test_the_backward_pass_may_be_repeated_and_not_differentiated() -> None:
    model = residual()
    placed(model)
    loss = loss_of(model, images())
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    with pytest.raises(UsageError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, parameters, create_graph=True)
    second = torch.autograd.grad(loss, parameters)
    for one, other in zip(first, second):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, parameters)


def test_a_weight_that_changed_before_the_backward_pass_is_an_error() -> None:
    layer = nn.Conv2d(3, 4, 3)
    placed(layer)
    y = layer(_input((2, 3, 6, 6)).requires_grad_())
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


def test_hooks_names_and_flags_stay() -> None:
    model = residual()
    model.eval()
    seen = []
    handle = model.first.register_forward_hook(lambda *_: seen.append("forward"))
    keys, before = list(model.state_dict()), {id(each) for each in model.parameters()}
    model.stem.weight.requires_grad_(False)
    first = model.first
    placed(model)

    model(images())
    assert seen == ["forward"]
    assert model.first is first
    assert not model.first.training
    handle.remove()
    model(images())
    assert seen == ["forward"]
    assert list(model.state_dict()) == keys
    assert {id(each) for each in model.parameters()} == before
    assert not model.stem.weight.requires_grad
    model.load_state_dict(residual(seed=9).state_dict())
    assert torch.equal(model.eval()(images()), residual(seed=9).eval()(images()))


def test_copies_and_pickles_are_placed_too_and_apart() -> None:
    model = residual().eval()
    converted = placed(model, mode="bytes")
    expected = model(images())
    converted.ledger.clear()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    options = {} if torch.__version__.startswith("1.") else {"weights_only": False}
    for other in (
        copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, **options),
    ):  # fmt: skip
        assert torch.equal(other(images()), expected)
        buses = {id(each.runner.bus) for each in other.modules() if hasattr(each, "runner")}
        assert len(buses) == 1
        assert id(converted.bus) not in buses
        with torch.no_grad():
            other.first.weight.mul_(2)
        assert not torch.equal(other(images()), expected)
        assert other.first.runner.ledger.bytes_moved()[0] > 0
    assert converted.ledger.bytes_moved() == (0, 0)
    assert torch.equal(model(images()), expected)


def test_other_types_and_places_are_refused_by_name() -> None:
    model = residual()
    placed(model)
    with pytest.raises(UsageError, match=r"layer 'stem' got torch\.float64"):
        model(images().double())


def test_one_image_without_a_batch() -> None:
    layer = nn.Conv2d(3, 4, 3)
    x = _input((1, 3, 6, 6))
    expected = layer(x)[0]
    placed(layer, pieces=1)
    assert torch.equal(layer(x[0]), expected)


def test_a_constructed_layer_is_torchs_own_until_it_is_placed() -> None:
    torch.manual_seed(0)
    layer = HeteroConv2d(3, 4, 3, padding=1)
    torch.manual_seed(0)
    own = nn.Conv2d(3, 4, 3, padding=1)
    x = _input((2, 3, 6, 6))
    assert torch.equal(layer(x), own(x))
    placed(layer, pieces=1)
    assert torch.equal(layer(x), own(x))
    assert layer.runner is not None
