"""Graphs of captured pieces that the device goes through or leaves out (see `conditional`)."""

from __future__ import annotations

import ctypes
import weakref
from typing import List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_kernels.errors import KernelsError
from narrowgauge_lab.anytime.conditional import DriverGraphs

__all__ = ["Chain", "Switches", "chained", "switched"]


def chained(
    graphs: DriverGraphs, pieces: Sequence[int], flag: int, by_cells: bool = False
) -> Tuple[int, List[int]]:
    """A graph that runs the first piece, and each next one if the condition between them was set
    while the one before it ran; and the conditions' handles. Set to the flag behind each piece; or,
    `by_cells`, by the pieces themselves. With a flag of 0 and no cells, all of them run."""
    graph = body = graphs.create()
    after: List[int] = []
    handles: List[int] = []
    for number, piece in enumerate(pieces):
        after = [graphs.add_child(body, after, piece)]
        if (flag or by_cells) and number < len(pieces) - 1:
            handle = graphs.new_condition(body)
            if not by_cells:
                after = [graphs.add_setter(body, after, handle, flag)]
            body, after = graphs.add_if(body, after, handle), []
            handles.append(handle)
    return graph, handles


def switched(
    graphs: DriverGraphs, first: int, later: Sequence[Sequence[int]]
) -> Tuple[int, List[int]]:
    """A graph that runs the first piece, and then of each of `later` the one whose number a piece
    before it set its condition to, or none; and the conditions' handles, in order."""
    graph = graphs.create()
    node = graphs.add_child(graph, [], first)
    handles: List[int] = []
    for pieces in later:
        # None of them, unless somebody says which.
        handle = graphs.new_condition(graph, at_first=len(pieces))
        node, bodies = graphs.add_switch(graph, [node], handle, len(pieces))
        for body, piece in zip(bodies, pieces):
            graphs.add_child(body, [], piece)
        handles.append(handle)
    return graph, handles


class _Launched:
    """An executable graph of pieces, which it holds: they own the memory that it works in.

    `cells`, int64 on the device: where the pieces find the handles of their conditions, 0 for none.
    From then on nothing else may run these pieces: they set conditions of this graph. Raises
    BadValueError for cells that another graph has filled.
    """

    def __init__(
        self,
        graphs: DriverGraphs,
        graph: int,
        pieces: Sequence[torch.cuda.CUDAGraph],
        handles: Sequence[int],
        cells: Optional[torch.Tensor],
    ) -> None:
        self._graphs, self._pieces, self._cells = graphs, tuple(pieces), cells
        try:
            if cells is not None and bool(cells.any()):
                raise BadValueError(
                    "these captured stages are another graph's already",
                    why="what decides in them sets conditions of that graph",
                    next_step="capture them once more for this one",
                )
            self._executable = graphs.instantiate(graph)
        except (BadValueError, KernelsError):
            graphs.discard(graph)
            raise
        if cells is not None:
            cells[: len(handles)] = torch.tensor([_signed(each) for each in handles])
        # At the interpreter's end the driver may be gone before this is.
        self._end = weakref.finalize(self, graphs.destroy, graph, self._executable)
        self._end.atexit = False

    def launch(self) -> None:
        """On torch's current stream."""
        self._graphs.launch(self._executable, torch.cuda.current_stream().cuda_stream)


class Chain(_Launched):
    """`chained` pieces, ready to be launched. `pieces` are torch's captured graphs (kept, so that
    they can be handed out), `flag` a bool on the device; or `cells` of as many conditions as there
    are pieces but one, which the pieces set; or neither, to run all of them always."""

    def __init__(
        self,
        graphs: DriverGraphs,
        pieces: Sequence[torch.cuda.CUDAGraph],
        flag: Optional[torch.Tensor],
        cells: Optional[torch.Tensor] = None,
    ) -> None:
        self._flag = flag
        raw = [piece.raw_cuda_graph() for piece in pieces]
        address = flag.data_ptr() if flag is not None else 0
        graph, handles = chained(graphs, raw, address, cells is not None)
        super().__init__(graphs, graph, pieces, handles, cells)


class Switches(_Launched):
    """`switched` pieces, ready to be launched; `cells` as many as there are `later`."""

    def __init__(
        self,
        graphs: DriverGraphs,
        first: torch.cuda.CUDAGraph,
        later: Sequence[Sequence[torch.cuda.CUDAGraph]],
        cells: torch.Tensor,
    ) -> None:
        raw = [[piece.raw_cuda_graph() for piece in pieces] for pieces in later]
        graph, handles = switched(graphs, first.raw_cuda_graph(), raw)
        every = [first, *(piece for pieces in later for piece in pieces)]
        super().__init__(graphs, graph, every, handles, cells)


def _signed(handle: int) -> int:
    """The same 64 bits, as torch has them."""
    return ctypes.c_int64(handle).value
