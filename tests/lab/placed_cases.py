"""Models and plans for the tests of placed layers. The accelerator is the CPU, as stand-in."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from narrowgauge_contract.placement import PlacementPlan, parse_plan
from narrowgauge_lab.layers.hetero.convert import Converted, convert
from narrowgauge_lab.layers.hetero.ledger import Ledger

STAND_IN = torch.device("cpu")
_ROOT = Path(__file__).parents[2]


def plan(
    precision: str = "fp32",
    wire: str = "fp32",
    layers: Optional[Dict[str, Any]] = None,
    elsewhere: str = "cpu",
    passes: Optional[Dict[str, Any]] = None,
    **transfer: Any,
) -> PlacementPlan:
    """All passes on the accelerator, unless `passes` or `layers` say otherwise."""
    placed = {"device": "accelerator", "precision": precision, **(passes or {})}
    tensors = ("input", "output", "grad_output", "grad_input")
    document = {
        "plan": {"name": "test", "elsewhere": elsewhere},
        "passes": placed,
        "transfer": {**transfer, "wire": dict.fromkeys(tensors, wire)},
        "layers": layers or {},
    }
    return parse_plan(document, "test")


def placed(model: nn.Module, mode: str = "off", **said: Any) -> Converted:
    """The model with all its layers placed, whatever `said` says beside."""
    return convert(model, plan(**said), STAND_IN, Ledger(mode))


def twins(model: nn.Module, **said: Any) -> Tuple[nn.Module, nn.Module, Converted]:
    """A model, a placed copy of it, and the copy's handle."""
    copied = copy.deepcopy(model)
    return model, copied, placed(copied, **said)


class Residual(nn.Module):
    """A small ResNet: a stem, a plain block, a strided one with a shortcut, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.shortcut = nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self.last = nn.BatchNorm2d(16)
        self.classifier = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.stem(images)))
        hidden = hidden + torch.relu(self.first(hidden))
        hidden = torch.relu(self.last(self.second(hidden) + self.shortcut(hidden)))
        return self.classifier(hidden.mean((2, 3)))


class Often(nn.Module):
    """One layer, used `times` times."""

    def __init__(self, times: int, channels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.times = nn.Conv2d(channels, channels, 3, padding=1), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Checkpointed(nn.Module):
    """A block that runs a backward pass of its own inside of the whole; wants torch 1.11."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda h: self.one(self.two(h)), self.two(x), use_reentrant=True)
        return self.two(inner)


def residual(seed: int = 0) -> Residual:
    torch.manual_seed(seed)
    return Residual()


def images(batch: int = 4, size: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Of a loss that no two positions enter alike, by every parameter, by `autograd.grad`."""
    return torch.autograd.grad(loss_of(model, x), list(model.parameters()))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()


def same(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    """Bit for bit, all of them."""
    return all(torch.equal(one, other) for one, other in zip(ours, theirs))


def resnet20() -> nn.Module:
    """That of the experiment `resnet`."""
    path = _ROOT / "experiments" / "resnet" / "model.py"
    spec = importlib.util.spec_from_file_location("placed_resnet_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    made: nn.Module = module.ResNet(20)
    return made
