"""The stages of a network as CUDA graphs."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.graphs import capture_or_say

__all__ = ["captured_in_turn", "new_graph", "stage_names"]

#: Passes before the capture: libraries choose algorithms and make workspaces.
_WARM_UP = 3


def captured_in_turn(
    pieces: Sequence[str],
    device: torch.device,
    begin: Callable[[], Callable[[int], None]],
    way_out: str,
) -> List[torch.cuda.CUDAGraph]:
    """A graph for each of these pieces of a pass, only ever to be replayed in this order, some of
    them left out perhaps. `begin` begins a pass and gives what runs its pieces, told their places
    one after another; what the last pass that it began has made is what replays write.
    Raises CaptureError, with a piece's name and the way out, for what cannot be captured."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            run = begin()
            for place in range(len(pieces)):
                run(place)
    torch.cuda.current_stream().wait_stream(stream)
    _warmed_up(device)
    # One pool: they are only ever run in this order, so each may use what those before it
    # have let go of.
    pool = torch.cuda.graph_pool_handle()
    run = begin()
    made: List[torch.cuda.CUDAGraph] = []
    for place, name in enumerate(pieces):
        graph = new_graph()
        said = capture_or_say(name, way_out)
        with said, torch.cuda.graph(graph, pool=pool, stream=stream):
            run(place)
        made.append(graph)
    return made


def stage_names(exits: int) -> List[str]:
    """What errors call the stages of a network."""
    return [f"stage {number} of the network" for number in range(exits)]


def _warmed_up(device: torch.device) -> None:
    """Call between the passes before captures into one pool and the first of these. cuBLAS's
    workspace of a stream that has run is outside of the pool: given back while graphs still work in
    it, as soon as anybody clears them all. Cleared here, the captures make one that is theirs."""
    torch.cuda.synchronize(device)
    torch_compat.clear_cublas_workspaces()


def new_graph() -> Any:
    """One that can be handed out after its capture, where torch can (2.8)."""
    if hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return torch.cuda.CUDAGraph(keep_graph=True)
    return torch.cuda.CUDAGraph()
