"""What each operator of a convolutional network is in jax: a network traced by torch.fx becomes a
function of jax arrays in NCHW. Which layout runs, XLA chooses itself.

jax is handed in as `Library`: the engine's module imports it.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from narrowgauge_lab.engines.errors import EngineBuildError, OperatorNotTakenError
from narrowgauge_lab.engines.hooks import require_none

__all__ = ["Library", "translate"]


@dataclasses.dataclass(frozen=True)
class Library:
    """jax, and the precision in which its products of float32 are to be taken."""

    jax: Any
    numpy: Any
    lax: Any
    precision: Any


#: (library, weights by name, the layer's name, its arguments) -> its result
Operation = Callable[..., Any]


def translate(model: nn.Module, library: Library) -> Callable[[Mapping[str, Any], Any], Any]:
    """A function of (weights by their names in `model`, images) that computes what `model` does.

    Raises OperatorNotTakenError and HooksNotTakenError, which name the layer, and EngineBuildError
    where torch.fx cannot read the network.
    """
    require_none("xla", "", model)
    try:
        graph = fx.Tracer().trace(model)
    # What it cannot follow it refuses with all sorts of errors, the forward's own among them.
    except Exception as error:
        raise EngineBuildError(
            f"torch.fx cannot read this {type(model).__name__}",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            next_step="write its forward without decisions that depend on values",
        ) from error
    modules = dict(model.named_modules())
    operations = {node: _operation(node, modules) for node in graph.nodes}

    def run(weights: Mapping[str, Any], images: Any) -> Any:
        values: Dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = images
            elif node.op == "get_attr":
                values[node] = weights[str(node.target)]
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], lambda each: values[each])
            else:
                given = fx.node.map_arg(node.args, lambda each: values[each])
                named = fx.node.map_arg(node.kwargs, lambda each: values[each])
                scope = str(node.target) if node.op == "call_module" else node.name
                with library.jax.named_scope(scope):
                    values[node] = operations[node](library, weights, *given, **named)
        raise AssertionError("a graph of torch.fx ends with its output")

    return run


def _operation(node: fx.Node, modules: Mapping[str, nn.Module]) -> Operation:
    """How a node is computed; nothing for those that hold values."""
    if node.op in ("placeholder", "get_attr", "output"):
        return _nothing
    if node.op == "call_module":
        layer = modules[str(node.target)]
        require_none("xla", str(node.target), layer)
        make = _MODULES.get(type(layer))
        found = make(str(node.target), layer) if make else None
        what = type(layer).__name__
    else:
        table: Mapping[Any, Operation] = _FUNCTIONS if node.op == "call_function" else _METHODS
        found = table.get(node.target)
        what = getattr(node.target, "__name__", str(node.target))
    if found is None:
        name = str(node.target) if node.op == "call_module" else node.name
        raise OperatorNotTakenError("xla", what, name, "its translator has no such operator")
    return found


def _nothing(_library: Library, _weights: Any) -> None:
    return None


# ---- layers ---------------------------------------------------------------------------------


def _conv2d(name: str, layer: Any) -> Optional[Operation]:
    if layer.padding_mode != "zeros":
        return None
    padding = layer.padding
    if isinstance(padding, str):
        sides: Any = padding.upper()
    else:
        sides = [(each, each) for each in padding]

    def run(library: Library, weights: Mapping[str, Any], x: Any) -> Any:
        result = library.lax.conv_general_dilated(
            x, weights[f"{name}.weight"], layer.stride, sides, rhs_dilation=layer.dilation,
            dimension_numbers=("NCHW", "OIHW", "NCHW"), feature_group_count=layer.groups,
            precision=library.precision,
        )  # fmt: skip
        if layer.bias is not None:
            result = result + weights[f"{name}.bias"].reshape(1, -1, 1, 1)
        return result

    return run


def _linear(name: str, layer: Any) -> Operation:
    def run(library: Library, weights: Mapping[str, Any], x: Any) -> Any:
        product = library.numpy.matmul(x, weights[f"{name}.weight"].T, precision=library.precision)
        return product if layer.bias is None else product + weights[f"{name}.bias"]

    return run


def _batch_norm(name: str, layer: Any) -> Optional[Operation]:
    if layer.running_mean is None:
        return None

    def run(library: Library, weights: Mapping[str, Any], x: Any) -> Any:
        def each(word: str) -> Any:  # in float32: the variance of float16 may be none
            return weights[f"{name}.{word}"].astype(library.numpy.float32)

        scale = 1.0 / library.numpy.sqrt(each("running_var") + layer.eps)
        if layer.affine:
            scale = scale * each("weight")
        shift = -each("running_mean") * scale
        if layer.affine:
            shift = shift + each("bias")
        result = x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)
        return result.astype(x.dtype)

    return run


def _clamp(low: float, high: float) -> Operation:
    return lambda library, _, x: library.numpy.clip(x, low, high)


def _of_layer(function: Operation, *fields: str) -> Callable[[str, Any], Optional[Operation]]:
    """`function` with those attributes of the layer as its further arguments."""

    def make(_name: str, layer: Any) -> Optional[Operation]:
        if getattr(layer, "return_indices", False):
            return None
        settings = [getattr(layer, field) for field in fields]
        return lambda library, weights, x: function(library, weights, x, *settings)

    return make


def _relu(library: Library, _weights: Any, x: Any, inplace: bool = False) -> Any:  # noqa: ARG001
    return library.numpy.maximum(x, 0)


def _relu6(library: Library, _weights: Any, x: Any, inplace: bool = False) -> Any:  # noqa: ARG001
    return library.numpy.clip(x, 0, 6)


def _hardtanh(
    library: Library,
    _weights: Any,
    x: Any,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,  # noqa: ARG001
) -> Any:
    return library.numpy.clip(x, min_val, max_val)


def _dropout(
    _library: Library,
    _weights: Any,
    x: Any,
    p: float = 0.5,  # noqa: ARG001
    training: bool = False,
    inplace: bool = False,  # noqa: ARG001
) -> Any:
    if training:
        raise OperatorNotTakenError("xla", "dropout", "", "it drops although the network is eval")
    return x


# ---- pooling --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Window:
    """A pooling window over one image: the extra positions that ceil_mode gives stand behind."""

    size: Tuple[int, int]
    stride: Tuple[int, int]
    dilation: Tuple[int, int]
    padding: Tuple[int, int]
    extra: Tuple[int, int]

    def reduce(self, library: Library, x: Any, first: Any, combine: Any) -> Any:
        """Over the padded image: [B, C, H, W]; `first` stands in the padding."""
        sides = [(p, p + e) for p, e in zip(self.padding, self.extra)]
        return library.lax.reduce_window(
            x, first, combine, (1, 1, *self.size), (1, 1, *self.stride),
            [(0, 0), (0, 0), *sides], window_dilation=(1, 1, *self.dilation),
        )  # fmt: skip


def _window(
    image: Sequence[int], size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> _Window:
    """As torch counts positions: with ceil_mode a last one may reach beyond the padding, but has to
    begin within the image or the padding in front of it."""
    sizes, paddings, dilations = _two(size), _two(padding), _two(dilation)
    strides = _two(stride) if stride not in (None, (), []) else sizes
    extra: List[int] = []
    for length, k, s, p, d in zip(image, sizes, strides, paddings, dilations):
        span = d * (k - 1) + 1
        room = length + 2 * p - span
        count = (room + s - 1 if ceil_mode else room) // s + 1
        if ceil_mode and (count - 1) * s >= length + p:
            count -= 1
        extra.append(max(0, (count - 1) * s + span - length - 2 * p))
    return _Window(sizes, strides, dilations, paddings, (extra[0], extra[1]))


def _two(value: Any) -> Tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _max_pool(
    library: Library,
    _weights: Any,
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices:
        raise OperatorNotTakenError("xla", "max_pool2d with indices", "")
    window = _window(x.shape[2:], kernel_size, stride, padding, dilation, ceil_mode)
    least = library.numpy.array(-library.numpy.inf, x.dtype)
    return window.reduce(library, x, least, library.lax.max)


def _avg_pool(
    library: Library,
    _weights: Any,
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Optional[int] = None,
) -> Any:
    window = _window(x.shape[2:], kernel_size, stride, padding, 1, ceil_mode)
    zero = library.numpy.array(0, library.numpy.float32)
    sums = window.reduce(library, x.astype(library.numpy.float32), zero, library.lax.add)
    if divisor_override:
        return (sums / divisor_override).astype(x.dtype)
    # Positions beyond the padding are counted by nobody; those in it as the layer says.
    ones = library.numpy.ones((1, 1, *x.shape[2:]), library.numpy.float32)
    if count_include_pad:
        sides = [(0, 0), (0, 0), *((each, each) for each in window.padding)]
        ones = library.numpy.pad(ones, sides, constant_values=1)
        window = dataclasses.replace(window, padding=(0, 0))
    counts = window.reduce(library, ones, zero, library.lax.add)
    return (sums / counts).astype(x.dtype)


def _adaptive_avg_pool(library: Library, _weights: Any, x: Any, output_size: Any) -> Any:
    """Cell i of n is the mean from floor(i·H/n) to ceil((i+1)·H/n); no cell sees another's NaN."""
    asked = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
    image = x.shape[2:]
    cells = [length if each is None else int(each) for each, length in zip(asked, image)]
    if tuple(cells) == tuple(image):
        return x
    if all(length % count == 0 for length, count in zip(image, cells)):
        size = [length // count for length, count in zip(image, cells)]
        return _avg_pool(library, None, x, size)
    bounds = [
        [(i * length // n, -(-(i + 1) * length // n)) for i in range(n)]
        for length, n in zip(image, cells)
    ]
    rows = [[x[:, :, a:b, c:d].mean((2, 3)) for c, d in bounds[1]] for a, b in bounds[0]]
    return library.numpy.stack([library.numpy.stack(row, -1) for row in rows], -2)


# ---- shapes and arithmetic ------------------------------------------------------------------


def _flatten(
    _library: Library, _weights: Any, x: Any, start_dim: int = 0, end_dim: int = -1
) -> Any:
    end = end_dim % x.ndim
    count = 1
    for length in x.shape[start_dim : end + 1]:
        count *= length
    return x.reshape(*x.shape[:start_dim], count, *x.shape[end + 1 :])


def _reshape(_library: Library, _weights: Any, x: Any, *shape: Any) -> Any:
    wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return x.reshape(wanted)


def _cat(library: Library, _weights: Any, tensors: Any, dim: int = 0) -> Any:
    return library.numpy.concatenate(tensors, axis=dim)


def _mean(_library: Library, _weights: Any, x: Any, dim: Any, keepdim: bool = False) -> Any:
    return x.mean(dim if isinstance(dim, int) else tuple(dim), keepdims=keepdim)


def _add(_library: Library, _weights: Any, x: Any, other: Any, alpha: float = 1) -> Any:
    return x + (other if alpha == 1 else alpha * other)


def _times(_library: Library, _weights: Any, x: Any, other: Any) -> Any:
    return x * other


def _same(_library: Library, _weights: Any, x: Any) -> Any:
    return x


def _attribute(_library: Library, _weights: Any, x: Any, name: str) -> Any:
    if name == "shape":
        return tuple(x.shape)
    raise OperatorNotTakenError("xla", f"the attribute {name}", "")


def _size(_library: Library, _weights: Any, x: Any, dim: Optional[int] = None) -> Any:
    return tuple(x.shape) if dim is None else x.shape[dim]


def _item(_library: Library, _weights: Any, values: Any, index: Any) -> Any:
    return values[index]


_POOL = ("kernel_size", "stride", "padding")
_MODULES: Dict[type, Callable[[str, Any], Optional[Operation]]] = {
    nn.Conv2d: _conv2d,
    nn.Linear: _linear,
    nn.BatchNorm2d: _batch_norm,
    nn.ReLU: _of_layer(_relu),
    nn.ReLU6: _of_layer(_relu6),
    nn.Hardtanh: _of_layer(_hardtanh, "min_val", "max_val"),
    nn.MaxPool2d: _of_layer(_max_pool, *_POOL, "dilation", "ceil_mode"),
    nn.AvgPool2d: _of_layer(
        _avg_pool, *_POOL, "ceil_mode", "count_include_pad", "divisor_override"
    ),
    nn.AdaptiveAvgPool2d: _of_layer(_adaptive_avg_pool, "output_size"),
    nn.Flatten: _of_layer(_flatten, "start_dim", "end_dim"),
    nn.Dropout: _of_layer(_same),
    nn.Dropout2d: _of_layer(_same),
    nn.Identity: _of_layer(_same),
}
_FUNCTIONS: Dict[Any, Operation] = {
    torch.relu: _relu, F.relu: _relu, F.relu6: _relu6, F.hardtanh: _hardtanh,
    F.max_pool2d: _max_pool, torch.max_pool2d: _max_pool, F.avg_pool2d: _avg_pool,
    F.adaptive_avg_pool2d: _adaptive_avg_pool, F.dropout: _dropout,
    torch.flatten: _flatten, torch.cat: _cat, torch.mean: _mean,
    torch.add: _add, operator.add: _add, operator.iadd: _add,
    torch.mul: _times, operator.mul: _times, operator.imul: _times,
    getattr: _attribute, operator.getitem: _item,
}  # fmt: skip
_METHODS: Dict[Any, Operation] = {
    "relu": _relu, "relu_": _relu, "flatten": _flatten, "reshape": _reshape, "view": _reshape,
    "mean": _mean, "add": _add, "add_": _add, "mul": _times, "mul_": _times, "size": _size,
    "contiguous": _same,
}  # fmt: skip
