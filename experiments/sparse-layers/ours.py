"""Our convolution that skips zeros, as a row wants it; its ReLU is part of it,
and so is the making of its lists."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_kernels.errors import ToolchainMissingError
from narrowgauge_kernels.sparse.errors import DeviceError, SparseArgumentError
from narrowgauge_lab.layers.sparse import SparseConv2d
from narrowgauge_lab.networks.layer_shapes import LayerShape

from .looking import Call, glance
from .maps import Layer

__all__ = ["DTYPES", "GRANULARITIES", "Ours", "dense_of", "ours_of", "sparse_layer"]

#: Of the tensors, by precision.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}
#: The values of the parameter `granularity`. auto: on a GPU the faster of those that there are.
GRANULARITIES = ("auto", "element", "tensor-core")


@dataclasses.dataclass(frozen=True, eq=False)
class Ours:
    """`call` gives [B, N, H', W'] on the device; `about`: which kernel it is, for a record."""

    call: Call
    about: Dict[str, Any]


def ours_of(
    layer: Layer, device: torch.device, precision: str, granularity: str, tune_s: float
) -> Ours:
    """Raises SkippedError where there is no such kernel here."""
    if device.type != "cuda":
        return _cpu(layer, precision, granularity)
    return _cuda(layer, device, precision, granularity, tune_s)


def _cpu(layer: Layer, precision: str, granularity: str) -> Ours:
    if precision != "fp32" or granularity == "tensor-core":
        raise SkippedError(
            f"on a CPU there is no sparse convolution in {precision} by {granularity}",
            why="its kernel skips single zeros, in float32",
            next_step="-p precision=fp32 -p granularity=element",
        )
    module = sparse_layer(layer.shape, layer.weight, "sparse")
    try:
        module.choose(layer.x)
    except NotApplicableError as error:
        raise SkippedError(error.what, why=error.why, next_step=error.next_step) from error
    about = {"kernel": "cpu", "granularity": "element", "threads": torch.get_num_threads()}
    return Ours(lambda: module(layer.x), about)


def sparse_layer(shape: LayerShape, weight: torch.Tensor, backend: str) -> SparseConv2d:
    """The layer that holds ReLU and convolution, eval mode, where and as `weight` is."""
    module = SparseConv2d(
        shape.channels, shape.filters, shape.kernel, shape.stride, shape.padding, bias=False,
        relu_input=True, backend=backend,
    ).to(device=weight.device, dtype=weight.dtype)  # fmt: skip
    with torch.no_grad():
        module.weight.copy_(weight)
    module.requires_grad_(False)
    return module.eval()


def _cuda(
    layer: Layer, device: torch.device, precision: str, granularity: str, tune_s: float
) -> Ours:
    try:
        return _fastest(layer, device, precision, granularity, tune_s)
    except (DeviceError, ToolchainMissingError) as error:
        raise SkippedError(
            f"generated kernels cannot run here: {error.what}",
            why=error.why,
            next_step=error.next_step,
        ) from error


def _fastest(
    layer: Layer, device: torch.device, precision: str, granularity: str, tune_s: float
) -> Ours:
    x = layer.x.to(device=device, dtype=DTYPES[precision])
    weight = layer.weight.to(device=device, dtype=DTYPES[precision])
    variants = _variants(precision, granularity, len(x))
    return _fastest_of(layer.shape, x, weight, variants, tune_s)


def dense_of(shape: LayerShape, x: torch.Tensor, weight: torch.Tensor, precision: str,
             tune_s: float) -> Ours:  # fmt: skip
    """The fastest of our kernels that jump over no zero: what of a ratio is fusion, occupancy and
    latency. Raises NotApplicableError where there is none."""
    if x.device.type != "cuda":
        raise NotApplicableError("our dense kernel is for NVIDIA GPUs")
    if precision == "tf32":
        raise NotApplicableError("our dense kernels have no tf32", why="they take fp32 and fp16")
    try:
        return _fastest_of(shape, x, weight, _dense_variants(precision, "auto"), tune_s)
    except (SkippedError, DeviceError, ToolchainMissingError) as error:
        raise NotApplicableError(error.what, why=error.why) from error


def _fastest_of(
    sizes: LayerShape, x: torch.Tensor, weight: torch.Tensor, variants: List[Any], tune_s: float
) -> Ours:
    # Loaded here: it looks for the CUDA driver and for a compiler.
    from narrowgauge_kernels.sparse.launching import Convolution
    from narrowgauge_kernels.sparse.shapes import Shape

    shape = Shape(
        len(x), sizes.channels, sizes.size, sizes.size, sizes.filters, sizes.kernel,
        sizes.stride, sizes.padding,
    )  # fmt: skip
    trials: List[Tuple[float, Call, Dict[str, Any]]] = []
    tried: Dict[str, str] = {}
    for variant in variants:
        try:
            tile = _tile(shape, variant, x.device, tune_s / len(variants))
            convolution = Convolution(shape, tile, variant)
            call = _call(convolution, x, weight)
            seconds = glance(call, x.device)
        except SparseArgumentError as error:
            tried[variant.text()] = str(error).splitlines()[0]
            continue
        tried[variant.text()] = f"{tile.text()}, {seconds * 1e6:.2f} µs"
        about = {"kernel": variant.text(), "granularity": variant.granularity, "tile": tile.text()}
        trials.append((seconds, call, about))
    if not trials:
        raise SkippedError(f"no sparse kernel does {shape.text()}", why=str(tried))
    _, call, about = min(trials, key=lambda each: each[0])
    return Ours(call, {**about, "tried": tried})


def _call(convolution: Any, x: torch.Tensor, weight: torch.Tensor) -> Call:
    """The map in the kernel's own order of memory: nobody's rearranging is in a time."""
    if convolution.variant.layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    return lambda: convolution(x, weight)


def _variants(precision: str, granularity: str, batch: int) -> List[Any]:
    """The kernels of a precision, those among them that jump over no zero: at one image that can be
    the faster one, and the record names it. Lists of a launch of their own pay with more images.
    Raises SkippedError where there is none of this granularity."""
    from narrowgauge_kernels.sparse.shapes import ELEMENT, LAYOUTS, TENSOR_CORE, Variant

    made = []
    if precision != "tf32" and granularity in ("auto", ELEMENT):
        paths = ("fused", "window") if batch == 1 else ("fused", "window", "lists")
        made += [Variant(precision, path=path) for path in paths]
    if precision != "fp32" and granularity in ("auto", TENSOR_CORE):
        made += [Variant(precision, granularity=TENSOR_CORE, layout=order) for order in LAYOUTS]
    made += _dense_variants(precision, granularity)
    if not made:
        raise SkippedError(
            f"there is no {granularity} kernel in {precision}",
            why="tensor cores have no strict float32, and CUDA cores no tf32",
        )
    return made


def _dense_variants(precision: str, granularity: str) -> List[Any]:
    from narrowgauge_kernels.sparse.shapes import ELEMENT, LAYOUTS, TENSOR_CORE, Variant

    made = []
    if precision != "tf32" and granularity in ("auto", ELEMENT):
        made.append(Variant(precision, path="dense"))
    if precision == "fp16" and granularity in ("auto", TENSOR_CORE):
        made += [
            Variant(precision, granularity=TENSOR_CORE, layout=order, path="dense")
            for order in LAYOUTS
        ]
    return made


def _tile(shape: Any, variant: Any, device: torch.device, seconds: float) -> Any:
    """The stored one; else the fastest of a search of so many seconds; else the estimated one."""
    from narrowgauge_kernels.sparse import tuning

    stored = tuning.stored_tile(shape, variant, tuning.device_identity(device))
    if stored is None and seconds > 0:
        return tuning.tune(shape, variant, device, seconds).trials[0].tile
    return stored or tuning.best_tile(shape, variant, device)
