"""A race detector for placed layers, on a CPU: who orders what, by vector clocks.

Lanes are pretended to be streams: what touches memory of the pretended device happens on the
current lane, some time after the host queued it; what touches the host's memory only, the host does
at once. Two accesses to the same bytes, one of them a write, have to be ordered by the order of a
lane, by an event that a lane or the host waited for, or by the host having queued one after it was
through with the other. Memory that was freed and is given out again begins anew: that what is in
use is held, other tests say.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Set

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from narrowgauge_lab.layers.hetero.lanes import Lanes

#: An index makes the stand-in's own allocations tell themselves from the host's.
PRETENDED = torch.device("cpu", 0)
_HOST = "host"
Clock = Dict[str, int]


@dataclasses.dataclass(frozen=True)
class Access:
    lane: str
    time: int
    begin: int
    end: int
    writes: bool
    operator: str


class Order:
    """The vector clocks of the host and of four lanes."""

    def __init__(self) -> None:
        self.now: Dict[str, Clock] = {
            name: {name: 0} for name in (_HOST, "up", "work", "down", "side")
        }

    def merge(self, into: str, clock: Clock) -> None:
        mine = self.now[into]
        for name, time in clock.items():
            mine[name] = max(mine.get(name, 0), time)

    def tick(self, lane: str) -> Clock:
        """An operation of a lane, which the host queues (or does) now."""
        self.merge(lane, self.now[_HOST])
        self.now[lane][lane] += 1
        return self.now[lane]


class PretendedLanes(Lanes):
    """Lanes with names for streams, that write down what orders what."""

    def __init__(self, order: Order, ignored: str = "") -> None:
        """`ignored`: "wait" or "sync" is not done, for a detector that must notice."""
        self.up, self.work, self.down, self.side = "up", "work", "down", "side"
        self._cuda = False
        self.order, self.ignored = order, ignored
        self.current = _HOST

    def begin(self) -> Any:
        return self.current

    def end(self, home: Any) -> None:
        self.current = home

    def on(self, lane: Any) -> None:
        self.current = lane

    def mark(self, lane: Any) -> Any:
        return _Event(self.order, dict(self.order.now[lane]))

    own_mark = mark

    def wait(self, lane: Any, event: Any) -> None:
        if self.ignored != "wait":
            self.order.merge(lane, event.clock)

    def sync(self, event: Any) -> None:
        if self.ignored != "sync":
            self.order.merge(_HOST, event.clock)


class _Event:
    """`query`: whether the host knows that it has come; nothing comes by itself here."""

    def __init__(self, order: Order, clock: Clock) -> None:
        self._order, self.clock = order, clock

    def query(self) -> bool:
        host = self._order.now[_HOST]
        return all(host.get(name, 0) >= time for name, time in self.clock.items())


class RaceWatch(TorchDispatchMode):
    """Sees every operator, and keeps `races`: texts, each of two accesses that nothing orders."""

    def __init__(self, lanes: PretendedLanes) -> None:
        super().__init__()
        self.lanes, self.races = lanes, []  # type: Tuple[PretendedLanes, List[str]]
        self.seen = 0
        self._device: Dict[int, int] = {}
        self._accesses: List[Access] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [e for e in tree_flatten((args, kwargs))[0] if isinstance(e, torch.Tensor)]
        outputs = [e for e in tree_flatten(result)[0] if isinstance(e, torch.Tensor)]
        held = {_base(each) for each in inputs}
        new = [each for each in outputs if _base(each) not in held and each.numel()]
        made = kwargs.get("device") == PRETENDED
        far = made or any(self._is_far(each) for each in inputs)
        lane = self.lanes.current if far else _HOST
        for each in new:
            self._given_out(each, lane if far else _HOST)
        if made or _only_looks(func, inputs, outputs, new):
            return result
        clock = self.lanes.order.tick(lane)
        written = {_base(e) for e in new} | _written(func, args, kwargs)
        for each in (*inputs, *new):
            if each.numel():
                self._access(each, lane, clock, _base(each) in written, str(func))
        return result

    def _is_far(self, tensor: torch.Tensor) -> bool:
        return _base(tensor) in self._device

    def _given_out(self, tensor: torch.Tensor, lane: str) -> None:
        """Memory, new or freed before: whoever has it now begins anew."""
        begin = _base(tensor)
        end = begin + tensor.untyped_storage().nbytes()
        self._accesses = [e for e in self._accesses if e.end <= begin or end <= e.begin]
        for owner, size in list(self._device.items()):
            if owner < end and begin < owner + size:
                del self._device[owner]
        if lane != _HOST:
            self._device[begin] = end - begin

    def _access(
        self, tensor: torch.Tensor, lane: str, clock: Clock, writes: bool, operator: str
    ) -> None:
        self.seen += 1
        begin = tensor.data_ptr()
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
        end = begin + extent * tensor.element_size()
        kept = []
        for old in self._accesses:
            overlaps = old.begin < end and begin < old.end
            ordered = clock.get(old.lane, 0) >= old.time
            if overlaps and (writes or old.writes) and not ordered:
                self.races.append(
                    f"{operator} on {lane} and {old.operator} on {old.lane}: nothing orders them"
                )
            # A write that comes after it stands for it from now on.
            covered = writes and ordered and begin <= old.begin and old.end <= end
            if not covered:
                kept.append(old)
        kept.append(Access(lane, clock[lane], begin, end, writes, operator))
        self._accesses = kept


def _base(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _only_looks(func: Any, inputs: Any, outputs: Any, new: Any) -> bool:
    """Views touch no memory, and neither does making some."""
    name = func._schema.name
    creates = name in ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
    is_view = bool(outputs) and not new and not func._schema.is_mutable
    return creates or (is_view and bool(inputs))


def _written(func: Any, args: Any, kwargs: Any) -> Set[int]:
    found = set()
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if isinstance(value, torch.Tensor):
            found.add(_base(value))
    return found
