"""Which layers run on a DLA, in how many pieces, and how many pieces a core still has room for.

A DLA runs loadables: connected parts of the network. A core holds 16 of them, of all engines
together. What a DLA cannot run, the GPU does, and that cuts the rest into more pieces.
Source: "DLA Supported Layers and Restrictions" of TensorRT's documentation.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from typing import Any, Dict, FrozenSet, List, Sequence, Set, Tuple

from narrowgauge_contract.errors import NotApplicableError

__all__ = ["CORES", "LOADABLES", "Cores", "Layer", "Placement", "place", "read_layers"]

LOADABLES = 16
_CANNOT = "a DLA cannot run it"
#: The build computes them once; they run nowhere.
_NO_WORK = ("CONSTANT", "SHAPE")
_HEAVY = ("CONVOLUTION", "DECONVOLUTION", "FULLY_CONNECTED", "MATRIX_MULTIPLY")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of the network: the names of the tensors it reads and writes, and whether a DLA can
    run it."""

    name: str
    kind: str
    reads: Tuple[str, ...]
    writes: Tuple[str, ...]
    takes: bool


@dataclasses.dataclass(frozen=True)
class Placement:
    """`on_dla`: names of layers; `fallback`: (name, reason) of those that the GPU runs instead."""

    on_dla: Tuple[str, ...]
    fallback: Tuple[Tuple[str, str], ...]
    loadables: int


def read_layers(network: Any, can_run: Any) -> List[Layer]:
    """The network's layers, in its order. `can_run`: TensorRT's own answer about one."""
    layers = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        kind = str(layer.type).rpartition(".")[2]
        reads = [layer.get_input(i) for i in range(layer.num_inputs)]
        writes = [layer.get_output(i) for i in range(layer.num_outputs)]
        if writes and all(each.is_shape_tensor for each in writes):
            kind = "SHAPE"  # arithmetic about sizes, done once
        takes = kind not in _NO_WORK and bool(can_run(layer))
        names = (tuple(each.name for each in some if each is not None) for some in (reads, writes))
        layers.append(Layer(str(layer.name), kind, *names, takes))
    return layers


def place(layers: Sequence[Layer], limit: int = LOADABLES) -> Placement:
    """All that a DLA can run on it, in at most `limit` loadables: the lightest pieces go to the GPU
    until the rest fits.

    Raises NotApplicableError where it can run nothing.
    """
    if not any(layer.takes for layer in layers):
        raise NotApplicableError(
            "no layer of this network can run on a DLA", next_step="leave out the option dla"
        )
    working = frozenset(n for n, each in enumerate(layers) if each.takes)
    dropped: Set[int] = set()
    pieces = _pieces(layers, working)
    while len(pieces) > limit:
        lightest = min(pieces, key=lambda piece: _weight(layers, piece))
        dropped |= lightest
        working = working - lightest
        pieces = _pieces(layers, working)
    crowded = f"it would be in loadable {limit + 1} or later, and a core holds {LOADABLES}"
    fallback = [
        (each.name, crowded if n in dropped else _CANNOT)
        for n, each in enumerate(layers)
        if n not in working and each.kind not in _NO_WORK
    ]
    return Placement(tuple(layers[n].name for n in sorted(working)), tuple(fallback), len(pieces))


def _weight(layers: Sequence[Layer], piece: FrozenSet[int]) -> Tuple[int, int, int]:
    heavy = sum(layers[n].kind in _HEAVY for n in piece)
    return heavy, len(piece), -min(piece)


def _pieces(layers: Sequence[Layer], working: FrozenSet[int]) -> List[FrozenSet[int]]:
    """Connected layers on the DLA between which no data goes through the GPU.

    A layer's depth is how often data has changed sides on its longest way there: neighbours of one
    depth can be one loadable, because what lies between layers of one depth has that depth too.
    """
    made: Dict[str, int] = {}
    depth: List[int] = []
    parents = list(range(len(layers)))

    def root(n: int) -> int:
        while parents[n] != n:
            n = parents[n]
        return n

    for n, layer in enumerate(layers):
        before = [made[name] for name in layer.reads if name in made]
        before = [m for m in before if layers[m].kind not in _NO_WORK]
        changed = [depth[m] + ((m in working) != (n in working)) for m in before]
        depth.append(max(changed, default=0))
        for m in before:
            if n in working and m in working and depth[m] == depth[n]:
                parents[root(n)] = root(m)
        made.update(dict.fromkeys(layer.writes, n))
    groups: Dict[int, Set[int]] = defaultdict(set)
    for n in working:
        groups[root(n)].add(n)
    return [frozenset(group) for group in groups.values()]


class Cores:
    """How many loadables this process has on each core. Those of other processes it cannot see."""

    def __init__(self) -> None:
        self._used: Dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()

    def take(self, core: int, loadables: int) -> None:
        """Raise NotApplicableError where they do not fit beside those that are there."""
        with self._lock:
            used = self._used[core]
            if used + loadables > LOADABLES:
                raise NotApplicableError(
                    f"DLA core {core} has no room for {loadables} loadables more",
                    why=f"it holds {LOADABLES}, and other engines of this process have {used}",
                    next_step="close other runners on this core, or use the other core",
                )
            self._used[core] = used + loadables

    def give_back(self, core: int, loadables: int) -> None:
        with self._lock:
            self._used[core] -= loadables


#: Of this process.
CORES = Cores()
