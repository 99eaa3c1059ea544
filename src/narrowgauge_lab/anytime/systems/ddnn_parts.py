"""What a network that is cut over devices and a cloud is made of: devices, uplink, aggregation."""

from __future__ import annotations

import math
from typing import Dict, Optional, Tuple, Type

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError

__all__ = [
    "AGGREGATIONS", "Aggregation", "BinaryConv", "BinaryDevice", "BinaryLinear", "ResidualDevice",
    "ResidualLayer", "Uplink", "masked_norm", "quantise", "sign",
]  # fmt: skip


class _Rounded(torch.autograd.Function):
    """Any step function of values, with the slope 1 where |x| ≤ 1 and 0 elsewhere (straight
    through, as the published program clips it)."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, steps: int) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(values)
        if steps == 1:  # by the comparison itself: adding 1 would round small negative values away
            return torch.where(values < 0, -torch.ones_like(values), torch.ones_like(values))
        unit = (values.clamp(-1.0, 1.0) + 1.0) * (0.5 * steps)
        return torch.floor(unit + 0.5) * (2.0 / steps) - 1.0

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> Tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def, override]
        (values,) = ctx.saved_tensors
        return gradient * (values.abs() <= 1.0).to(gradient.dtype), None


def sign(values: torch.Tensor) -> torch.Tensor:
    """-1 below 0, else 1."""
    rounded: torch.Tensor = _Rounded.apply(values, 1)
    return rounded


def quantise(values: torch.Tensor, bits: int) -> torch.Tensor:
    """To the nearest of 2^bits equally spaced values from -1 to 1; `bits` of 1 is `sign`."""
    rounded: torch.Tensor = _Rounded.apply(values, 2**bits - 1)
    return rounded


def masked_norm(norm: nn.BatchNorm2d, maps: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Batch normalisation of maps [B, C, H, W] by the samples that are `present`, bool [B]: what an
    absent view's zeros would do to mean and deviation is not in them. In training what is absent
    becomes zeros, or it would grow from layer to layer. Reads nothing on the host. Maps of half
    precision, as autocast gives them, are summed in float32, as torch's own are.

    Of a batch where none is present, the running statistics stay as they are.
    """
    if not norm.training:
        return norm(maps)
    given = maps.dtype
    if given in (torch.float16, torch.bfloat16):
        maps = maps.float()
    weights = present.to(maps.dtype).view(-1, 1, 1, 1)
    pixels = maps.shape[2] * maps.shape[3]
    some = weights.sum() * pixels
    count = some.clamp(min=1.0)
    mean = (maps * weights).sum((0, 2, 3)) / count
    centred = maps - mean.view(1, -1, 1, 1)
    variance = (centred * centred * weights).sum((0, 2, 3)) / count
    with torch.no_grad():
        assert norm.running_mean is not None
        assert norm.running_var is not None
        # As torch: the running variance is the unbiased one.
        momentum = norm.momentum * (some > 0).to(maps.dtype)
        unbiased = variance * (count / (count - 1.0).clamp(min=1.0))
        norm.running_mean += momentum * (mean - norm.running_mean)
        norm.running_var += momentum * (unbiased - norm.running_var)
        norm.num_batches_tracked += 1
    scale = norm.weight * torch.rsqrt(variance + norm.eps)
    return ((centred * scale.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)) * weights).to(given)


def _normed(
    norm: nn.BatchNorm2d, maps: torch.Tensor, present: Optional[torch.Tensor]
) -> torch.Tensor:
    result: torch.Tensor = norm(maps) if present is None else masked_norm(norm, maps, present)
    return result


class Uplink(nn.Module):
    """What a device sends of its maps, with `bits` a value: normalised and quantised straight
    through, or as it is for 32."""

    def __init__(self, filters: int, bits: int) -> None:
        super().__init__()
        if not (1 <= bits <= 8 or bits == 32):
            raise BadValueError(
                f"an uplink of {bits} bits a value",
                why="values are quantised to 1 to 8 bits, or sent as they are in 32",
            )
        self.bits = bits
        self.norm: Optional[nn.BatchNorm2d] = nn.BatchNorm2d(filters) if bits < 32 else None

    def forward(self, maps: torch.Tensor, present: Optional[torch.Tensor]) -> torch.Tensor:
        """Maps [B, f, H, W] of one device; whether its view is present, bool [B], None: always."""
        if self.norm is None:
            return maps
        return quantise(_normed(self.norm, maps, present), self.bits)


class ResidualLayer(nn.Module):
    """Two 3×3 convolutions, normalised, and a shortcut where the channels are the same."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = before == after

    def forward(self, maps: torch.Tensor, present: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Maps [B, C, H, W]; with `present`, bool [B], normalised by those samples."""
        hidden = F.relu(_normed(self.norm1, self.conv1(maps), present))
        hidden = _normed(self.norm2, self.conv2(hidden), present)
        return F.relu(hidden + maps if self.shortcut else hidden)


class ResidualDevice(nn.Module):
    """A device of the published PyTorch program: five residual layers, and a class vector of the
    mean map. Sends the maps at full size."""

    #: Channels of the layers as published.
    LAYERS = (8, 8, 16, 16, 16)

    def __init__(self, channels: int, scale: float, classes: int) -> None:
        super().__init__()
        sizes = [max(1, round(each * scale)) for each in self.LAYERS]
        self.layers = nn.ModuleList(
            ResidualLayer(*pair) for pair in zip([channels, *sizes[:-1]], sizes)
        )
        self.filters = sizes[-1]
        self.head = nn.Linear(self.filters, classes)

    def forward(self, images: torch.Tensor, present: Optional[torch.Tensor]) -> torch.Tensor:
        """Maps [B, f, H, W] of views [B, C, H, W]."""
        maps = images
        for layer in self.layers:
            maps = layer(maps, present)
        return maps

    def vector(
        self, maps: torch.Tensor, sent: torch.Tensor, present: Optional[torch.Tensor]
    ) -> torch.Tensor:
        """Class vectors [B, classes], of the maps before the uplink."""
        del sent, present
        return self.head(maps.mean((2, 3)))


