"""The map that a layer is measured on: captured from a network that runs real pictures, or made up.

What a map is, its record says: `real`, `synthetic-matched`, or a pattern's name.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.networks.layer_shapes import LayerShape, shapes_named
from narrowgauge_lab.networks.pictures import Sources, pictured
from narrowgauge_lab.networks.trained import Files
from narrowgauge_lab.sparsity import LayerMap, Zeros, capture, matched_map, pattern_map, zeros_of

__all__ = ["MATCHED", "SOURCES", "Layer", "Library", "layer_of", "layers_named"]

#: The network whose weights are obtainable.
_NETWORK = "resnet50-v1"
#: The values of the parameter `maps`. auto: real where there are any, else matched.
SOURCES = ("auto", "real", "matched", "random", "blocky", "channel", "pixel")
#: Shares of zeros, and of (channel × 2×4 pixel) groups that are all zero, of maps whose networks'
#: weights cannot be had: counted with the artefact's weights (DenseNet-201; its last stage with
#: DenseNet-169's) on pictures that were prepared as these want them.
MATCHED: Dict[str, Tuple[float, float]] = {
    "128-32-3x3s1-56": (0.53, 0.20),
    "128-32-3x3s1-28": (0.67, 0.27),
    "128-32-3x3s1-14": (0.76, 0.41),
    "128-32-3x3s1-7": (0.87, 0.63),
    "64-64-3x3s1-56": (0.48, 0.23),
    "128-128-3x3s1-28": (0.62, 0.26),
    "256-256-3x3s1-14": (0.73, 0.38),
    "512-512-3x3s1-7": (0.80, 0.48),
}


#: How often a network has each 3×3 layer behind a ReLU, with the stride on the 1×1.
_COUNTS: Dict[str, Dict[str, int]] = {
    "resnet152": {
        "64-64-3x3s1-56": 3, "128-128-3x3s1-28": 8, "256-256-3x3s1-14": 36, "512-512-3x3s1-7": 3,
    },
    "densenet201": {
        "128-32-3x3s1-56": 6, "128-32-3x3s1-28": 12, "128-32-3x3s1-14": 48, "128-32-3x3s1-7": 32,
    },
}  # fmt: skip


def layers_named(name: str) -> List[LayerShape]:
    """Those of a network in its order, of a set, or the one of that name."""
    if name not in _COUNTS:
        return shapes_named(name)
    counts = _COUNTS[name].items()
    return [shape for each, count in counts for shape in count * shapes_named(each)]


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A layer's operands, float32 on the CPU. `x`: [B, C, H, W] before its ReLU; `weight`:
    [N, C, k, k]. `source`: what x is; `where`: which layer of which network it was captured at,
    or how it was made. `zeros`: of x behind its ReLU; `nonzeros`: how many are left."""

    shape: LayerShape
    x: torch.Tensor
    weight: torch.Tensor
    source: str
    where: str
    zeros: Zeros
    nonzeros: int

    @property
    def macs(self) -> int:
        """Of the dense convolution."""
        side = (self.x.shape[-1] + 2 * self.shape.padding - self.shape.kernel) // self.shape.stride
        return len(self.x) * (side + 1) ** 2 * self.weight.numel()

    def to_fact(self) -> Dict[str, Any]:
        """For a record."""
        return {
            "name": self.shape.name,
            "source": self.source,
            "where": self.where,
            "zeros": self.zeros.elements,
            "groups_2x4": self.zeros.groups_2x4,
            "groups_1x8": self.zeros.groups_1x8,
            "nonzeros": self.nonzeros,
            "macs": self.macs,
        }


@dataclasses.dataclass(frozen=True, eq=False)
class _Captured:
    name: str
    maps: torch.Tensor
    weight: torch.Tensor
    #: Which of the pictures `maps` are of.
    images: Tuple[int, ...] = ()


