"""The streams of one bus: copies up, products, copies down, and a second one for products that
nobody waits for.

On a CPU that stands in for an accelerator there are none: every lane is None, everything is done
when it returns, and events are None too.
"""

from __future__ import annotations

from typing import Any, List, Tuple

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.hetero.ledger import Ledger

__all__ = ["Lanes"]

#: Events are used in turn. Whoever waits for one does so before this many others are recorded.
_EVENTS = 256


class Lanes:
    """`up`, `work`, `down` and `side`. Memory belongs to the lane that is current when it is made.

    `overlapping`: copies have lanes of their own, and so has `side`; otherwise all four are one.
    """

    def __init__(self, device: torch.device, ledger: Ledger, *, overlapping: bool) -> None:
        self.up: Any = None
        self.work: Any = None
        self.down: Any = None
        self.side: Any = None
        self._cuda = device.type == "cuda"
        #: The lane that `on` made current, since `begin`.
        self._on: Any = None
        self._events: List[Any] = []
        self._next = 0
        if not self._cuda:
            return
        self.up = self.down = self.side = self.work = torch.cuda.Stream(device)
        if overlapping:
            self.up, self.down, self.side = (torch.cuda.Stream(device) for _ in range(3))
        for name in ("up", "down", "side", "work"):
            ledger.name_stream(getattr(self, name), name if overlapping else "work")
        self._events = [torch.cuda.Event() for _ in range(_EVENTS)]

    def begin(self) -> Any:
        """What `end` wants: the stream that is the current one."""
        self._on = None
        return torch.cuda.current_stream() if self._cuda else None

    def end(self, home: Any) -> None:
        """Make that stream the current one again."""
        self._on = None
        if self._cuda:
            torch_compat.set_stream(home)

    def on(self, lane: Any) -> None:
        """Make a lane the current stream, between `begin` and `end`."""
        if lane is not self._on:
            torch_compat.set_stream(lane)
            self._on = lane

    def mark(self, lane: Any) -> Any:
        """An event: all that is queued on the lane now."""
        if not self._cuda:
            return None
        event = self._events[self._next]
        self._next = (self._next + 1) % _EVENTS
        event.record(lane)
        return event

    def own_mark(self, lane: Any) -> Any:
        """An event that nobody else will record, to ask about later."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(lane)
        return event

    def wait(self, lane: Any, event: Any) -> None:
        """The lane goes on when the event has come."""
        if event is not None:
            lane.wait_event(event)

    def sync(self, event: Any) -> None:
        """The host goes on when the event has come."""
        if event is not None:
            event.synchronize()

    def drain(self) -> None:
        """The host goes on when nothing is queued on any lane."""
        if self._cuda:
            torch.cuda.synchronize(self.work.device)

    def trio(self, pieces: int) -> Tuple[Any, Any, Any]:
        """Lanes for copies up, products and copies down: one will do where nothing can overlap."""
        if pieces > 1:
            return self.up, self.work, self.down
        return self.work, self.work, self.work
