"""BranchyNet: a trunk with side branches (Teerapittayanon, McDanel and Kung, ICPR 2016).

Shapes are those of the published program (kunglab/branchynet, `networks/`): pools round up, as in
Chainer, and local response normalisation adds 2, as Chainer's does. Two things are otherwise: what
a branch and the trunk both begin with is computed once, and convolutions of branches may have batch
normalisation. The program's weights of the losses never acted; here they belong to the objective.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State, laid_out, rectified

__all__ = ["NETS", "BranchyNet", "Net", "branchy_net"]


class BranchyNet(AnytimeNetwork):
    """`segments` of a trunk, each followed by one of `heads`, which takes what the segment gives
    and answers with logits. The last head is the end of the trunk itself."""

    def __init__(self, segments: Sequence[nn.Module], heads: Sequence[nn.Module], classes: int):
        super().__init__()
        self.segments = nn.ModuleList(segments)
        self.heads = nn.ModuleList(heads)
        self.exits = len(self.heads)
        self.classes = classes

    def begin(self, images: torch.Tensor) -> State:
        return (laid_out(images),)

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        hidden = self.segments[exit](state[0])
        logits = self.heads[exit](hidden) if head else hidden.new_empty((hidden.shape[0], 0))
        return Answer(logits, (hidden,))


@dataclasses.dataclass(frozen=True)
class Net:
    """One of the paper's three networks. `image`: channels, height, width; `thresholds`: those of
    the entropy in nats that Table I has."""

    image: Tuple[int, int, int]
    make: Callable[[_Layers], Tuple[List[nn.Module], List[nn.Module]]]
    thresholds: Tuple[float, ...]


def branchy_net(
    name: str, width: float = 1.0, head_norm: bool = False, classes: int = 10
) -> BranchyNet:
    """The network `name` of NETS with random weights. `width` scales all channels and hidden
    features (at least 1); `head_norm`: batch normalisation after each convolution of a branch.

    Raises UnknownNameError and BadValueError.
    """
    if name not in NETS:
        raise UnknownNameError("BranchyNet network", name, NETS)
    if not 0.0 < width <= 4.0:
        raise BadValueError(
            f"width {width:g} is not within 0 to 4", next_step="1 is as published, 0.25 a quarter"
        )
    layers = _Layers(width, head_norm, classes)
    return BranchyNet(*NETS[name].make(layers), classes)


@dataclasses.dataclass(frozen=True)
class _Layers:
    """Makes layers of scaled width, their weights by the deviation that Chainer takes."""

    width: float
    head_norm: bool
    classes: int

    def scaled(self, channels: int) -> int:
        return max(1, round(channels * self.width))

    def conv(self, before: int, after: int, size: int, padding: int) -> nn.Conv2d:
        """Of the channels as published; 1 and 3 are those of images and stay."""
        entering = before if before in (1, 3) else self.scaled(before)
        layer = nn.Conv2d(entering, self.scaled(after), size, padding=padding)
        return _lecun(layer)

    def head_conv(self, before: int, after: int, size: int, padding: int) -> List[nn.Module]:
        norm = [nn.BatchNorm2d(self.scaled(after))] if self.head_norm else []
        return [self.conv(before, after, size, padding), *norm]

    def flat(self, channels: int, pixels: int, after: int) -> nn.Linear:
        return _lecun(nn.Linear(self.scaled(channels) * pixels, self.scaled(after)))

    def answer(self, channels: int, pixels: int = 1) -> nn.Linear:
        return _lecun(nn.Linear(self.scaled(channels) * pixels, self.classes))


def _lecun(layer: nn.Module, gain: str = "linear") -> nn.Module:
    """Normal weights of deviation 1 / √fan-in, √2 times that for `relu`; no bias to begin with."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity=gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class _ReLU(nn.ReLU):
    """Of what nobody else reads."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return rectified(maps)


def _pool(size: int) -> nn.MaxPool2d:
    """Stride 2. Chainer's pools cover every pixel, so the last window may hang over the edge."""
    return nn.MaxPool2d(size, stride=2, ceil_mode=True)


