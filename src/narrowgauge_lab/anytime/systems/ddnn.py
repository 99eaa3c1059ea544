"""DDNN: one network over end devices and a cloud (Teerapittayanon, McDanel and Kung, ICDCS 2017).

Each device sees one view and makes a class vector and feature maps of it. Class vectors together
are the local exit; where it is not sure, maps go up and the cloud finishes. Two kinds of device:
`binary`, the paper's, and `residual`, that of the program's PyTorch branch, whose devices have no
local exit of their own there. What is absent is masked out of aggregation, normalisation and loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Iterator, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.anytime.gradients import Combination, Sum
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.anytime.objective import Losses, Objective
from narrowgauge_lab.anytime.systems.ddnn_parts import (
    AGGREGATIONS,
    BinaryConv,
    BinaryDevice,
    BinaryLinear,
    ResidualDevice,
    ResidualLayer,
    Uplink,
    sign,
)
from narrowgauge_lab.anytime.views import Packed, Tiles

__all__ = ["DDNN", "DEVICES", "Cut", "Design", "DeviceLosses", "uplink_bytes"]

DEVICES = ("binary", "residual")
#: Channels of the cloud's layers: of the PyTorch branch, and of the paper.
_CLOUD = (64, 64, 128, 128, 128)
_BINARY_CLOUD = 16


@dataclasses.dataclass(frozen=True)
class Design:
    """What is built. `local`, `cloud`: names of AGGREGATIONS; `bits` of a value on the uplink, 32
    as it is; `filters`, `layers`: of a binary device; `width` scales the channels of the residual
    kind; `view_dropout`: how often each view is left out of a training sample, one being kept."""

    device: str = "residual"
    local: str = "mp"
    cloud: str = "cc"
    bits: int = 32
    filters: int = 4
    layers: int = 1
    width: float = 1.0
    view_dropout: float = 0.0

    def __post_init__(self) -> None:
        """Raises UnknownNameError and BadValueError."""
        for name in (self.local, self.cloud):
            if name not in AGGREGATIONS:
                raise UnknownNameError("aggregation", name, AGGREGATIONS)
        if self.device not in DEVICES:
            raise UnknownNameError("kind of device", self.device, DEVICES)
        wrong = [
            f"{name} {value:g}"
            for name, value, holds in (
                ("view_dropout", self.view_dropout, 0.0 <= self.view_dropout < 1.0),
                ("filters", self.filters, self.filters >= 1),
                ("layers", self.layers, self.layers >= 1),
                ("width", self.width, 0.0 < self.width <= 4.0),
            )
            if not holds
        ]
        if self.device == "binary" and self.bits != 1:
            wrong.append(f"an uplink of {self.bits} bits from binary devices")
        if wrong:
            raise BadValueError(f"no network has {', '.join(wrong)}")


@dataclasses.dataclass(frozen=True)
class Cut:
    """What crosses from a device to the cloud: `filters` maps of `pixels` values of `bits` each."""

    filters: int
    pixels: int
    bits: int

    @property
    def map_bytes(self) -> float:
        """Bytes of all maps of one view."""
        return self.filters * self.pixels * self.bits / 8


class DDNN(AnytimeNetwork):
    """Exit 0 is local, exit 1 the cloud's. `source` makes views of images."""

    def __init__(
        self,
        source: Union[Tiles, Packed],
        shape: Tuple[int, int, int],
        classes: int,
        design: Design = Design(),
    ) -> None:
        """`shape`: channels, height and width of a view."""
        super().__init__()
        self.exits, self.classes = 2, classes
        self.source, self.design, self.views = source, design, source.count
        #: Views that are out; see `losing`.
        self.lost: Tuple[int, ...] = ()
        #: Tiles are always present: ordinary batch normalisation will do.
        self.masked = not isinstance(source, Tiles)
        binary = design.device == "binary"
        self.devices = nn.ModuleList(
            BinaryDevice(shape, design.filters, design.layers, classes)
            if binary
            else ResidualDevice(shape[0], design.width, classes)
            for _ in range(self.views)
        )
        filters = self.devices[0].filters
        self.uplinks = nn.ModuleList(Uplink(filters, design.bits) for _ in range(self.views))
        self.local = AGGREGATIONS[design.local](self.views, classes)
        self.join = AGGREGATIONS[design.cloud](self.views, filters)
        vector = self.local.channels
        self.local_head: Optional[nn.Module] = None
        if vector != classes:
            self.local_head = (BinaryLinear if binary else nn.Linear)(vector, classes)
        maps = _sent_shape(shape, design)
        self.cut = Cut(filters, maps[0] * maps[1], design.bits)
        channels = self.join.channels
        if binary:
            self.cloud: nn.Module = _BinaryCloud(channels, maps, classes)
        else:
            self.cloud = _ResidualCloud(channels, design.width, classes)

    def begin(self, images: torch.Tensor) -> State:
        """Views [B, V, C, H, W] and which are present, bool [B, V]."""
        views = self.source(images)
        present = views.present
        if self.lost:
            present = present.clone()
            present[:, list(self.lost)] = False
        return views.images, present

    @contextlib.contextmanager
    def losing(self, views: Sequence[int]) -> Iterator[None]:
        """Within the block these views are out, whatever the data says.

        Raises BadValueError for views that there are not.
        """
        if any(not 0 <= view < self.views for view in views):
            raise BadValueError(f"no views {list(views)}", why=f"there are {self.views}, from 0")
        before, self.lost = self.lost, tuple(views)
        try:
            yield
        finally:
            self.lost = before

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        if exit == 1:
            sent, present = state
            return Answer(self.cloud(self.join(sent, present)), state)
        vectors, sent = self._devices(state[0], state[1], head)
        present = self._drop(state[1])
        if vectors is None:
            return Answer(sent.new_empty((sent.shape[0], 0)), (sent, present))
        return Answer(self._local(vectors, present), (sent, present))

    def answers(
        self, images: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, List[torch.Tensor]]:
        """Class vectors of the devices [B, V, classes], which views the data has, bool [B, V], and
        the logits of both exits."""
        pictures, there = self.begin(images)
        vectors, sent = self._devices(pictures, there, True)
        assert vectors is not None
        present = self._drop(there)
        last = self.cloud(self.join(sent, present))
        return vectors, there, [self._local(vectors, present), last]

    def _devices(
        self, pictures: torch.Tensor, present: torch.Tensor, head: bool
    ) -> Tuple[Optional[torch.Tensor], torch.Tensor]:
        vectors, sent = [], []
        for view, (device, uplink) in enumerate(zip(self.devices, self.uplinks)):
            mask = present[:, view] if self.masked else None
            maps = device(pictures[:, view], mask)
            sent.append(uplink(maps, mask))
            if head:
                vectors.append(device.vector(maps, sent[-1], mask))
        return torch.stack(vectors, 1) if head else None, torch.stack(sent, 1)

    def _local(self, vectors: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        joined = self.local(vectors, present)
        if self.local_head is None:
            return joined
        if isinstance(self.local_head, BinaryLinear):
            return self.local_head(joined, None)
        result: torch.Tensor = self.local_head(joined)
        return result

    def _drop(self, present: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.design.view_dropout:
            return present
        kept = torch.rand(present.shape, device=present.device) >= self.design.view_dropout
        kept = kept & present
        # Where none would be left, all stay: a sample of no view teaches nothing.
        return torch.where(kept.any(1, keepdim=True), kept, present)


class _ResidualCloud(nn.Module):
    """Residual layers of 64, 64, 128, half the size, 128, 128; a product of the mean map."""

    def __init__(self, channels: int, width: float, classes: int) -> None:
        super().__init__()
        sizes = [max(1, round(each * width)) for each in _CLOUD]
        pairs = zip([channels, *sizes[:-1]], sizes)
        self.layers = nn.ModuleList(ResidualLayer(*pair) for pair in pairs)
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            maps = layer(maps if number != 3 else F.avg_pool2d(maps, 2))
        return self.head(maps.mean((2, 3)))


class _BinaryCloud(nn.Module):
    """Twice a binary convolution of 16 filters, max pool 3 of stride 1, normalisation and sign;
    then a binary product."""

    def __init__(self, channels: int, size: Tuple[int, int], classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [BinaryConv(channels, _BINARY_CLOUD), BinaryConv(_BINARY_CLOUD, _BINARY_CLOUD)]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(_BINARY_CLOUD) for _ in range(2))
        self.head = BinaryLinear(_BINARY_CLOUD * size[0] * size[1], classes)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms):
            maps = sign(norm(F.max_pool2d(conv(maps), 3, stride=1, padding=1)))
        return self.head(maps.flatten(1), None)


class DeviceLosses(Objective):
    """The paper's: the cross entropy of the local exit, of the cloud's, and, as `extra`, of every
    device by the views that it has (a device that does not see the object is not taught by it)."""

    exits = 2
    extra = "devices_train_loss"

    def __init__(self, combination: Optional[Combination] = None) -> None:
        self.combination = Sum() if combination is None else combination
        self.combination.weights(self.exits)

    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        """See Objective."""
        assert isinstance(model, DDNN)
        vectors, present, answers = model.answers(images)
        batch, views, classes = vectors.shape
        every = labels.view(-1, 1).expand(batch, views).reshape(-1)
        each = F.cross_entropy(vectors.reshape(-1, classes).float(), every, reduction="none")
        weights = present.to(each.dtype)
        of_device = (each.view(batch, views) * weights).sum(0) / weights.sum(0).clamp(min=1.0)
        exits = tuple(F.cross_entropy(logits.float(), labels) for logits in answers)
        return Losses(exits, answers[-1].float(), of_device.sum())


def uplink_bytes(classes: int, cut: Cut, local_share: float) -> float:
    """Mean bytes that one device sends for a sample: its class vector in float32, and its maps
    where the sample goes up. The paper's 4|C| + (1 - l) f o / 8.

    Raises BadValueError for a share outside 0 to 1.
    """
    if not 0.0 <= local_share <= 1.0:
        raise BadValueError(f"a share of {local_share:g} of the samples")
    return 4.0 * classes + (1.0 - local_share) * cut.map_bytes


def _sent_shape(shape: Tuple[int, int, int], design: Design) -> Tuple[int, int]:
    height, width = shape[1:]
    for _ in range(design.layers if design.device == "binary" else 0):
        height, width = (height + 1) // 2, (width + 1) // 2
    return height, width
