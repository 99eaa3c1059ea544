"""Parts of DDNN under half precision: sums too large for it, and values that overflowed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from narrowgauge_lab.anytime.systems.ddnn_parts import MaxPooling, masked_norm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_maps_are_normalised_by_sums_in_float32(dtype: torch.dtype) -> None:
    """700 maps of 16×16 are 179,200 values, more than float16 counts to."""
    torch.manual_seed(0)
    half, whole = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    maps = (torch.randn(700, 2, 16, 16) * 3 + 2).to(dtype)
    present = torch.arange(700) % 7 > 0

    found = masked_norm(half, maps, present)
    wanted = masked_norm(whole, maps.float(), present)

    assert found.dtype == dtype
    assert torch.allclose(found.float(), wanted, atol=2e-2, rtol=2e-2)
    assert torch.equal(half.running_mean, whole.running_mean)
    assert torch.equal(half.running_var, whole.running_var)
    assert bool(torch.isfinite(half.running_var).all())
    assert half.running_var.dtype == torch.float32


def test_slopes_pass_through_half_maps() -> None:
    maps = torch.randn(4, 2, 3, 3).half().requires_grad_()
    norm = nn.BatchNorm2d(2)

    result = masked_norm(norm, maps, torch.tensor([True, True, False, True]))
    result.float().square().sum().backward()

    assert maps.grad is not None
    assert maps.grad.dtype == torch.float16
    assert bool(torch.isfinite(maps.grad).all())
    assert float(maps.grad[2].float().abs().max()) == 0.0
    assert norm.weight.grad is not None


def test_of_maps_in_double_precision_nothing_is_lost() -> None:
    norm = nn.BatchNorm2d(2).double()
    maps = torch.randn(4, 2, 3, 3, dtype=torch.float64)

    assert masked_norm(norm, maps, torch.ones(4, dtype=torch.bool)).dtype == torch.float64


def test_what_overflowed_is_the_largest_and_only_nobody_is_zero() -> None:
    """An overflow that became 0 would hide from the loss scale, and from whoever looks."""
    values = torch.tensor([[math.inf, 1.0], [-math.inf, -math.inf], [3.0, 4.0], [math.inf, 5.0]])
    present = torch.tensor([[True, True], [True, True], [False, False], [False, True]])

    found = MaxPooling(2, 1)(values[:, :, None], present)
    maps = MaxPooling(2, 1)(values.view(4, 2, 1, 1, 1).expand(4, 2, 1, 2, 3), present)

    assert found[:, 0].tolist() == [math.inf, -math.inf, 0.0, 5.0]
    assert torch.equal(maps, found.view(4, 1, 1, 1).expand(4, 1, 2, 3))


def test_of_no_samples_there_is_no_largest() -> None:
    none = MaxPooling(2, 3)(torch.zeros(0, 2, 3, 4, 4), torch.zeros(0, 2, dtype=torch.bool))

    assert none.shape == (0, 3, 4, 4)
