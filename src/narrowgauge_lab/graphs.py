"""Capture of a training step in a CUDA graph: one launch instead of some hundreds.

At batch 128 the kernels of a small ResNet take less time than the host needs to launch them.
"""

from __future__ import annotations

from typing import Callable, Optional, Union

import torch

from narrowgauge_contract.errors import BadValueError, ExitCode, NarrowgaugeError
from narrowgauge_lab import torch_compat

__all__ = ["GRAPHS", "CaptureError", "EagerStep", "GraphedStep", "Step", "make_step"]

#: The values of the parameter `graphs`.
GRAPHS = ("auto", "off")

Step = Callable[[torch.Tensor], None]


class CaptureError(NarrowgaugeError):
    """A training step could not be captured in a CUDA graph."""

    exit_code = ExitCode.RUN_FAILED


class EagerStep:
    """The step as it is. `description` is what the row records as `graphs_ran`."""

    description = "off"

    def __init__(self, step: Step) -> None:
        self._step = step

    def __call__(self, indices: torch.Tensor) -> None:
        self._step(indices)


class GraphedStep:
    """Runs `step` eagerly a few times, captures it, and replays it from then on.

    `step(indices)` reads the int64 [B] it is given and leaves all results in tensors that live
    outside it. The warm-up steps are real ones, on real batches: nothing has to be undone. A batch
    of another size (the last of an epoch) runs eagerly between replays.
    """

    def __init__(self, step: Step, batch: int, device: torch.device, warm_up: int = 3) -> None:
        self._step = step
        self._batch = batch
        self._indices = torch.zeros(batch, dtype=torch.int64, device=device)
        self._warm_up = warm_up
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
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._step(self._indices)
        except RuntimeError as error:
            if "out of memory" in str(error):  # not the capture's fault; it has its own exit code
                raise
            raise CaptureError(
                "the training step could not be captured in a CUDA graph",
                why=str(error).splitlines()[0],
                next_step="-p graphs=off runs it launch by launch",
            ) from error
        return graph


def make_step(
    graphs: str, step: Step, batch: int, device: torch.device
) -> Union[EagerStep, GraphedStep]:
    """The step as `graphs` asks: `auto` captures where the device and torch can. BadValueError."""
    if graphs not in GRAPHS:
        raise BadValueError(f"graphs '{graphs}' is not one of {', '.join(GRAPHS)}")
    if graphs == "auto" and torch_compat.graphs_available(device):
        return GraphedStep(step, batch, device)
    return EagerStep(step)
