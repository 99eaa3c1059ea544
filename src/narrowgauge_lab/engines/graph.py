"""A network's launches captured in a CUDA graph and replayed: one launch per call."""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    ClassVar,
    Dict,
    Generic,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

import torch
from torch import nn

from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab import torch_compat
from narrowgauge_lab.engines.base import Engine, Preparation, Runner
from narrowgauge_lab.engines.native import (
    LAYOUT,
    TorchRunner,
    converted,
    float_refused,
    laid_out,
)
from narrowgauge_lab.graphs import CaptureError, capture_or_say
from narrowgauge_lab.measure.probe import Observation, observe
from narrowgauge_lab.transforms import fold_batch_norm

__all__ = [
    "ENGINE", "CapturedCall", "GraphEngine", "GraphRunner", "capture", "captured_alike",
]  # fmt: skip

T = TypeVar("T")
_WARM_UP_CALLS = 3


class CapturedCall(Generic[T]):
    """Replays what `captured` launched; its result is the same memory each time.

    `captured` is kept: the graph reads weights and inputs by address, and whatever is let go of may
    be written over by the next allocation. `pool_bytes`: what the graph's own memory pool took from
    the device.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        result: T,
        captured: Callable[[], T],
        observations: Tuple[Observation, ...],
        pool_bytes: int,
    ) -> None:
        self._graph, self._result, self.captured = graph, result, captured
        self.observations, self.pool_bytes = observations, pool_bytes

    def __call__(self) -> T:
        self._graph.replay()
        return self._result


def capture(
    call: Callable[[], T],
    device: torch.device,
    next_step: str = "engine=eager runs it launch by launch",
) -> CapturedCall[T]:
    """`call`, which takes nothing and reads what it keeps itself, in a CUDA graph.

    The first calls are on the stream that captures: cuDNN and cuBLAS choose algorithms there.
    Raises CaptureError; what torch raises where memory runs out.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_CALLS):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    # A workspace of cuBLAS is a matter of handle and stream, lives until somebody clears them all
    # (inductor does so whenever it makes graphs of its own), and is then given back while the graph
    # still writes to its address. Cleared now, the capture allocates its own in the graph's pool.
    torch_compat.clear_cublas_workspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    graph = torch.cuda.CUDAGraph()
    results: List[T] = []

    def captured() -> None:
        with torch.cuda.graph(graph, stream=stream):
            results.append(call())

    with capture_or_say("the network", next_step):
        observations = observe(captured)
    pool_bytes = max(0, torch.cuda.memory_reserved(device) - before)
    return CapturedCall(graph, results[0], call, observations, pool_bytes)


def captured_alike(
    calls: Sequence[Callable[[], Any]], device: torch.device
) -> Tuple[List[Callable[[], Any]], str]:
    """What is to be timed side by side, all of it captured, or none where one cannot be: so that a
    launch costs each the same, whatever is in it. And which way it is, for the record: `cuda-graph`
    or `launch by launch: WHY`."""
    if not torch_compat.graphs_available(device):
        return list(calls), f"launch by launch: a {device.type} has no CUDA graphs"
    try:
        captured = [capture(call, device, "it is timed launch by launch") for call in calls]
    except CaptureError as error:
        return list(calls), f"launch by launch: {error.what}: {error.why}"
    return list(captured), "cuda-graph"


class GraphRunner(TorchRunner):
    """A graph per batch size: that of the best batch at once, others when they first come.

    Inputs are copied into the memory that the graph reads, which puts them into its layout too.
    `call` is what is captured; an empty batch is passed to it as it is.
    """

    def __init__(
        self,
        call: Callable[[torch.Tensor], torch.Tensor],
        module: nn.Module,
        wanted: Preparation,
        example: torch.Tensor,
        layout: str,
        benchmark: bool = False,
    ) -> None:
        self._device = wanted.device
        self._graphs: Dict[int, Tuple[torch.Tensor, CapturedCall[torch.Tensor]]] = {}
        super().__init__(call, module, wanted, example, layout, benchmark, self._first)

    def _first(self, call: Callable[[], object]) -> Tuple[Observation, ...]:
        call()
        assert self.profile is not None
        if self.profile.best == 0:
            return ()
        return self._graphs[self.profile.best][1].observations

    def run(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        if count == 0:
            return super().run(x)
        # The buffer may be written both by callers in inference mode and by others.
        with torch_compat.inference_mode():
            if count not in self._graphs:
                self._graphs[count] = self._captured(x)
            buffer, replay = self._graphs[count]
            buffer.copy_(x)
        return replay()

    def _captured(self, x: torch.Tensor) -> Tuple[torch.Tensor, CapturedCall[torch.Tensor]]:
        buffer = torch.empty_like(x, memory_format=self._format)
        buffer.copy_(x)
        run = super().run
        return buffer, capture(lambda: run(buffer), self._device)

    def memory_bytes(self) -> Optional[int]:
        if self._held is None:
            return None
        return self._held + sum(
            buffer.numel() * buffer.element_size() + replay.pool_bytes
            for buffer, replay in self._graphs.values()
        )

    def close(self) -> None:
        super().close()
        if self._graphs:
            # A replay that is still queued would read what is let go of here.
            torch.cuda.synchronize(self._device)
        self._graphs.clear()


class GraphEngine(Engine):
    """Options: `layout` (auto, contiguous, channels_last), `cudnn_benchmark`, and `fold`: batch
    normalisation folded into the convolutions before, as the field does it."""

    name = "cuda-graph"
    options: ClassVar[Mapping[str, Scalar]] = {
        "layout": LAYOUT,
        "cudnn_benchmark": True,
        "fold": True,
    }

    def missing(self, device: torch.device) -> str:
        if device.type != "cuda":
            return "CUDA graphs are of CUDA devices"
        if not torch.cuda.is_available():
            return "torch sees no GPU here"
        if not torch_compat.graphs_available(device):
            return f"torch {torch.__version__} has no CUDA graphs: they came with 1.10"
        return ""

    def refuses(self, precision: str, device: torch.device) -> str:
        return float_refused(precision, device)

    def prepare(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
        options = self.chosen(wanted)
        layout = laid_out(options["layout"], wanted)
        module = converted(fold_batch_norm(model) if options["fold"] else model, wanted, layout)
        benchmark = bool(options["cudnn_benchmark"])
        return GraphRunner(module, module, wanted, example, layout, benchmark)


ENGINE = GraphEngine()
