"""2:4 sparsity of the weights of 1x1 convolutions: the pattern everywhere, the product on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import SkippedError, UsageError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.sparse import weights
from narrowgauge_lab.layers.sparse.weights import SemiStructuredConv2d, lacking, pruned, require


def test_the_two_largest_of_four_are_kept():
    row = torch.tensor([1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 4.0]).reshape(1, 8, 1, 1)
    wanted = torch.tensor([0.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 4.0]).reshape(1, 8, 1, 1)
    assert torch.equal(pruned(row), wanted)


def test_of_equal_ones_the_first_are_kept():
    for values in ([1.0, -1.0, 1.0, -1.0], [2.0, 2.0, 2.0, 3.0]):
        row = torch.tensor(values).reshape(1, 4, 1, 1)
        kept = pruned(row).flatten()
        assert int((kept != 0).sum()) == 2
    assert kept.tolist() == [2.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_group_of_four_has_two_zeros_and_loses_the_least(dtype):
    weight = torch.randn(32, 64, 1, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = pruned(weight)
    groups, were = kept.reshape(32, 16, 4), weight.reshape(32, 16, 4)
    assert bool(((groups != 0).sum(dim=-1) <= 2).all())
    assert torch.equal(kept[kept != 0], weight[kept != 0])
    lost = torch.where(groups == 0, were, torch.zeros_like(were)).float().abs()
    held = torch.where(groups == 0, torch.full_like(were, 99), were).float().abs()
    assert bool((lost.max(dim=-1)[0] <= held.min(dim=-1)[0]).all())


@pytest.mark.parametrize("shape", [(4, 6, 1, 1), (4, 8, 3, 3)], ids=str)
def test_weights_without_a_pattern_are_refused(shape):
    with pytest.raises(UsageError, match="no 2:4 pattern"):
        pruned(torch.zeros(shape))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(64, 32, 3), "only 1x1"),
        (nn.Conv2d(64, 32, 1, stride=2), "only 1x1"),
        (nn.Conv2d(64, 32, 1, padding=1), "only 1x1"),
        (nn.Conv2d(64, 33, 1), "multiples of 32 and 64"),
        (nn.Conv2d(60, 32, 1), "multiples of 32 and 64"),
        (nn.Conv2d(64, 32, 1), "float32"),
        (nn.Conv2d(64, 32, 1).half(), "for CUDA"),
    ],
    ids=str,
)
def test_what_cannot_run_is_skipped_with_the_reason(layer, reason):
    if reason == "for CUDA" and torch_compat.torch_version() < (2, 1):
        reason = "2.1 and later have"
    assert reason in lacking(layer, torch.device("cpu"))
    with pytest.raises(SkippedError, match="2:4 weight sparsity cannot run here"):
        require(layer, torch.device("cpu"))
    with pytest.raises(SkippedError):
        SemiStructuredConv2d(layer)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)], ids=str)
def test_cards_without_sparse_tensor_cores_are_skipped(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch_compat, "torch_version", lambda: (2, 4))
    why = lacking(nn.Conv2d(64, 32, 1).half(), torch.device("cuda"))
    assert ("no sparse tensor cores" in why) == (capability < (8, 0))


def test_the_layer_is_the_product_of_the_pruned_weight(monkeypatch):
    """With a dense tensor in place of the compressed one: rows, bias and layout."""
    monkeypatch.setattr(weights, "require", lambda layer, device: None)
    monkeypatch.setattr(weights, "_compressed", lambda dense: dense)
    layer = nn.Conv2d(64, 32, 1)
    made = SemiStructuredConv2d(layer)
    x = torch.randn(2, 64, 5, 6)
    wanted = nn.functional.conv2d(x, pruned(layer.weight), layer.bias)
    result = made(x)
    assert (result - wanted).abs().max().item() <= 1e-5
    assert result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 7, 7), (8, 14, 14)], ids=str)
def test_on_a_gpu_it_is_the_dense_product_of_the_pruned_weight(shape):
    batch, height, width = shape
    layer = nn.Conv2d(256, 128, 1).cuda().half()
    why = lacking(layer, torch.device("cuda"))
    if why:
        pytest.skip(why)
    x = torch.randn(batch, 256, height, width, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        wanted = nn.functional.conv2d(x.double(), pruned(layer.weight).double())
        wanted += layer.bias.double().reshape(1, -1, 1, 1)
        result = SemiStructuredConv2d(layer)(x)
    assert (result.double() - wanted).abs().max().item() <= 5e-3 * wanted.abs().max().item()
