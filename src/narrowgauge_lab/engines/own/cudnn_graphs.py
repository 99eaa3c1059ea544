"""A fused convolution as a graph of cuDNN's, and the configurations of its engines to try.

The frontend (Python's `cudnn`) is an argument here: `own.cudnn` alone imports it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import BadValueError

__all__ = ["OPERANDS", "ConvProblem", "Form", "choices", "forms", "label", "make_graph"]

#: Of the data, and of what cuDNN calls it. tf32 is float32 in memory.
_DTYPES = {
    "float16": (torch.float16, "HALF"),
    "bfloat16": (torch.bfloat16, "BFLOAT16"),
    "float32": (torch.float32, "FLOAT"),
    "tf32": (torch.float32, "FLOAT"),
}
_ACTIVATIONS = ("none", "relu", "relu6")
#: cuDNN takes pointers to be multiples of this many bytes, and vectors of it to be read in one go.
_VECTOR = 16
#: What a tensor is called in a graph, and in the pack of pointers that a plan starts with.
OPERANDS = {"x": 1, "w": 2, "bias": 3, "residual": 4, "y": 5}


@dataclasses.dataclass(frozen=True)
class ConvProblem:
    """One fused convolution, y = act(conv(x, w) + bias + residual).

    `height` and `width` are x's, `count` y's channels, `rows` and `columns` the kernel's. Padding
    is the same on both sides. `dtype`: float16 and bfloat16 are summed in float32; float32 is
    strict, and tf32 is float32 whose products may be TF32. `x_pixel` and the like: elements from
    one pixel to the next in NHWC memory, more than the channels where the tensor is a slice of
    wider pixels; `residual_pixel` counts for nothing without a residual. `x_row`: elements from one
    row of x to the next, where rows are longer than their pixels; 0 where they are not.
    """

    batch: int
    channels: int
    height: int
    width: int
    count: int
    rows: int
    columns: int
    stride: Tuple[int, int]
    padding: Tuple[int, int]
    dilation: Tuple[int, int]
    groups: int
    dtype: str
    bias: bool
    residual: bool
    activation: str
    x_pixel: int
    y_pixel: int
    residual_pixel: int
    x_row: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise BadValueError(f"dtype '{self.dtype}' is not one of {', '.join(_DTYPES)}")
        if self.activation not in _ACTIVATIONS:
            raise BadValueError(
                f"activation '{self.activation}' is not one of {', '.join(_ACTIVATIONS)}"
            )
        if self.channels % self.groups or self.count % self.groups:
            raise BadValueError(
                f"{self.groups} groups do not divide {self.channels} and {self.count} channels"
            )
        if min(self.output) < 1:
            raise BadValueError(f"the output would be {self.output[0]} x {self.output[1]} pixels")
        for name, (channels, _, _, pixel) in self._pixels().items():
            if pixel < channels:
                raise BadValueError(f"{name}_pixel is {pixel}, less than the {channels} channels")
        if self.x_row and self.x_row < self.width * self.x_pixel:
            raise BadValueError(f"x_row is {self.x_row}, less than {self.width} pixels")

    @property
    def output(self) -> Tuple[int, int]:
        """y's height and width."""
        sizes = zip((self.height, self.width), (self.rows, self.columns), range(2))
        height, width = (
            (size + 2 * self.padding[i] - self.dilation[i] * (kernel - 1) - 1) // self.stride[i] + 1
            for size, kernel, i in sizes
        )
        return height, width

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype][0]

    @property
    def strict(self) -> bool:
        """Whether every product has to be a float32's."""
        return self.dtype == "float32"

    def shape(self, operand: str) -> Tuple[int, ...]:
        """[N, C, H, W], or [K, C / groups, R, S] of w, or [1, K, 1, 1] of the bias."""
        if operand == "w":
            return (self.count, self.channels // self.groups, self.rows, self.columns)
        if operand == "bias":
            return (1, self.count, 1, 1)
        channels, height, width, _ = self._pixels()[operand]
        return (self.batch, channels, height, width)

    def strides(self, operand: str) -> Tuple[int, ...]:
        """In elements, in the order of `shape`: channels innermost, of all."""
        shape = self.shape(operand)
        pixel = self._pixels()[operand][3] if operand in self._pixels() else shape[1]
        row = self.x_row if operand == "x" and self.x_row else shape[3] * pixel
        return (shape[2] * row, 1, row, pixel)

    def uncertain(self) -> str:
        """Why no engine is asked, or "": what vectors would do to a neighbour is not known."""
        size = torch.empty((), dtype=self.torch_dtype).element_size()
        for name, (channels, _, _, pixel) in self._pixels().items():
            if pixel != channels and (channels * size % _VECTOR or pixel * size % _VECTOR):
                return (
                    f"{name} is {channels} channels of {pixel}: slices have to be whole "
                    f"vectors of {_VECTOR} bytes"
                )
        return ""

    def _pixels(self) -> Dict[str, Tuple[int, int, int, int]]:
        """Channels, height, width and pixel of every operand that has pixels."""
        found = {
            "x": (self.channels, self.height, self.width, self.x_pixel),
            "y": (self.count, *self.output, self.y_pixel),
        }
        if self.residual:
            found["residual"] = (self.count, *self.output, self.residual_pixel)
        return found


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to write a problem as a graph; engines know some ways and not others.

    `bias_dtype` is empty without a bias.
    """

    residual_first: bool
    bias_dtype: str

    @property
    def name(self) -> str:
        """For the name of a plan: engines are numbered by form."""
        if not self.bias_dtype:
            return ""
        return f"bias={self.bias_dtype}" + ("" if self.residual_first else " first")

    @property
    def torch_bias_dtype(self) -> Optional[torch.dtype]:
        return _DTYPES[self.bias_dtype][0] if self.bias_dtype else None


def forms(problem: ConvProblem) -> List[Form]:
    """The ways to write a problem, the best first.

    cuDNN's precompiled kernels know one pattern: convolution, then the residual, then a bias of
    the data's own type, then ReLU. A float32 bias, or a bias before the residual, leaves the
    engines that compile at run time, which take any order; so do ReLU6, and a residual whose
    pixels are not y's (cuDNN 9.19, for compute capability 9.0: some 40 configurations against 3).
    """
    if not problem.bias:
        return [Form(True, "")]
    own = "float32" if problem.dtype == "tf32" else problem.dtype
    pattern = Form(True, own)
    if problem.strict:
        return [pattern]
    return [pattern, Form(False, "float32")]


def make_graph(front: Any, problem: ConvProblem, form: Form, handle: Any) -> Any:
    """A validated operation graph on the handle's device. Raises what the frontend raises."""
    kind = getattr(front.data_type, _DTYPES[problem.dtype][1])
    wide = front.data_type.FLOAT
    graph = front.pygraph(
        io_data_type=kind, intermediate_data_type=wide, compute_data_type=wide, handle=handle
    )

    def tensor(operand: str, data_type: Any) -> Any:
        return graph.tensor(
            name=operand,
            dim=list(problem.shape(operand)),
            stride=list(problem.strides(operand)),
            data_type=data_type,
            uid=OPERANDS[operand],
        )

    value = graph.conv_fprop(
        image=tensor("x", kind),
        weight=tensor("w", kind),
        padding=list(problem.padding),
        stride=list(problem.stride),
        dilation=list(problem.dilation),
    )
    for addend in ("residual", "bias") if form.residual_first else ("bias", "residual"):
        if addend == "bias" and problem.bias:
            bias = tensor("bias", getattr(front.data_type, _DTYPES[form.bias_dtype][1]))
            value = graph.bias(input=value, bias=bias)
        if addend == "residual" and problem.residual:
            value = graph.add(a=value, b=tensor("residual", kind))
    if problem.activation == "relu":
        # Without clips, or the precompiled pattern does not match.
        value = graph.relu(input=value)
    elif problem.activation == "relu6":
        value = graph.relu(input=value, lower_clip=0.0, upper_clip=6.0)
    value.set_output(True)
    value.set_data_type(kind)
    value.set_uid(OPERANDS["y"])
    value.set_dim(list(problem.shape("y")))
    value.set_stride(list(problem.strides("y")))
    graph.validate()
    graph.build_operation_graph()
    return graph


# ---- engines and their knobs

#: cudnnBackendKnobType_t; the frontend's own enumeration counts otherwise and lacks some.
_KNOBS = {
    1: "swizzle", 2: "tile_size", 3: "use_tex", 4: "edge", 5: "kblock", 6: "ldga", 7: "ldgb",
    8: "chunk_k", 9: "split_h", 10: "wino_tile", 11: "multiply", 12: "split_k_buf", 13: "tilek",
    14: "stages", 15: "reduction_mode", 16: "cta_split_k_mode", 17: "split_k_slc", 18: "idx_mode",
    19: "sliced", 20: "split_rs", 21: "singlebuffer", 22: "ldgc", 23: "specfilt", 24: "kernel_cfg",
    25: "workspace", 26: "tile_cga", 27: "tile_cga_m", 28: "tile_cga_n", 29: "block_size",
    30: "occupancy", 31: "array_size_per_thread", 32: "num_c_per_block", 33: "split_cols",
    34: "tile_rows", 35: "tile_cols", 36: "load_size", 37: "cta_count", 38: "stream_k",
    39: "split_p_slc", 40: "tile_m", 41: "tile_n", 42: "warp_spec_cfg", 43: "swap_ab",
}  # fmt: skip
#: These number whole kernels, so each value is worth a try; of others with many, powers of two.
_KERNELS = ("KERNEL_CFG", "TILE_SIZE")
_MANY = 16
#: The ratio that spreads steps most evenly.
_GOLDEN = (math.sqrt(5) - 1) / 2


def label(tag: str) -> str:
    """cuDNN's tag in words: `eng41_k2=5_k27=8` is `eng41 tile_size=5 tile_cga_m=8`."""
    engine, *pairs = re.split(r"_(?=k-?\d)", tag)
    words = [engine]
    for pair in sorted(pairs, key=_knob_number):
        number, _, value = pair.partition("=")
        words.append(f"{_KNOBS.get(_knob_number(pair), number)}={value}")
    return " ".join(words)


def _knob_number(pair: str) -> int:
    found = re.match(r"k(\d+)=", pair)
    return int(found.group(1)) if found else -1


def choices(knobs: Sequence[Any]) -> Iterator[Dict[Any, int]]:
    """What to set an engine's knobs to, often thousands: the most telling first, none twice.

    Its defaults; each knob alone; then all together, in steps that spread over the whole product.
    """
    yield {}
    values = {knob.type: _values(knob) for knob in knobs}
    order = sorted(values, key=lambda kind: (kind.name not in _KERNELS, len(values[kind])))
    for kind in order:
        for value in values[kind]:
            yield {kind: value}
    if len(order) < 2:
        return
    total = math.prod(len(values[kind]) for kind in order)
    step = next(
        each
        for each in itertools.count(max(1, round(total * _GOLDEN)))
        if math.gcd(each, total) == 1
    )
    for position in range(total):
        rest = position * step % total
        choice = {}
        for kind in order:
            rest, digit = divmod(rest, len(values[kind]))
            choice[kind] = values[kind][digit]
        yield choice


def _values(knob: Any) -> List[int]:
    every = range(knob.min_value, knob.max_value + 1, max(1, knob.stride))
    if len(every) <= _MANY or knob.type.name in _KERNELS:
        return list(every)
    powers = [value for value in every if value > 0 and value & (value - 1) == 0]
    return powers or [every[0], every[-1]]
