"""Which generated kernel computes a layer: shape and variant of a call, and what a layer keeps.

What the kernels compute is tested where they are: test_sparse_emulation.py, and on a GPU below.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import types

import pytest
import torch

from narrowgauge_kernels import sparse_generated
from narrowgauge_kernels.sparse.errors import SparseArgumentError
from narrowgauge_kernels.sparse.shapes import Shape, Variant
from narrowgauge_kernels.sparse.tiles import default_tile
from narrowgauge_kernels.sparse_conv import sparse_conv2d, sparse_conv2d_ref
from narrowgauge_kernels.sparse_generated import Generated, shape_of, variant_of


def test_the_shape_is_that_of_the_tensors():
    x, weight = torch.zeros(2, 3, 9, 8), torch.zeros(4, 3, 5, 5)
    assert shape_of(x, weight, (2, 2), (1, 1)) == Shape(2, 3, 9, 8, 4, 5, 2, 1)


@pytest.mark.parametrize(
    ("weight", "stride", "padding", "message"),
    [
        (torch.zeros(4, 3, 3, 3), (2, 1), (1, 1), "stride is"),
        (torch.zeros(4, 3, 3, 3), (1, 1), (1, 0), "padding is"),
        (torch.zeros(4, 3, 3, 1), (1, 1), (1, 1), "kernel is"),
        (torch.zeros(4, 3, 7, 7), (1, 1), (3, 3), "kernel cannot be 7"),
    ],
    ids=["stride", "padding", "window", "size"],
)
def test_what_cannot_be_generated_is_refused(weight, stride, padding, message):
    with pytest.raises(SparseArgumentError, match=message):
        shape_of(torch.zeros(2, 3, 9, 8), weight, stride, padding)


@pytest.mark.parametrize(
    ("batch", "side", "dtype", "tf32", "precision", "granularity", "path"),
    [
        (1, 6, torch.float32, False, "fp32", "element", "fused"),
        (1, 56, torch.float32, True, "fp32", "element", "fused"),
        (1, 6, torch.float16, False, "fp16", "element", "fused"),
        (1, 39, torch.float16, False, "fp16", "element", "fused"),
        (1, 40, torch.float16, False, "fp16", "tensor-core", "fused"),
        (4, 6, torch.float32, False, "fp32", "element", "lists"),
        (8, 14, torch.float32, False, "fp32", "element", "lists"),
        (8, 6, torch.float32, True, "tf32", "tensor-core", "fused"),
        (8, 7, torch.float16, False, "fp16", "element", "lists"),
        (8, 14, torch.float16, False, "fp16", "tensor-core", "fused"),
    ],
    ids=str,
)
def test_the_variant_follows_dtype_pixels_and_layout(
    batch, side, dtype, tf32, precision, granularity, path
):
    x = torch.zeros(batch, 4, side, side, dtype=dtype)
    found = variant_of(x, True, True, False, tf32)
    assert (found.precision, found.granularity, found.path) == (precision, granularity, path)
    assert (found.layout, found.bias, found.relu_input, found.relu_output) == (
        "nchw", True, True, False,
    )  # fmt: skip
    last = x.contiguous(memory_format=torch.channels_last)
    assert variant_of(last, True, True, False, tf32).layout == "nhwc"


@pytest.mark.parametrize(
    ("capability", "granularity"), [((7, 0), "element"), ((8, 0), "tensor-core")]
)
def test_cards_without_the_products_skip_by_element(monkeypatch, capability, granularity):
    class OnCuda:
        dtype, shape, device, is_cuda = torch.float16, (8, 4, 14, 14), torch.device("cuda"), True

        def is_contiguous(self, memory_format=None):
            return True

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert variant_of(OnCuda(), False, True, False).granularity == granularity


@pytest.mark.parametrize(("recording", "number"), [(False, 55), (True, 0)])
def test_calls_of_no_layer_have_memory_by_stream(monkeypatch, recording, number):
    """One recording's stream is of its own, and what is warmed up is the default one's."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording, raising=False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=55)
    )
    assert sparse_generated._stream_number(torch.device("cuda:0")) == number


def test_what_belongs_to_no_layer_keeps_no_weight():
    assert not sparse_generated._SHARED._keeps_weights
    assert not pickle.loads(pickle.dumps(sparse_generated._SHARED))._keeps_weights


def test_other_dtypes_are_refused():
    with pytest.raises(SparseArgumentError, match="float64"):
        variant_of(torch.zeros(1, 1, 2, 2).double(), False, True, False)


def test_a_layer_keeps_its_kernels_and_a_copy_has_none(monkeypatch):
    asked = []

    def tile(shape, variant, device):
        asked.append(shape)
        return default_tile(shape, variant, "9.0")

    monkeypatch.setattr(sparse_generated, "best_tile", tile)
    monkeypatch.setattr(sparse_generated, "faster_path", lambda shape, variant, device: variant)
    monkeypatch.setattr(sparse_generated, "Convolution", lambda *given, **named: (*given, named))
    generated, weight = Generated(), torch.zeros(32, 64, 3, 3)
    small, large = torch.zeros(1, 64, 7, 7), torch.zeros(1, 64, 14, 14)
    rest = (weight, (1, 1), (1, 1))
    first = generated.convolution(small, *rest, Variant())
    assert generated.convolution(small, *rest, Variant()) is first
    assert generated.convolution(large, *rest, Variant()) is not first
    switched = generated.convolution(small, *rest, Variant(path="switched"), 0.5)
    assert switched[3] == 0.5
    assert len(asked) == 3
    other_stream = generated.convolution(small, *rest, Variant(), stream=7)
    assert other_stream is not first
    assert generated.convolution(small, *rest, Variant(), stream=7) is other_stream
    assert first[-1] == {"keeps_weight": True}
    for other in (copy.deepcopy(generated), pickle.loads(pickle.dumps(generated))):
        assert other.convolution(small, *rest, Variant()) is not first


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_on_a_gpu_the_function_is_near_float64_forward_and_backward(dtype, batch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((batch, 24, 9, 9), generator=generator)
    weight = torch.randn((20, 24, 3, 3), generator=generator) * 0.1
    bias = torch.randn(20, generator=generator)
    ours = [each.cuda().to(dtype).requires_grad_() for each in (x, weight, bias)]
    theirs = [each.detach().double().requires_grad_() for each in ours]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        result = sparse_conv2d(*ours, 2, 1, True, True)
        wanted = sparse_conv2d_ref(*theirs, 2, 1, True, True)
        result.backward(torch.ones_like(result))
    wanted.backward(torch.ones_like(wanted))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for one, other in [(result, wanted)] + [(a.grad, b.grad) for a, b in zip(ours, theirs)]:
        worst = (one.double() - other).abs().max().item()
        assert worst <= tolerance * max(1.0, other.abs().max().item())


def test_a_layer_takes_the_path_that_was_found_faster(monkeypatch):
    def other(shape, variant, device):
        return dataclasses.replace(variant, path="window")

    monkeypatch.setattr(sparse_generated, "faster_path", other)
    monkeypatch.setattr(sparse_generated, "best_tile", lambda *rest: default_tile(*rest[:2], "9.0"))
    monkeypatch.setattr(sparse_generated.Convolution, "__init__", _keep_variant)
    x, weight = torch.zeros(1, 4, 6, 6), torch.zeros(8, 4, 3, 3)
    made = Generated().convolution(x, weight, (1, 1), (1, 1), Variant())
    assert made.variant.path == "window"


def _keep_variant(self, shape, tile, variant, crossover=0.0, machine=None, keeps_weight=True):
    self.variant = variant
