"""A plan whose passes are of different precisions, as docs/placement.md has one."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import List

import pytest
import torch
from torch import nn

from narrowgauge_contract.placement_files import load_plan
from narrowgauge_lab.layers.hetero import convert
from narrowgauge_lab.layers.passes import missing

PAGE = Path(__file__).parents[2] / "docs" / "placement.md"


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        ("conv1", nn.Conv2d(3, 32, 3, padding=1)),
        ("relu", nn.ReLU()),
        ("conv2", nn.Conv2d(32, 32, 3, stride=2, padding=1)),
        ("flat", nn.Flatten()),
        ("head", nn.Linear(32 * 16, 10)),
    ]
    return nn.Sequential(OrderedDict(layers))


def _gradients(net: nn.Module, images: torch.Tensor) -> List[torch.Tensor]:
    loss = nn.functional.cross_entropy(net(images), torch.arange(len(images)).to(images.device))
    return [each.double() for each in torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize(
    ("precision", "device"),
    [("int8", "cpu"), *(pytest.param(p, "cuda", marks=pytest.mark.gpu) for p in ("int8", "fp8"))],
)
def test_each_pass_is_in_its_own_precision(precision: str, device: str, tmp_path: Path) -> None:
    why = missing("bf16", torch.device(device))
    if why:
        pytest.skip(f"no bf16 here: {why}")
    said = PAGE.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    assert said.count('"fp8"') == 1
    (tmp_path / "mine.toml").write_text(said.replace('"fp8"', f'"{precision}"'))
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    net, exact = _net().to(device), _gradients(_net().double(), images.double())

    convert(net, load_plan(tmp_path / "mine.toml"), torch.device(device))
    found = [each.cpu() for each in _gradients(net, images.to(device))]

    away = [float((one - other).norm() / other.norm()) for one, other in zip(found, exact)]
    # No product of 8 bits is before the last layer's own gradients: they are as near as bf16's.
    # What comes further down has been through one, and is no nearer than its steps allow.
    conv1, conv2, head = away[0], away[2], away[4]
    assert head < 0.02
    assert 0.003 < conv2 < 0.15
    assert 0.003 < conv1 < 0.15
    assert conv2 > head
