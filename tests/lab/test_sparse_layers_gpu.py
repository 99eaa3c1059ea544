"""Sparse layers on a GPU: generated kernels against float64, under CUDA graphs, calibrated."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from narrowgauge_lab import tf32_flags
from narrowgauge_lab.layers.sparse import SparseConv2d, calibrate, convert
from narrowgauge_lab.layers.sparse.calibration import map_with_zeros

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _strict():
    with tf32_flags.tf32_set_to(False):
        yield


def layer_and_map(shape, filters, kernel=3, stride=1, dtype=torch.float32, backend="sparse"):
    torch.manual_seed(0)
    layer = SparseConv2d(
        shape[1], filters, kernel, stride, kernel // 2, relu_output=True, backend=backend
    )
    layer = layer.cuda().to(dtype).eval()
    x = torch.randn(shape, device="cuda").to(dtype)
    return layer, x


def wanted_of(layer, x):
    plain = copy.deepcopy(layer).double()
    return nn.functional.conv2d(
        x.double().relu(), plain.weight, plain.bias, layer.stride, layer.padding
    ).relu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "filters", "kernel", "stride"),
    [((1, 128, 14, 14), 32, 3, 1), ((8, 64, 14, 14), 64, 3, 2), ((2, 32, 9, 9), 24, 5, 1),
     ((1, 64, 7, 7), 128, 1, 2)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("backend", ["sparse", "switched"])
def test_the_layer_is_near_float64(shape, filters, kernel, stride, dtype, backend):
    layer, x = layer_and_map(shape, filters, kernel, stride, dtype, backend)
    for memory in (torch.contiguous_format, torch.channels_last):
        given = x.contiguous(memory_format=memory)
        with torch.no_grad():
            result = layer(given)
        wanted = wanted_of(layer, given)
        tolerance = 1e-5 if dtype == torch.float32 else 5e-3
        worst = (result.double() - wanted).abs().max().item()
        assert worst <= tolerance * wanted.abs().max().item()


@pytest.mark.parametrize("backend", ["sparse", "switched"])
def test_a_captured_layer_follows_its_map(backend):
    layer, x = layer_and_map((1, 64, 14, 14), 64, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = layer(x)
    for zeros in (0.0, 0.7, 1.0):
        x.copy_(map_with_zeros(x.shape, zeros, x))
        graph.replay()
        torch.cuda.synchronize()
        wanted = wanted_of(layer, x)
        assert (result.double() - wanted).abs().max().item() <= 1e-4


def test_a_calibrated_model_captures_and_computes_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 16, 1),
    ).cuda().eval()  # fmt: skip
    x = torch.randn(1, 3, 28, 28, device="cuda")
    converted = convert(model)
    found = calibrate(converted.model, x, levels=(0.0, 0.9), pairs=2, limit_s=0.1)
    assert [each.name for each in found] == ["2", "4"]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        converted.model(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = converted.model(x)
        graph.replay()
        torch.cuda.synchronize()
        wanted = model(x)
    assert (result - wanted).abs().max().item() <= 1e-4 * wanted.abs().max().item()


def test_gradients_are_the_dense_ones():
    layer, x = layer_and_map((2, 16, 9, 9), 8)
    other = copy.deepcopy(layer)
    other.adopt(type(layer.settings)(True, True, "dense"))
    for each in (layer, other):
        each(x).square().sum().backward()
    assert (layer.weight.grad - other.weight.grad).abs().max().item() <= (
        1e-4 * other.weight.grad.abs().max().item()
    )


def test_what_cannot_be_generated_is_dense_by_itself():
    layer, x = layer_and_map((1, 8, 9, 9), 8, 7, 1, backend="auto")
    chosen, why = layer.choose(x)
    assert chosen == "dense"
    assert "no kernel can be generated" in why
