"""Capture of a training step in a CUDA graph: one launch instead of some hundreds.

At batch 128 the kernels of a small ResNet take less time than the host needs to launch them.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Callable, Iterator, Optional, Union

import torch

from narrowgauge_contract.errors import BadValueError, ExitCode, NarrowgaugeError
from narrowgauge_lab import torch_compat

__all__ = [
    "GRAPHS", "CaptureError", "EagerStep", "GraphedStep", "Step", "capture_or_say", "make_step",
]  # fmt: skip

#: The values of the parameter `graphs`.
GRAPHS = ("auto", "off")

Step = Callable[[torch.Tensor], None]


class CaptureError(NarrowgaugeError):
    """What should be replayed could not be captured in a CUDA graph."""

    exit_code = ExitCode.RUN_FAILED


@contextlib.contextmanager
def capture_or_say(what: str, next_step: str) -> Iterator[None]:
    """A block that captures `what`. Raises CaptureError, with torch's own reason; what torch raises
    where memory runs out, which is not the capture's fault and has an exit code of its own."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise
        raise CaptureError(
            f"{what} could not be captured in a CUDA graph",
            why=str(error).partition("\n")[0],
            next_step=next_step,
        ) from error


class EagerStep:
    """The step as it is. `description` is what the row records as `graphs_ran`."""

    def __init__(self, step: Step, why: str = "") -> None:
        self._step = step
        self.description = f"off: {why}" if why else "off"

    def __call__(self, indices: torch.Tensor) -> None:
        self._step(indices)


class GraphedStep:
    """Runs `step` eagerly a few times, captures it, and replays it from then on.

    `step(indices)` reads the int64 [B] it is given and leaves all results in tensors that live
    outside it. The warm-up steps are real ones, on real batches: nothing has to be undone. A batch
    of another size (the last of an epoch) runs eagerly between replays. `beside_threads`: others of
    this process ask CUDA things during the capture that are not the capture's business.
    """

    def __init__(
        self,
        step: Step,
        batch: int,
        device: torch.device,
        warm_up: int = 3,
        beside_threads: bool = False,
    ) -> None:
        self._step = step
        self._batch = batch
        self._indices = torch.zeros(batch, dtype=torch.int64, device=device)
        self._warm_up = warm_up
        self._beside_threads = beside_threads
        self._stream = torch.cuda.Stream(device)
        self._graph: Optional[torch.cuda.CUDAGraph] = None

    @property
    def description(self) -> str:
        """`cuda-graph` once there is one: a row of a few steps never gets that far."""
        return "off" if self._graph is None else "cuda-graph"

    def __call__(self, indices: torch.Tensor) -> None:
        if indices.shape[0] != self._batch:
            self._step(indices)
            return
        self._indices.copy_(indices)
        if self._warm_up > 0:
            self._warm_up -= 1
            self._run_on_side_stream()
            return
        if self._graph is None:
            # Capturing runs nothing: the replay below does this batch.
            self._graph = self._capture()
        self._graph.replay()

    def _run_on_side_stream(self) -> None:
        """cuBLAS and cuDNN set up workspaces and pick algorithms per stream; capture needs them."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step(self._indices)
        current.wait_stream(self._stream)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        way_out = "-p graphs=off runs it launch by launch"
        captured = torch.cuda.graph(graph, stream=self._stream)
        if self._beside_threads:
            # Only what this thread does can break the capture.
            captured = torch.cuda.graph(
                graph, stream=self._stream, capture_error_mode="thread_local"
            )
        with capture_or_say("the training step", way_out), captured:
            self._step(self._indices)
        return graph


def _captures_beside_threads() -> bool:
    """Whether a capture can be told that other threads may go on using CUDA (torch 2.1)."""
    return "capture_error_mode" in inspect.signature(torch.cuda.graph.__init__).parameters


def make_step(
    graphs: str, step: Step, batch: int, device: torch.device, *, beside_threads: bool = False
) -> Union[EagerStep, GraphedStep]:
    """The step as `graphs` asks: `auto` captures where the device and torch can. BadValueError."""
    if graphs not in GRAPHS:
        raise BadValueError(f"graphs '{graphs}' is not one of {', '.join(GRAPHS)}")
    if graphs == "off" or not torch_compat.graphs_available(device):
        return EagerStep(step)
    if beside_threads and not _captures_beside_threads():
        return EagerStep(step, "this torch captures nothing beside NCCL's own thread (2.1 does)")
    return GraphedStep(step, batch, device, beside_threads=beside_threads)
