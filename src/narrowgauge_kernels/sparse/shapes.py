"""What a generated convolution computes, and the choices that do not change its result.

The algorithm and the first tiles are those of L. Xiang et al., "High-Performance Architecture Aware
Sparse Convolutional Neural Networks for GPUs", PACT 2022, written anew.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Dict, Optional, Tuple

from narrowgauge_kernels.sparse.errors import SparseArgumentError

__all__ = [
    "ACCUMULATIONS",
    "ELEMENT",
    "FINISHES",
    "KERNELS",
    "LAYOUTS",
    "PATHS",
    "PRECISIONS",
    "STRIDES",
    "TENSOR_CORE",
    "Shape",
    "Tile",
    "Variant",
]

KERNELS = (1, 3, 5)
STRIDES = (1, 2)
PRECISIONS = ("fp32", "tf32", "fp16")
ACCUMULATIONS = ("deterministic", "atomic")
#: What is skipped: each zero, or a channel of a group of 2 x 4 pixels that are all zero.
ELEMENT, TENSOR_CORE = "element", "tensor-core"
GRANULARITIES = (ELEMENT, TENSOR_CORE)
_SHAPE = re.compile(
    r"(\d+)[,x](\d+)[,x](\d+)[,x](\d+)[,x](\d+)(?:[,x]k(\d+)s(\d+)p(\d+))?", re.ASCII
)
_TILE = re.compile(
    r"(\d+)x(\d+)x(\d+)(?:/f(\d+))?(?:/g(\d+))?(?:/w(\d+))?(?:/(tail|launch|cluster))?", re.ASCII
)
LAYOUTS = ("nchw", "nhwc")
#: How partial sums of several blocks are added: see Tile.
FINISHES = ("tail", "launch", "cluster")
#: fused: one launch, in which blocks make their own lists. window: one launch without lists, which
#: goes through all values of a window and leaves out the products of zeros. dense: the same, and
#: leaves out none, on CUDA cores or on tensor cores. lists: a producer's launch, then one that
#: reads them. switched: as lists, and a dense kernel, of which the device lets one run.
PATHS = ("fused", "window", "dense", "lists", "switched")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One convolution: x [batch, channels, height, width], weight [filters, channels, k, k].

    One kernel size, stride and padding for both directions; no dilation and no groups. Raises
    SparseArgumentError for what no kernel can be generated for.
    """

    batch: int
    channels: int
    height: int
    width: int
    filters: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "channels", "height", "width", "filters"):
            if getattr(self, name) < 1:
                raise SparseArgumentError(f"{name} is {getattr(self, name)}, and must be positive")
        _one_of("kernel", self.kernel, KERNELS)
        _one_of("stride", self.stride, STRIDES)
        if self.padding < 0:
            raise SparseArgumentError(f"padding is {self.padding}, and cannot be negative")
        if min(self.out_height, self.out_width) < 1:
            raise SparseArgumentError(
                f"the map of {self.height} x {self.width} is smaller than the kernel",
                why=f"kernel {self.kernel}, padding {self.padding}",
            )
        largest = max(
            self.batch * self.channels * self.height * self.width,
            self.batch * self.filters * self.out_height * self.out_width,
            self.filters * self.channels * self.kernel**2,
        )
        if largest >= 2**31:
            raise SparseArgumentError(
                f"{self.text()} has a tensor of {largest} elements",
                why="generated code counts elements in 32 bits: fewer than 2147483648",
                next_step="a smaller batch",
            )

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The shape that `text()` says, also with x between the sizes; raises
        SparseArgumentError."""
        found = _SHAPE.fullmatch(text)
        if found is None:
            raise SparseArgumentError(
                f"'{text}' is not a shape",
                next_step="batch,channels,height,width,filters such as 1,128,56,56,32, and "
                ",k1s2p0 behind it where kernel, stride and padding are not 3, 1 and 1",
            )
        return cls(*(int(number) for number in found.groups() if number is not None))

    @property
    def out_height(self) -> int:
        """Rows of the result."""
        return (self.height + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return (self.width + 2 * self.padding - self.kernel) // self.stride + 1

    def text(self) -> str:
        """`1,128,56,56,32`, and `k5s2p2` behind it where that is not k3s1p1."""
        sizes = f"{self.batch},{self.channels},{self.height},{self.width},{self.filters}"
        rest = f"k{self.kernel}s{self.stride}p{self.padding}"
        return sizes if rest == "k3s1p1" else f"{sizes},{rest}"


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a shape is divided among blocks of threads; 0 in `filters` leaves it to `geometry`.

    `rows` x `columns` output pixels, `channels` input channels (the rest are of other blocks, and
    partial sums are added up) and `filters` output channels are of one block. `groups` is, by
    element, how many groups of threads share out the block's channels; on tensor cores, how many
    groups of 2 x 4 pixels are of one warp, or, on the path dense, how many warps share out the
    depth. `finish` says how deterministic partial sums of several blocks are added, in channel
    order: by the block that comes last (`tail`), by a launch of its own (`launch`), or by the
    blocks together, which are a cluster and read each other's shared memory (`cluster`, from
    capability 9.0 on). `wide`: filters of one thread, by element: what it takes to find a value,
    and to jump, is done once for all of them.
    """

    rows: int
    columns: int
    channels: int
    filters: int = 0
    groups: int = 1
    finish: str = "tail"
    wide: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "channels", "groups", "wide"):
            if getattr(self, name) < 1:
                raise SparseArgumentError(f"a tile's {name} must be positive")
        if self.filters < 0:
            raise SparseArgumentError("a tile's filters cannot be negative")
        _one_of("wide", self.wide, (1, 2, 4))
        _one_of("finish", self.finish, FINISHES)

    @classmethod
    def parse(cls, text: str) -> Tile:
        """The tile that `text()` says; raises SparseArgumentError."""
        found = _TILE.fullmatch(text)
        if found is None:
            raise SparseArgumentError(
                f"'{text}' is not a tile",
                next_step="rows x columns x channels such as 4x7x8, and behind it what is not the "
                "default: 4x7x8/f64/g4/w2/launch",
            )
        rows, columns, channels, filters, groups, wide, finish = found.groups()
        return cls(
            int(rows), int(columns), int(channels), int(filters or 0), int(groups or 1),
            finish or "tail", int(wide or 1),
        )  # fmt: skip

    def text(self) -> str:
        """`4x7x8`, as the published tables say it, then what is not the default."""
        words = [f"{self.rows}x{self.columns}x{self.channels}"]
        words += [f"f{self.filters}"] if self.filters else []
        words += [f"g{self.groups}"] if self.groups > 1 else []
        words += [f"w{self.wide}"] if self.wide > 1 else []
        words += [self.finish] if self.finish != "tail" else []
        return "/".join(words)

    def to_fact(self) -> Dict[str, Any]:
        """Its fields, for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What surrounds the sums and how they are formed.

    precision: fp32; fp16 (operands and result, float32 sums); tf32 (float32 tensors, operands
    rounded to 10 bits, tensor cores alone). accumulation: of several blocks' partial sums; two
    runs of `deterministic` give the same bits. relu_input and relu_output are part of the kernel,
    and pass NaN on. layout is the order in memory of x and of the result.
    """

    precision: str = "fp32"
    accumulation: str = "deterministic"
    bias: bool = False
    relu_input: bool = True
    relu_output: bool = False
    granularity: str = ELEMENT
    layout: str = "nchw"
    path: str = "fused"

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("accumulation", self.accumulation, ACCUMULATIONS)
        _one_of("granularity", self.granularity, GRANULARITIES)
        _one_of("layout", self.layout, LAYOUTS)
        _one_of("path", self.path, PATHS)
        if self.precision == "tf32" and self.granularity == ELEMENT:
            raise SparseArgumentError(
                "there is no tf32 by element",
                why="CUDA cores multiply float32 in full; only tensor cores know tf32",
                next_step="fp32, or granularity tensor-core",
            )
        if self.precision == "fp32" and self.on_cores:
            raise SparseArgumentError(
                "there is no strict fp32 on tensor cores",
                why="they round operands to tf32 or take fp16",
                next_step="tf32 or fp16, or granularity element",
            )
        if self.on_cores:
            self._check_tensor_cores()

    def _check_tensor_cores(self) -> None:
        if self.path not in ("fused", "dense"):
            raise SparseArgumentError(
                f"the path {self.path} is not for tensor cores",
                why="there each group of pixels makes its own list of channels, in one launch",
                next_step="path fused",
            )
        if self.path == "dense" and self.precision != "fp16":
            raise SparseArgumentError(
                f"there is no dense {self.precision} on tensor cores",
                why="that kernel's operands are halves",
                next_step="fp16, or path fused",
            )

    @property
    def on_cores(self) -> bool:
        """Whether tensor cores multiply."""
        return self.granularity == TENSOR_CORE

    @property
    def dense_on_cores(self) -> bool:
        """Whether tensor cores multiply all values, and not groups that have one to multiply."""
        return self.on_cores and self.path == "dense"

    @property
    def has_producer(self) -> bool:
        """Whether a launch of its own makes lists, and counts zeros."""
        return self.path in ("lists", "switched")

    @property
    def has_lists(self) -> bool:
        """Whether values are taken from lists of what is not zero, whoever makes them."""
        return self.path not in ("window", "dense")

    def text(self) -> str:
        """In words, `fp32 deterministic element nchw fused bias relu-in`."""
        words = [self.precision, self.accumulation, self.granularity, self.layout, self.path]
        named = (("bias", self.bias), ("relu-in", self.relu_input), ("relu-out", self.relu_output))
        return " ".join(words + [name for name, on in named if on])


def _one_of(name: str, value: Any, known: Tuple[Any, ...], why: Optional[str] = None) -> None:
    if value not in known:
        listed = ", ".join(str(each) for each in known)
        raise SparseArgumentError(
            f"{name} cannot be {value}", why=why or "", next_step=f"one of {listed}"
        )
