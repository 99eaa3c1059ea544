"""One row of `sparsity-census`: the zeros in what a network's convolutions are given."""

from __future__ import annotations

import csv
import dataclasses
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.networks.pictures import Pictured, Sources, pictured
from narrowgauge_lab.sparsity import LayerMap, Zeros, capture, zeros_of

#: Images that go through the network together: a DenseNet's maps of all would fill a small machine.
_TOGETHER = 4
_FIELDS = (
    ("zero_fraction", "elements"),
    ("group_zero_fraction", "groups_2x4"),
    ("row_group_zero_fraction", "groups_1x8"),
    ("channel_zero_fraction", "channels"),
)
#: The first two again, by the multiplications that read the elements: what skipping them saves.
_BY_WORK = (("mac_zero_fraction", "elements"), ("mac_group_zero_fraction", "groups_2x4"))
_FILE = "layers.csv"


@dataclasses.dataclass
class _Layer:
    """One convolution, its zeros in each batch of images and how many images that had. `reads`: how
    many multiplications an element of its map goes into, those at edges counted whole."""

    name: str
    shape: Tuple[int, ...]
    window: str
    behind_relu: bool
    reads: float
    counted: List[Tuple[int, Zeros]] = dataclasses.field(default_factory=list)

    def mean(self, field: str) -> float:
        """Over images: every image has as many elements and groups."""
        images = sum(count for count, _ in self.counted)
        return sum(count * getattr(zeros, field) for count, zeros in self.counted) / images

    @property
    def elements(self) -> int:
        channels, height, width = self.shape
        return channels * height * width


def run(ctx: RowContext) -> None:
    """Count as `ctx.parameters` say. Weights that are not obtainable skip the row."""
    parameters = ctx.parameters
    model = parameters["model"]
    made = pictured(model, Sources.of(parameters, ctx.files), ctx.seed)
    images = made.images[: parameters["limit"]]
    layers: Dict[str, _Layer] = {}
    for start in range(0, len(images), _TOGETHER):
        batch = images[start : start + _TOGETHER]
        _count(made.model.to(ctx.device), batch.to(ctx.device), parameters["kernel"], layers)
        ctx.progress(min(start + _TOGETHER, len(images)), len(images), "images")
    if not layers:
        raise UsageError(
            f"{model} has no {parameters['kernel']} convolution behind its first one",
            next_step="-p kernel=all",
        )
    _record(ctx, made, len(images), list(layers.values()))


def _count(model: nn.Module, images: torch.Tensor, kernel: str, layers: Dict[str, _Layer]) -> None:
    def take(found: LayerMap) -> None:
        size = tuple(found.given.shape[1:])
        window = "x".join(map(str, found.convolution.kernel_size))
        behind, reads = found.before_relu is not None, _reads(found.convolution)
        layer = layers.setdefault(found.name, _Layer(found.name, size, window, behind, reads))
        layer.counted.append((len(images), zeros_of(found.given)))

    capture(model, images, _wanted(model, kernel), take)


def _reads(conv: nn.Conv2d) -> float:
    """filters × k² / stride²: a convolution reads each element so often, its group's filters."""
    (height, width), (down, across) = conv.kernel_size, conv.stride
    return conv.out_channels / conv.groups * height * width / (down * across)


def _wanted(model: nn.Module, kernel: str) -> Callable[[nn.Conv2d], bool]:
    first = next(each for each in model.modules() if isinstance(each, nn.Conv2d))
    window = {"3x3": (3, 3), "1x1": (1, 1)}.get(kernel)

    def wanted(module: nn.Conv2d) -> bool:
        return module is not first and (window is None or module.kernel_size == window)

    return wanted


def _record(ctx: RowContext, made: Pictured, images: int, layers: List[_Layer]) -> None:
    """Shares of all that convolutions were given, by elements and by multiplications; of the layers
    with maps of one size; and of each layer."""
    ctx.fact("weights", made.weights)
    ctx.fact("pictures", made.pictures)
    ctx.fact("preprocessing", made.preprocessing)
    ctx.fact("images", images)
    ctx.fact("counted", len(layers))
    source = "counted" if made.trained else "counted, random weights"
    for name, field in _FIELDS:
        ctx.metric(name, _share(layers, field), unit="1", source=source)
    for name, field in _BY_WORK:
        ctx.metric(name, _share(layers, field, by_work=True), unit="1", source=source)
    for size in dict.fromkeys(layer.shape[1:] for layer in layers):
        stage = [layer for layer in layers if layer.shape[1:] == size]
        side = "x".join(map(str, size))
        ctx.metric(f"zero_fraction.{side}", _share(stage, "elements"), unit="1", source=source)
    for name, field in _FIELDS[:2]:
        values = [layer.mean(field) for layer in layers]
        ctx.metric(f"layer_{name}", values, unit="1", source=source, index="convolution")
    rows = [_row(layer) for layer in layers]
    ctx.fact("layers", rows)
    with ctx.side_file(_FILE).open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _share(layers: Sequence[_Layer], field: str, by_work: bool = False) -> float:
    """The layers' mean, each counting by its elements, or by the multiplications that read them."""
    weights = [layer.elements * (layer.reads if by_work else 1.0) for layer in layers]
    parts = [weight * layer.mean(field) for weight, layer in zip(weights, layers)]
    return sum(parts) / sum(weights)


def _row(layer: _Layer) -> Dict[str, Any]:
    channels, height, width = layer.shape
    shares = {name: round(layer.mean(field), 6) for name, field in _FIELDS}
    return {
        "layer": layer.name,
        "kernel": layer.window,
        "channels": channels,
        "height": height,
        "width": width,
        "behind_relu": layer.behind_relu,
        **shares,
    }
