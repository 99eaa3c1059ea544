"""Manual layers on a GPU: what the CPU gives, without waiting for the GPU."""

from __future__ import annotations

import copy
from typing import Any, Iterator, Tuple

import pytest
import torch
from manual_layer_cases import FLOATS, SHAPES, TABLES, Shape, linear

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.layers.manual.convert import choices, convert
from narrowgauge_lab.networks.manual_mnist import ManualNet

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::torch")]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    """Straight-through gradients are torch's own, and are compared in float32."""
    with tf32_flags.tf32_set_to(False):
        yield


def _results(layer: Any, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """The output, and the gradients by input, weight and bias, on the CPU."""
    x = x.clone().requires_grad_(True)
    result = layer(x)
    grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(5)).to(x.device)
    found = torch.autograd.grad(result, [x, layer.weight, layer.bias], grad)
    return tuple(each.detach().cpu() for each in (result, *found))


def _close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((result - expected).abs() <= 2e-5 * expected.abs().max()).all())


@pytest.mark.parametrize("gradient", ["straight-through", "local"])
@pytest.mark.parametrize("policy", [*FLOATS, *TABLES])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_convolution_gives_what_the_cpu_gives(shape: Shape, policy: str, gradient: str) -> None:
    layer, x = shape.layer(policy, gradient=gradient), shape.batch()
    expected = _results(layer, x)

    found = _results(copy.deepcopy(layer).to(CUDA), x.to(CUDA))

    if policy in TABLES:
        # Integers, and the same two roundings behind them.
        assert torch.equal(found[0], expected[0])
    for ours, theirs in zip(found, expected):
        assert _close(ours, theirs)


@pytest.mark.parametrize("policy", [*FLOATS, *TABLES])
def test_a_linear_layer_gives_what_the_cpu_gives(policy: str) -> None:
    layer, x = linear(policy, 37, 11), torch.randn(2, 5, 37)

    for ours, theirs in zip(
        _results(copy.deepcopy(layer).to(CUDA), x.to(CUDA)), _results(layer, x)
    ):
        assert _close(ours, theirs)


@pytest.mark.parametrize("policy", TABLES)
def test_a_proved_path_gives_what_the_table_gives(policy: str) -> None:
    for shape in SHAPES:
        x = shape.batch().to(CUDA)
        by_proof, by_table = (shape.layer(policy, path=each).to(CUDA) for each in ("auto", "table"))

        assert torch.equal(by_proof(x), by_table(x))


@pytest.mark.skipif(
    torch_compat.torch_version() < (1, 10), reason="torch 1.10 came to tell what waits"
)
@pytest.mark.parametrize("gradient", ["straight-through", "local"])
@pytest.mark.parametrize("policy", ["mitchell", "exact_int8", "lut8x8:ama5", "lut8x8:mitchell"])
def test_nothing_waits_for_the_gpu(policy: str, gradient: str) -> None:
    model = convert(ManualNet().to(CUDA), policy, gradient=gradient).model
    images = torch.randn(4, 1, 28, 28, device=CUDA)
    model(images).sum().backward()  # tables go to the GPU once

    torch.cuda.set_sync_debug_mode("error")
    try:
        model(images).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_they_run_on_the_stream_that_is_current() -> None:
    layer, x = SHAPES[0].layer("lut8x8:ama5").to(CUDA), SHAPES[0].batch().to(CUDA)
    expected = layer(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(side):
        for _ in range(20):
            x = x + 0
        result = layer(x)
    side.synchronize()

    assert torch.equal(result, expected)


def test_a_mixture_of_devices_is_refused() -> None:
    layer, x = SHAPES[0].layer("exact_int8").to(CUDA), SHAPES[0].batch()

    with pytest.raises(UsageError, match="got a tensor on cpu"):
        layer(x)


def test_the_record_says_what_this_gpu_does() -> None:
    model = convert(ManualNet(), "lut8x8:ama5").model.to(CUDA)

    assert {fact["path"] for fact in choices(model)} == {"structured"}
