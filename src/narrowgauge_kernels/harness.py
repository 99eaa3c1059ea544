"""The compiled timing loop: short work timed with no Python between its calls.

Every `time_*` runs `samples` samples of `calls` calls and answers with a float64 tensor
[2, samples] of seconds per call: by events on CUDA and the steady clock on a CPU, and what the host
spent to queue them. `flush`, a contiguous buffer larger than the last cache of the device (CPU:
int64), makes it cold: it is written before each sample, outside the clock; `calls` is 1 then.

On CUDA, `limit_s` above 0 holds the stream by a kernel until the first 128 calls of a sample are
queued, so that up to so many find their launches done; work that waits for the device itself would
never be queued, and after `limit_s` seconds that is a RuntimeError. 0 holds nothing. All run on the
current stream.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Optional, Sequence, Set, Type

import torch

from narrowgauge_kernels.errors import GraphRefusedError
from narrowgauge_kernels.library import require

__all__ = [
    "HELD_CALLS",
    "Graph",
    "hold",
    "is_holding",
    "launch",
    "release",
    "time_bare",
    "time_kernel",
    "time_operator",
]

#: kHeldCalls of harness_cuda.cpp.
HELD_CALLS = 128
#: The devices with a stream that `hold` holds. The loops here hold and release within one call.
_held: Set[int] = set()


def time_operator(
    name: str,
    arguments: Sequence[Any],
    device: torch.device,
    samples: int,
    calls: int,
    flush: Optional[torch.Tensor] = None,
    limit_s: float = 0.0,
) -> torch.Tensor:
    """Time an operator of torch's dispatcher, such as `aten::conv2d` or `aten::add.Tensor`.

    `arguments` are positional and as its schema has them (an int where it says int, `[1, 1]` for a
    list); the last ones may be missing where they have defaults. Raises RuntimeError for an unknown
    operator or arguments that do not fit.
    """
    require(device.type)
    operator, _, overload = name.partition(".")
    ops = torch.ops.narrowgauge
    given = list(arguments)
    if device.type == "cpu":
        return ops.harness_operator_cpu(operator, overload, given, samples, calls, flush)
    return ops.harness_operator_cuda(
        operator, overload, given, _index(device), samples, calls, flush, limit_s
    )


class Graph:
    """A captured CUDA graph, instantiated once more so that the loop can launch it.

    `captured` is a torch.cuda.CUDAGraph made with keep_graph=True, and must outlive this. A replay
    by torch also advances generators; these launches do not.
    Raises GraphRefusedError where this torch, or this capture, does not give the graph out.
    """

    def __init__(self, captured: Any, device: torch.device) -> None:
        require("cuda")
        self._captured = captured
        self._device = _index(device)
        self._executable: Optional[int] = torch.ops.narrowgauge.harness_graph_instantiate(
            _raw_graph(captured), self._device
        )

    def time(
        self,
        samples: int,
        calls: int,
        flush: Optional[torch.Tensor] = None,
        limit_s: float = 0.0,
    ) -> torch.Tensor:
        """Samples of one launch of the graph. Raises GraphRefusedError once it is closed."""
        if self._executable is None:
            raise GraphRefusedError("the CUDA graph is closed; there is nothing to time")
        return torch.ops.narrowgauge.harness_graph(
            self._executable, self._device, samples, calls, flush, limit_s
        )

    def close(self) -> None:
        """Give the executable back, the first time. After it there is nothing to time."""
        executable, self._executable = self._executable, None
        if executable is not None:
            torch.ops.narrowgauge.harness_graph_destroy(executable, self._device)

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()


def time_kernel(
    kind: str,
    buffer: torch.Tensor,
    repeats: int,
    samples: int,
    calls: int,
    flush: Optional[torch.Tensor] = None,
    limit_s: float = 0.0,
) -> torch.Tensor:
    """Time a kernel of chosen length, launched directly; kinds as `launch` has them."""
    require("cuda")
    return torch.ops.narrowgauge.harness_kernel(
        kind, buffer, repeats, samples, calls, flush, limit_s
    )


def launch(kind: str, buffer: torch.Tensor, repeats: int) -> None:
    """Queue a calibration kernel on the current stream of the buffer's device.

    `nothing` is empty; `copy` and `add` put (or add) the first half of the buffer to the second, so
    many times; `multiply-add` is a chain of so many dependent steps on every multiprocessor, whose
    256 results it writes to the buffer as float32.
    """
    require("cuda")
    torch.ops.narrowgauge.harness_launch(kind, buffer, repeats)


def time_bare(device: torch.device, samples: int, calls: int) -> torch.Tensor:
    """An empty kernel between two events, in the shortest loop that can be written: what the
    overhead of the others is measured against."""
    require("cuda")
    return torch.ops.narrowgauge.harness_bare(_index(device), samples, calls)


def hold(device: int, limit_s: float) -> None:
    """Queue a kernel on the current stream that ends at `release`, or after `limit_s`.

    What is queued next waits for it. Whatever has never run on this device may wait for the device
    while it is loaded, and so for the hold: run everything once before.
    """
    require("cuda")
    _held.add(device)  # before: a signal may come in between, and its handler ask
    torch.ops.narrowgauge.harness_hold(device, limit_s)


def release(device: int) -> bool:
    """End the hold and wait for that; whether it had lasted until now."""
    try:
        return bool(torch.ops.narrowgauge.harness_release(device))
    finally:
        _held.discard(device)


def is_holding() -> bool:
    """Whether a stream is between `hold` and `release`: who synchronises then waits for a release
    that comes after him, until the hold's limit."""
    return bool(_held)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else int(device.index)


def _raw_graph(captured: Any) -> int:
    if not hasattr(captured, "raw_cuda_graph"):
        raise GraphRefusedError(
            "this torch does not give out the CUDA graph that it captured",
            why=f"torch {torch.__version__} has no CUDAGraph.raw_cuda_graph",
            next_step="time its replay() from Python",
        )
    try:
        return int(captured.raw_cuda_graph())
    except RuntimeError as error:
        raise GraphRefusedError(
            "the CUDA graph is not there to be timed",
            why=str(error).splitlines()[0],
            next_step="capture it with torch.cuda.CUDAGraph(keep_graph=True)",
        ) from error
