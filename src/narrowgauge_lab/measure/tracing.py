"""The sight before torch 2.0: TorchScript's tracer forward, hooks on autograd's nodes backward.

The tracer writes down operators with the dtypes and shapes they get, below autocast. It would drop
what does not lead to a result, so its graph is read before it is done.
"""

# unverified: CUDA autocast as seen before torch 2 | no such GPU at hand | nox -s gpu on one

from __future__ import annotations

import contextlib
import gc
import re
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from narrowgauge_lab.measure.operators import PACKED, RULES, Invocation, Operand, Use, use_of

__all__ = ["traced"]

Note = Callable[[Use], None]
Refuse = Callable[[str], None]

#: How TorchScript calls the dtypes.
_DTYPES = {
    "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Double": "float64",
    "Char": "int8", "Byte": "uint8", "Short": "int16", "Int": "int32", "Long": "int64",
    "QInt8": "qint8", "QUInt8": "quint8", "QInt32": "qint32", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
#: Nodes of autograd's graph whose backward is convolutions and matrix products. `(inputs, weight)`
#: are the positions of their gradients.
_NODES = re.compile(r"^(?P<kind>\w*Conv\w*|Mm|Bmm|Mv|Dot|Addmm|Addmv|Baddbmm|Addbmm)Backward\d*$")
_DEVICE = re.compile(r"device=([a-z]+)")
_TRACER_CANNOT = ("part of the active trace", "requires grad as a constant")


def traced(call: Callable[[], Any], note: Note, refuse: Refuse) -> None:
    """Run `call`, and give every operator of the table to `note`; `refuse` ends it.

    A backward pass is told of after the forward operators, with the names of autograd's nodes and
    without costs. Not seen: products in the backward of a custom autograd.Function.
    """
    backward: List[Use] = []

    def run(*_inputs: Any) -> torch.Tensor:
        call()
        for node in torch._C._get_tracing_state().graph().nodes():
            if node.kind() in ("prim::CallFunction", "prim::CallMethod"):
                refuse("TorchScript")
            use = _use_of_node(node)
            if use is not None:
                note(use)
        return torch.zeros(1)

    with warnings.catch_warnings(), _hooked_backward(backward.append), _quantized(note):
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        try:
            torch._C._create_graph_by_tracing(run, _differentiable(), _no_name, True, False)
        except RuntimeError as error:
            if any(text in str(error) for text in _TRACER_CANNOT):
                refuse(str(error).splitlines()[0])
            raise
    for use in backward:
        note(use)


def _no_name(_value: Any) -> str:
    return ""


def _differentiable() -> Tuple[torch.Tensor, ...]:
    """The tracer takes any tensor for a constant, except those that require gradients: they have to
    be announced as inputs, and only Python's own list of objects has them all."""
    return tuple(
        each
        for each in gc.get_objects()
        # Not isinstance: it asks every object for its class, and some answer with a warning.
        if issubclass(type(each), torch.Tensor) and each.requires_grad
    )


def _use_of_node(node: Any) -> Optional[Use]:
    if node.kind() not in RULES:
        return None
    device = _DEVICE.search(str(node))
    where = device.group(1) if device else "cpu"
    arguments = tuple(_argument(value, where) for value in node.inputs())
    results = tuple(_argument(value, where) for value in node.outputs())
    return use_of(Invocation(node.kind(), arguments, results))


def _argument(value: Any, device: str) -> Any:
    """A value of the graph: an Operand, a constant, or a tuple of them."""
    kind, source = value.type().kind(), value.node()
    if kind == "TensorType":
        scalar, sizes = value.type().scalarType(), value.type().sizes()
        if scalar is None or sizes is None:
            return None
        return Operand(_DTYPES.get(scalar, scalar), tuple(sizes), device)
    if source.kind() == "prim::ListConstruct":
        return tuple(_argument(each, device) for each in source.inputs())
    if source.kind() == "prim::Constant" and kind != "NoneType":
        return value.toIValue()
    return None


@contextlib.contextmanager
def _paused() -> Iterator[None]:
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)


class _HookedEngine:
    """autograd's engine, with hooks on the nodes that it is about to run.

    The tracer is silent meanwhile: it cannot follow saved tensors.
    """

    def __init__(self, engine: Any, note: Note) -> None:
        self._engine = engine
        self._note = note

    def run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        handles = [node.register_hook(_hook(node, self._note)) for node in _nodes(tensors)]
        try:
            with _paused():
                return self._engine.run_backward(tensors, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@contextlib.contextmanager
def _hooked_backward(note: Note) -> Iterator[None]:
    owner = torch.autograd.Variable
    engine = owner._execution_engine
    owner._execution_engine = _HookedEngine(engine, note)
    try:
        yield
    finally:
        owner._execution_engine = engine


def _nodes(tensors: Any) -> List[Any]:
    """The nodes behind `tensors` whose backward multiplies."""
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    waiting = [tensor.grad_fn for tensor in listed if tensor.grad_fn is not None]
    met: Dict[int, Any] = {}
    while waiting:
        node = waiting.pop()
        if id(node) not in met:
            met[id(node)] = node
            waiting += [each for each, _ in node.next_functions if each is not None]
    return [node for node in met.values() if _NODES.match(type(node).__name__)]


def _hook(node: Any, note: Note) -> Callable[[Any, Any], None]:
    name = type(node).__name__
    # Gradients stand in the order of the forward operator's arguments: the bias of addmm first.
    first = 1 if name.startswith(("Add", "Baddbmm")) else 0

    def tell(gradients: Any, given: Any) -> None:
        lower = [Operand.of(each) for each in gradients[first : first + 2] if each is not None]
        if given[0] is not None and lower:
            note(Use(f"autograd::{name}", Operand.of(given[0]), lower[-1], lower[0]))

    return tell


@contextlib.contextmanager
def _quantized(note: Note) -> Iterator[None]:
    """Packed weights cannot enter a trace: quantised operators are met where modules call them."""
    space = torch.ops.quantized
    names = [name.partition("::")[2] for name in RULES if name.startswith("quantized::")]
    known = {name: getattr(space, name) for name in names if _exists(space, name)}
    for name, operator in known.items():
        setattr(space, name, _noting(f"quantized::{name}", operator, note))
    try:
        yield
    finally:
        for name, operator in known.items():
            setattr(space, name, operator)


def _exists(space: Any, name: str) -> bool:
    try:
        return getattr(space, name) is not None
    except (AttributeError, RuntimeError):
        return False


def _noting(name: str, operator: Any, note: Note) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _paused():
            result = operator(*args, **kwargs)
            made = Invocation(name, tuple(map(_described, args)), (_described(result),))
        use = use_of(made)
        if use is not None:
            note(use)
        return result

    return run


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Operand.of(value)
    return PACKED if isinstance(value, torch._C.ScriptObject) else value
