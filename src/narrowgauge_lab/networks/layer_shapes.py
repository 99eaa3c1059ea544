"""Layers by their shapes alone: those that kernels are measured on, in one list for all."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Tuple

from narrowgauge_contract.errors import UnknownNameError

__all__ = [
    "MANUAL_MNIST",
    "RESNET50",
    "SETS",
    "SPARSE",
    "LayerShape",
    "product",
    "shapes_named",
]


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """A square convolution without bias, or with `kernel` 0 a linear layer.

    `size`: height and width of the input; of a linear layer its rows, 0 where a batch says how
    many.
    """

    channels: int
    filters: int
    kernel: int
    stride: int
    size: int
    padding: int

    @property
    def linear(self) -> bool:
        return self.kernel == 0

    @property
    def name(self) -> str:
        """64-64-3x3s1-56, or 160-100 of a linear layer, or 64-128-256 of one with 64 rows."""
        if self.linear:
            rows = f"{self.size}-" if self.size else ""
            return f"{rows}{self.channels}-{self.filters}"
        window = f"{self.kernel}x{self.kernel}s{self.stride}"
        return f"{self.channels}-{self.filters}-{window}-{self.size}"

    def input_shape(self, batch: int) -> Tuple[int, ...]:
        if self.linear:
            return (self.size or batch, self.channels)
        return (batch, self.channels, self.size, self.size)

    def weight_shape(self) -> Tuple[int, ...]:
        if self.linear:
            return (self.filters, self.channels)
        return (self.filters, self.channels, self.kernel, self.kernel)


def _convolution(channels: int, filters: int, kernel: int, stride: int, size: int) -> LayerShape:
    return LayerShape(channels, filters, kernel, stride, size, padding=kernel // 2)


def product(rows: int, depth: int, columns: int) -> LayerShape:
    """A matrix product, rows × depth times depth × columns."""
    return LayerShape(depth, columns, kernel=0, stride=1, size=rows, padding=0)


def _resnet50() -> Tuple[LayerShape, ...]:
    """Of ResNet-50 at 224×224, as torchvision has it: a block's stride is that of its 3×3."""
    shapes = [_convolution(3, 64, 7, 2, 224)]
    channels, size = 64, 56
    for width in (64, 128, 256, 512):
        stride = 1 if width == 64 else 2
        wide, after = 4 * width, size // stride
        shapes += [
            _convolution(channels, width, 1, 1, size),
            _convolution(width, width, 3, stride, size),
            _convolution(width, wide, 1, 1, after),
            _convolution(channels, wide, 1, stride, size),
            _convolution(wide, width, 1, 1, after),
            _convolution(width, width, 3, 1, after),
        ]
        channels, size = wide, after
    return tuple(dict.fromkeys(shapes))


#: The 23 convolutions of ResNet-50 that differ.
RESNET50 = _resnet50()
#: The 3×3 layers of DenseNet-201 and ResNet-152 at which cuSNN (PACT 2022) measures sparse
#: convolution; four of them are ResNet-50's as well.
SPARSE = tuple(
    _convolution(channels, filters, 3, 1, size)
    for channels, filters, size in (
        (128, 32, 56), (128, 32, 28), (128, 32, 14), (128, 32, 7),
        (64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7),
    )
)  # fmt: skip
#: Of the network of the original's manual layers (`manual_mnist`), whose linear layers take a row
#: for each image.
MANUAL_MNIST = (
    LayerShape(1, 4, kernel=5, stride=1, size=28, padding=0),
    LayerShape(4, 10, kernel=5, stride=1, size=12, padding=0),
    product(0, 160, 100),
    product(0, 100, 10),
)
SETS: Dict[str, Tuple[LayerShape, ...]] = {
    "resnet50": RESNET50,
    "sparse": SPARSE,
    "convolutions": RESNET50 + SPARSE,
    "lenet": MANUAL_MNIST,
}


def shapes_named(name: str) -> List[LayerShape]:
    """Those of a set, or the one whose name it is. Raises UnknownNameError with the nearest."""
    if name in SETS:
        return list(SETS[name])
    single = {shape.name: shape for shapes in SETS.values() for shape in shapes}
    if name not in single:
        raise UnknownNameError("shape", name, (*SETS, *single))
    return [single[name]]