class Library:
    """Maps captured from the network whose weights are obtainable, by layer shape; the network runs
    once, when the first is asked for."""

    def __init__(self, files: Callable[[str], Files], seed: int) -> None:
        self._files, self._seed = files, seed
        self._found: Optional[Dict[Tuple[int, ...], List[_Captured]]] = None

    def has(self, shape: LayerShape) -> bool:
        """Whether the network has such a layer behind a ReLU. Raises what reading the sets does."""
        return self._key(shape) in self._all()

    def layer(self, shape: LayerShape, batch: int, first: int) -> _Captured:
        """Of the network's layers of this shape the one whose share of zeros is the median, and
        `batch` images of its map from image `first` on, over and over."""
        found = self._all()[self._key(shape)]
        ordered = sorted(found, key=lambda each: float((each.maps > 0).double().mean()))
        chosen = ordered[len(ordered) // 2]
        images = tuple((first + each) % len(chosen.maps) for each in range(batch))
        return dataclasses.replace(chosen, maps=chosen.maps[list(images)], images=images)

    @staticmethod
    def _key(shape: LayerShape) -> Tuple[int, ...]:
        return (shape.channels, shape.filters, shape.kernel, shape.stride, shape.size)

    def _all(self) -> Dict[Tuple[int, ...], List[_Captured]]:
        if self._found is None:
            sources = Sources("trained", "imagenet-20", "right", self._files)
            made = pictured(_NETWORK, sources, self._seed)
            found: Dict[Tuple[int, ...], List[_Captured]] = {}
            capture(
                made.model, made.images, lambda conv: conv.kernel_size == (3, 3),
                lambda each: _keep(found, each),
            )  # fmt: skip
            # Last: what failed half-way is not taken for all there is.
            self._found = found
        return self._found


def _keep(into: Dict[Tuple[int, ...], List[_Captured]], found: LayerMap) -> None:
    if found.before_relu is None:
        return
    conv = found.convolution
    filters, channels, kernel, _ = conv.weight.shape
    key = (channels, filters, kernel, conv.stride[0], found.given.shape[-1])
    captured = _Captured(found.name, found.before_relu, conv.weight.detach().clone())
    into.setdefault(key, []).append(captured)


def layer_of(
    shape: LayerShape,
    batch: int,
    maps: str,
    *,
    library: Library,
    seed: int,
    first: int = 0,
    zeros: Optional[float] = None,
) -> Layer:
    """The layer with a map as `maps`, one of SOURCES, says. `zeros`: the share of a pattern; the
    layer's own in MATCHED where it is None. `first`: of real maps, the first image.

    Raises UsageError for real maps of a shape that the network has none of, and for matched ones
    of a shape whose shares nobody counted.
    """
    real = maps == "real" or (maps == "auto" and library.has(shape))
    if real:
        if not library.has(shape):
            raise UsageError(
                f"there is no real map for {shape.name}",
                why=f"it is no layer of {_NETWORK}, whose weights are the ones obtainable",
                next_step="-p maps=matched",
            )
        captured = library.layer(shape, batch, first)
        where = f"{_NETWORK} {captured.name}, images {' '.join(map(str, captured.images))}"
        return _made(shape, captured.maps, captured.weight, "real", where)
    generator = torch_compat.generator_for(torch.device("cpu"), seed)
    size = (batch, shape.channels, shape.size, shape.size)
    if maps in ("auto", "matched"):
        share, groups = _counted(shape)
        x = matched_map(size, share, groups, generator)
        source, where = "synthetic-matched", f"zeros {share}, groups {groups}, seed {seed}"
    else:
        share = _counted(shape)[0] if zeros is None else zeros
        x = pattern_map(maps, size, share, generator)
        source, where = f"synthetic-{maps}", f"zeros {share}, seed {seed}"
    fan_in = shape.channels * shape.kernel**2
    weight = torch.randn(shape.weight_shape(), generator=generator) * (2.0 / fan_in) ** 0.5
    return _made(shape, x, weight, source, where)


def _counted(shape: LayerShape) -> Tuple[float, float]:
    if shape.name not in MATCHED:
        raise UsageError(
            f"nobody counted the zeros of {shape.name}",
            why=f"known are {', '.join(MATCHED)}",
            next_step="-p maps=random -p zeros=0.7",
        )
    return MATCHED[shape.name]


def _made(
    shape: LayerShape, x: torch.Tensor, weight: torch.Tensor, source: str, where: str
) -> Layer:
    given = torch.relu(x)
    return Layer(shape, x, weight, source, where, zeros_of(given), int((given != 0).sum()))
