"""The CUDA side of the sparse convolution: which generated kernel computes a layer.

`narrowgauge_kernels.sparse` generates a kernel for one shape, tile and variant. Here the variant is
chosen by dtype, batch and order in memory, and the kernels of a layer are kept.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from narrowgauge_kernels.sparse.errors import SparseArgumentError
from narrowgauge_kernels.sparse.launching import Convolution
from narrowgauge_kernels.sparse.shapes import ELEMENT, TENSOR_CORE, Shape, Variant
from narrowgauge_kernels.sparse.tuning import best_tile, faster_path

__all__ = ["Generated", "run_generated", "shape_of", "variant_of"]

_Two = Tuple[int, int]
#: From so many pixels on (batch x height x width), groups of them fill the tensor cores in float16;
#: in TF32, whose products take twice the time, from this batch on.
_TENSOR_CORE_PIXELS, _TENSOR_CORE_BATCH = 8 * 14 * 14, 8
_TENSOR_CORE_CAPABILITY = (8, 0)


def shape_of(x: torch.Tensor, weight: torch.Tensor, stride: _Two, padding: _Two) -> Shape:
    """The shape to generate for. Raises SparseArgumentError for what none can be generated for."""
    for name, pair in (("stride", stride), ("padding", padding), ("kernel", weight.shape[2:])):
        if pair[0] != pair[1]:
            raise SparseArgumentError(
                f"{name} is {tuple(pair)}", why="generated kernels have one for both directions"
            )
    return Shape(
        batch=x.shape[0], channels=x.shape[1], height=x.shape[2], width=x.shape[3],
        filters=weight.shape[0], kernel=weight.shape[2], stride=stride[0], padding=padding[0],
    )  # fmt: skip


def variant_of(
    x: torch.Tensor, bias: bool, relu_input: bool, relu_output: bool, tf32: bool = False
) -> Variant:
    """The variant for a map. `tf32`: whether float32 may be rounded to it; small batches are not.
    Tensor cores are taken where the card has the products, and the map has pixels enough.

    Raises SparseArgumentError for a dtype that is neither float32 nor float16.
    """
    if x.dtype not in (torch.float32, torch.float16):
        raise SparseArgumentError(f"x is {x.dtype}, and generated kernels take float32 and float16")
    half = x.dtype == torch.float16
    if half:
        many = x.shape[0] * x.shape[2] * x.shape[3] >= _TENSOR_CORE_PIXELS
    else:
        many = tf32 and x.shape[0] >= _TENSOR_CORE_BATCH
    tensor_cores = many and _has_cores(x)
    precision = "fp16" if half else "tf32" if tensor_cores else "fp32"
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return Variant(
        precision=precision,
        bias=bias,
        relu_input=relu_input,
        relu_output=relu_output,
        granularity=TENSOR_CORE if tensor_cores else ELEMENT,
        layout="nhwc" if last else "nchw",
        path="fused" if tensor_cores or x.shape[0] == 1 else "lists",
    )


def _has_cores(x: torch.Tensor) -> bool:
    if not x.is_cuda:
        return True  # nothing is launched; the kernels are as for a card of today
    return torch.cuda.get_device_capability(x.device) >= _TENSOR_CORE_CAPABILITY


class Generated:
    """The generated convolutions of one layer, by what they are for.

    Made at the first call with a map of that kind, which compiles and may not be in a CUDA graph;
    later ones may. A layer is for one stream at a time; callers of several give the `stream` (its
    number), and have kernels with memory of their own for each. A copy or a pickle of it is empty.
    """

    def __init__(self, keeps_weights: bool = True) -> None:
        self._keeps_weights = keeps_weights
        self._made: Dict[Any, Convolution] = {}

    def convolution(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        stride: _Two,
        padding: _Two,
        variant: Variant,
        crossover: float = 0.0,
        stream: int = 0,
    ) -> Convolution:
        """For maps like x, on the path that a search found faster, of those that skip zeros in one
        launch. Raises SparseArgumentError and what compiling raises."""
        shape = shape_of(x, weight, stride, padding)
        key = (x.device, shape, variant, crossover, stream)
        if key not in self._made:
            taken = faster_path(shape, variant, x.device)
            tile = best_tile(shape, taken, x.device)
            self._made[key] = Convolution(
                shape, tile, taken, crossover, keeps_weight=self._keeps_weights
            )
        return self._made[key]

    def __deepcopy__(self, memo: Dict[int, Any]) -> Generated:
        return Generated(self._keeps_weights)

    def __reduce__(self) -> Tuple[Any, ...]:
        return (Generated, (self._keeps_weights,))


#: For calls that belong to no layer. One convolution sees many weights there, and keeps none.
_SHARED = Generated(keeps_weights=False)


def run_generated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    stride: _Two,
    padding: _Two,
    relu_input: bool,
    relu_output: bool,
) -> torch.Tensor:
    """The result on CUDA, without a gradient and in strict float32. Raises as `Generated`.

    Callers on several streams do not disturb each other. In a CUDA graph it uses what the default
    stream's calls use: call it there once before, and replay no two such graphs together.
    """
    variant = variant_of(x, bias is not None, relu_input, relu_output)
    convolution = _SHARED.convolution(
        x, weight, stride, padding, variant, stream=_stream_number(x.device)
    )
    return convolution(x, weight, bias)


def _stream_number(device: torch.device) -> int:
    with torch.cuda.device(device):
        ask = getattr(torch.cuda, "is_current_stream_capturing", None)
        if ask is not None and ask():
            return 0
        return int(torch.cuda.current_stream(device).cuda_stream)