class _BinaryWeight(nn.Module):
    """Weights that compute as their signs; kept within -1 to 1, where the slope is 1."""

    weight: nn.Parameter

    def signs(self) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.clamp_(-1.0, 1.0)
        return sign(self.weight)


class BinaryConv(_BinaryWeight):
    """A 3×3 convolution by weights of ±1 and no bias."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(after, before, 3, 3))
        nn.init.uniform_(self.weight, -1.0, 1.0)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return F.conv2d(maps, self.signs(), padding=1)


class BinaryLinear(_BinaryWeight):
    """A product by weights of ±1, normalised."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, features))
        nn.init.uniform_(self.weight, -1.0, 1.0)
        self.norm = nn.BatchNorm2d(classes)

    def forward(self, features: torch.Tensor, present: Optional[torch.Tensor]) -> torch.Tensor:
        """[B, classes] of [B, features]."""
        product = F.linear(features, self.signs())[:, :, None, None]
        return _normed(self.norm, product, present)[:, :, 0, 0]


class BinaryDevice(nn.Module):
    """A device of the paper: `layers` of 3×3 convolution (float first, binary after), max pool 3
    of stride 2, normalisation and sign, with `filters` each; a binary product as class vector. The
    last normalisation and sign are the uplink's."""

    def __init__(
        self, shape: Tuple[int, int, int], filters: int, layers: int, classes: int
    ) -> None:
        """`shape`: channels, height and width of a view."""
        super().__init__()
        channels, height, width = shape
        self.first = nn.Conv2d(channels, filters, 3, padding=1)
        self.convs = nn.ModuleList(BinaryConv(filters, filters) for _ in range(layers - 1))
        self.norms = nn.ModuleList(nn.BatchNorm2d(filters) for _ in range(layers - 1))
        self.filters = filters
        for _ in range(layers):
            height, width = (height + 1) // 2, (width + 1) // 2
        self.head = BinaryLinear(filters * height * width, classes)

    def forward(self, images: torch.Tensor, present: Optional[torch.Tensor]) -> torch.Tensor:
        """Maps [B, f, H / 2^layers, W / 2^layers], rounded up, before the last sign."""
        maps = _pooled(self.first(images))
        for norm, conv in zip(self.norms, self.convs):
            maps = _pooled(conv(sign(_normed(norm, maps, present))))
        return maps

    def vector(
        self, maps: torch.Tensor, sent: torch.Tensor, present: Optional[torch.Tensor]
    ) -> torch.Tensor:
        """Class vectors [B, classes], of what is sent."""
        del maps
        return self.head(sent.flatten(1), present)


def _pooled(maps: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(maps, 3, stride=2, padding=1)


class Aggregation(nn.Module):
    """What several views say, as one. `values` [B, V, C, …]; `present` bool [B, V]; gives
    [B, `channels`, …]. What is absent is not in it; of no view at all it is zeros."""

    def __init__(self, views: int, channels: int) -> None:
        super().__init__()
        self.views = views
        self.channels = channels

    def forward(self, values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """See the class."""
        raise NotImplementedError

    @staticmethod
    def mask(values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """`present` in as many dimensions as `values`."""
        return present.view(*present.shape, *([1] * (values.dim() - 2)))


class MaxPooling(Aggregation):
    """MP: the largest value of the views that are present."""

    def forward(self, values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """See Aggregation."""
        if not values.shape[0]:  # torch 1.8 has no largest value of an empty batch
            return values.sum(1)
        lowest = torch.full_like(values, -math.inf)
        largest = torch.where(self.mask(values, present), values, lowest).amax(1)
        some = present.any(1).view(-1, *([1] * (largest.dim() - 1)))
        return torch.where(some, largest, torch.zeros_like(largest))


class AveragePooling(Aggregation):
    """AP: the mean of the views that are present."""

    def forward(self, values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """See Aggregation."""
        weights = self.mask(values, present).to(values.dtype)
        return (values * weights).sum(1) / weights.sum(1).clamp(min=1.0)


class Concatenation(Aggregation):
    """CC: the views one after the other, zeros for what is absent."""

    def __init__(self, views: int, channels: int) -> None:
        super().__init__(views, channels)
        self.channels = views * channels

    def forward(self, values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """See Aggregation."""
        there = values * self.mask(values, present).to(values.dtype)
        return there.flatten(1, 2)


class Attention(Aggregation):
    """The mean of the views that are present, weighted by the softmax of a learnt score of each
    one's own (mean) values. Not of the paper."""

    def __init__(self, views: int, channels: int) -> None:
        super().__init__(views, channels)
        self.score = nn.Linear(channels, 1)

    def forward(self, values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """See Aggregation."""
        means = values.flatten(3).mean(3) if values.dim() > 3 else values
        scores = self.score(means)[:, :, 0]
        # Not -inf: of no view at all softmax would be NaN.
        weights = torch.softmax(scores.masked_fill(~present, -1e4), dim=1) * present
        return (values * self.mask(values, weights)).sum(1)


#: By the paper's abbreviations.
AGGREGATIONS: Dict[str, Type[Aggregation]] = {
    "mp": MaxPooling,
    "ap": AveragePooling,
    "cc": Concatenation,
    "attention": Attention,
}