class _ResponseNorm(nn.Module):
    """x / (2 + 5e-5 · Σ x²)^¾, the sum over a channel and its two neighbours. torch's own has the
    constant 1 and divides the factor by 3 unless told otherwise, and in 1.8 takes no empty batch.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        squares = F.pad(images * images, (0, 0, 0, 0, 1, 1))
        around = squares[:, :-2] + squares[:, 1:-1] + squares[:, 2:]
        root = around.mul(5e-5).add(2.0).sqrt()
        return images / (root * root.sqrt())


def _lenet(layers: _Layers) -> Tuple[List[nn.Module], List[nn.Module]]:
    """1×28×28 → 30² → 15² → 17² → 9² → 11² → 6²."""
    first = nn.Sequential(layers.conv(1, 5, 5, 3), _pool(2), _ReLU())
    branch = nn.Sequential(
        *layers.head_conv(5, 10, 3, 1), _pool(2), _ReLU(), nn.Flatten(), layers.answer(10, 8 * 8)
    )
    rest = nn.Sequential(
        layers.conv(5, 10, 5, 3), _pool(2), _ReLU(), layers.conv(10, 20, 5, 3), _pool(2),
        _ReLU(), nn.Flatten(), layers.flat(20, 6 * 6, 84),
    )  # fmt: skip
    return [first, rest], [branch, layers.answer(84)]


def _alexnet(layers: _Layers) -> Tuple[List[nn.Module], List[nn.Module]]:
    """3×32×32 → 32² → 16² → 8² → 4². The paper's text has the first branch after the first
    convolution, the program after the second: this is the program's."""
    first = nn.Sequential(
        layers.conv(3, 32, 5, 2), _ReLU(), _pool(3), _ResponseNorm(),
        layers.conv(32, 64, 5, 2), _ReLU(), _pool(3), _ResponseNorm(),
    )  # fmt: skip
    branch_1 = nn.Sequential(
        *layers.head_conv(64, 32, 3, 1), _ReLU(), *layers.head_conv(32, 32, 3, 1), _ReLU(),
        _pool(3), nn.Flatten(), layers.answer(32, 4 * 4),
    )  # fmt: skip
    second = nn.Sequential(layers.conv(64, 96, 3, 1), _ReLU())
    branch_2 = nn.Sequential(
        _pool(3), _ResponseNorm(), *layers.head_conv(96, 32, 3, 1), _ReLU(), _pool(3),
        nn.Flatten(), layers.answer(32, 2 * 2),
    )  # fmt: skip
    rest = nn.Sequential(
        layers.conv(96, 96, 3, 1), _ReLU(), layers.conv(96, 64, 3, 1), _ReLU(), _pool(3),
        nn.Flatten(), layers.flat(64, 4 * 4, 256), _ReLU(), nn.Dropout(0.5),
        layers.flat(256, 1, 128), _ReLU(), nn.Dropout(0.5),
    )  # fmt: skip
    return [first, second, rest], [branch_1, branch_2, layers.answer(128)]


class _ResBlock(nn.Module):
    """Two 3×3 convolutions, normalised, and a shortcut without parameters: every second pixel where
    the map shrinks, and zeros before the old channels. Normalisation makes biases idle, so there
    are none."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = after - before
        self.conv1 = _lecun(nn.Conv2d(before, after, 3, stride, 1, bias=False), "relu")
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = _lecun(nn.Conv2d(after, after, 3, 1, 1, bias=False), "relu")
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        shortcut = images[:, :, :: self.stride, :: self.stride]
        if self.extra:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.extra, 0))
        hidden = rectified(self.bn1(self.conv1(images)))
        return rectified(self.bn2(self.conv2(hidden)) + shortcut)


def _resnet(layers: _Layers) -> Tuple[List[nn.Module], List[nn.Module]]:
    """3×32×32 → 30² (no padding) → 15² → 8² → 3². The program has had three first branches; this
    is the one after the first convolution."""
    sizes = [layers.scaled(channels) for channels in (16, 32, 64)]
    blocks: List[nn.Module] = []
    before = sizes[0]
    for after in sizes:
        for position in range(18):
            narrows = position == 0 and after != sizes[0]
            blocks.append(_ResBlock(before, after, 2 if narrows else 1))
            before = after
    first = nn.Sequential(layers.conv(3, 16, 3, 0), nn.BatchNorm2d(sizes[0]), _ReLU())
    branch_1 = nn.Sequential(
        *layers.head_conv(16, 64, 5, 2), _ReLU(), _ResponseNorm(),
        *layers.head_conv(64, 32, 3, 1), _ReLU(), *layers.head_conv(32, 32, 3, 1), _ReLU(),
        nn.Flatten(), layers.answer(32, 30 * 30),
    )  # fmt: skip
    branch_2 = nn.Sequential(
        _ResBlock(sizes[0], sizes[0], 1), nn.Flatten(), layers.answer(16, 30 * 30)
    )
    rest = nn.Sequential(*blocks[18:], nn.AvgPool2d(6, stride=1), nn.Flatten())
    segments = [first, nn.Sequential(*blocks[:18]), rest]
    return segments, [branch_1, branch_2, layers.answer(64, 3 * 3)]


#: By the names that parameters have.
NETS: Dict[str, Net] = {
    "b-lenet": Net((1, 28, 28), _lenet, (0.025,)),
    "b-alexnet": Net((3, 32, 32), _alexnet, (1e-4, 0.05)),
    "b-resnet-110": Net((3, 32, 32), _resnet, (0.3, 0.2)),
}
