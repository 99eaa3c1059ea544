"""Which convolutions and matrix products a call really runs, as the operators themselves see them.

From torch 2.0 on a dispatch mode stands where operators are about to be executed: below autocast
and below whatever a library put in the place of `torch.nn.functional`'s functions. Before that, the
tracer of TorchScript stands there for the forward pass, and hooks on the nodes of autograd's graph
tell of the backward pass. Neither sees into what was captured beforehand, which is then an error.
The products in the backward pass of `torch.cdist` are seen by the former only.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.measure.operators import Operand, Use

__all__ = ["NotObservableError", "declare", "is_watched", "watch", "watch_compilation"]

Note = Callable[[Use], None]

#: Whoever watches at present. `declare` tells each of them.
_watchers: List[Note] = []


class NotObservableError(NarrowgaugeError):
    """What a call runs cannot be seen, so nothing may be said about it."""

    exit_code = ExitCode.RUN_FAILED


def watch(call: Callable[[], Any]) -> Tuple[Use, ...]:
    """Run `call` once and give every convolution and matrix product in it, in order.

    Seen are the operators that this thread runs, and autograd's threads for it. Kernels that Python
    launches without an operator are seen where their authors `declare` them. To see what a CUDA
    graph holds, watch the call that captures it; for torch.compile there is `watch_compilation`.
    Raises NotObservableError where `call` runs code that was captured before: a CUDA graph,
    torch.compile, or (before torch 2.0) TorchScript. A compiled function is not called then: it
    would take the watching for a reason never to compile.
    """
    seen: List[Use] = []
    with _watching(seen.append), _refusing_replays(), torch_compat.refusing_compiled(_refuse):
        if torch_compat.has_dispatch_mode():
            from narrowgauge_lab.measure.dispatching import Dispatched

            with Dispatched(seen.append):
                call()
        else:
            from narrowgauge_lab.measure.tracing import traced

            traced(call, seen.append, _refuse)
    return tuple(seen)


def watch_compilation(call: Callable[[], Any]) -> Tuple[Use, ...]:
    """What torch.compile hands to its compiler during `call`, the first one of a compiled function.

    The graphs are run on tensors without data, so nothing changes. They have the dtypes that the
    compiled code computes in; which kernels it makes of them, `kernel_names` tells on CUDA. Only
    forward graphs are seen. Raises NotObservableError where nothing was compiled: it was before.
    """
    from narrowgauge_lab.measure.dispatching import graphs_given_to_compiler

    seen: List[Use] = []
    with graphs_given_to_compiler(seen.append) as graphs:
        call()
    if not graphs:
        raise NotObservableError(
            "not observable: nothing was compiled during this call",
            why="it was compiled before, or its compiler is not torch's inductor",
            next_step="observe the first call after torch.compile",
        )
    return tuple(seen)


def declare(
    operator: str,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    macs: Optional[int] = None,
    least_macs: Optional[int] = None,
) -> None:
    """Tell whoever watches of a product that no operator runs, such as a kernel launched by Triton.

    To be called where the kernel is launched, with the very tensors it gets.
    """
    if _watchers:
        least = macs if least_macs is None else least_macs
        operands = (Operand.of(each) for each in (inputs, weight, output))
        use = Use(operator, *operands, macs, least)
        for note in _watchers:
            note(use)


def is_watched() -> bool:
    """Whether anybody watches now: who replays what was captured before had better not."""
    return bool(_watchers)


def _refuse(captured: str) -> None:
    ways = {
        "CUDA graph": "observe the call that captures the graph, before it is replayed",
        "torch.compile": "observe_compilation(first call) sees what the compiler is given",
    }
    raise NotObservableError(
        f"not observable: captured: {captured}",
        why="operators inside code that was captured before are not dispatched one by one",
        next_step=ways.get(captured, "observe the function that it was made of"),
    )


@contextlib.contextmanager
def _watching(note: Note) -> Iterator[None]:
    _watchers.append(note)
    try:
        yield
    finally:
        _watchers.remove(note)


@contextlib.contextmanager
def _refusing_replays() -> Iterator[None]:
    """A replayed CUDA graph launches its kernels without any operator.

    One that was captured under these eyes may be replayed: its operators have been seen.
    """
    graph = getattr(torch.cuda, "CUDAGraph", None)
    captured: List[Any] = []

    def watched_end(end: Callable[[Any], Any], self: Any) -> Any:
        captured.append(self)
        return end(self)

    def checked_replay(replay: Callable[[Any], Any], self: Any) -> Any:
        if not any(each is self for each in captured):
            _refuse("CUDA graph")
        return replay(self)

    # In torch's own base class too: whoever keeps `graph.replay` keeps the method of today.
    owners = [each for each in getattr(graph, "__mro__", ()) if "replay" in vars(each)]
    before = [(owner, owner.capture_end, owner.replay) for owner in owners]
    for owner, end, replay in before:
        owner.capture_end = _method(watched_end, end)
        owner.replay = _method(checked_replay, replay)
    try:
        yield
    finally:
        for owner, end, replay in before:
            owner.capture_end, owner.replay = end, replay


def _method(stand_in: Callable[[Any, Any], Any], original: Any) -> Callable[[Any], Any]:
    return lambda self: stand_in(original, self)
