"""Work on the device whose operands never move, launched as one: a small product's kernels take a
GPU less time than its libraries take the host to launch them.

On CUDA such work is captured in a graph. On a CPU that stands in for an accelerator, and before
torch 1.10, it is called each time.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List

import torch

from narrowgauge_contract.collector import without_collector
from narrowgauge_lab import torch_compat

__all__ = ["Recorder", "Replay"]

Work = Callable[[], List[torch.Tensor]]


class Replay:
    """Calling it queues the work on the current stream, which is always the same one, and gives its
    results: captured, they are the same tensors each time."""

    __slots__ = ("_graph", "_results", "_work")

    def __init__(self, work: Work, graph: Any = None, results: Any = None) -> None:
        self._work, self._graph, self._results = work, graph, results

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> List[torch.Tensor]:
        if self._graph is None:
            return self._work()
        self._graph.replay()
        results: List[torch.Tensor] = self._results
        return results


class Recorder:
    """What captures for one bus. `note` is told of what could not be captured, once each time.

    The graphs of one lane share their memory for what they make on the way: a lane works off one
    after the other, and their results, which are kept, are never given out again.
    """

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        self._captures = torch_compat.graphs_available(device)
        self._note = note
        self._pools: Dict[int, Any] = {}
        #: By lane, a WeakSet of those of its graphs that are still kept.
        self._graphs: Dict[int, Any] = {}
        #: How many graphs there are.
        self.captured = 0

    def record(self, work: Work, lane: Any, *, may_capture: bool = True) -> Replay:
        """`work` for replay. The lane is the current stream, and `work` ran on it before, so that
        libraries have chosen what they launch. It may not ask the device, nor use cuBLAS, whose
        workspace others may free."""
        if not (self._captures and may_capture) or torch_compat.capturing():
            return Replay(work)
        pool = self._pool(id(lane))
        graph = torch.cuda.CUDAGraph()
        try:
            # Page-locked tensors that the collector happened to free here would record their
            # streams' events, the capture's among them.
            with without_collector():
                _begin(graph, pool)
                try:
                    results = work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            reason = str(error).partition("\n")[0]
            self._note(f"products launched one by one, for they could not be captured: {reason}")
            return Replay(work)
        self.captured += 1
        self._graphs[id(lane)].add(graph)
        return Replay(work, graph, results)

    def _pool(self, lane: int) -> Any:
        """The lane's memory; a new one once all that used it are gone, as after weights have moved:
        torch (2.11) then takes the old one's handle for an error."""
        if not self._graphs.get(lane):
            self._pools[lane] = torch.cuda.graph_pool_handle()
            self._graphs[lane] = weakref.WeakSet()
        return self._pools[lane]


def _begin(graph: Any, pool: Any) -> None:
    """Only what this thread does can break the capture, where torch (2.1) can be told so."""
    if torch_compat.torch_version() >= (2, 1):
        graph.capture_begin(pool, capture_error_mode="thread_local")
    else:
        graph.capture_begin(pool)
