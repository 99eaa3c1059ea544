"""A request to stop: kept from the first moment of a run, passed on to the row that is running."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from types import FrameType
from typing import Iterator, List, Optional

__all__ = ["GRACE_S", "StopRequest"]

#: How long a row may take to end after SIGTERM before it is killed.
GRACE_S = 5.0


class StopRequest:
    """Whether SIGINT, SIGTERM or SIGHUP asked the run to stop.

    The first passes SIGTERM to `child`, if there is one, and SIGKILL after the grace; the second
    kills at once. Without a child the first is only remembered, and the second interrupts.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.asked = False
        self.child = 0
        self._grace_s = grace_s

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over for the block. In the main thread only."""
        numbers = _signals()
        before = {number: signal.getsignal(number) for number in numbers}
        alarm = signal.signal(signal.SIGALRM, self._kill)
        for number in numbers:
            signal.signal(number, self._stop)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.signal(signal.SIGALRM, alarm)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Hold the signals back: a stop during a fork must find the child's number."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _signals())
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals())

    def child_began(self, number: int) -> None:
        """Pass stops to this row from now on, and the one that came before it was there."""
        self.child = number
        if self.asked:
            self._send(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def child_ended(self) -> None:
        """There is no row to pass a stop to any more."""
        self.child = 0
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _stop(self, _number: int, _frame: Optional[FrameType]) -> None:
        again, self.asked = self.asked, True
        if again and not self.child:
            raise KeyboardInterrupt
        if self.child:
            self._send(signal.SIGKILL if again else signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _kill(self, _number: int, _frame: Optional[FrameType]) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        try:
            if self.child:
                os.kill(self.child, number)
        except ProcessLookupError:
            return  # it ended by itself just now


def _signals() -> List[signal.Signals]:
    """SIGHUP only where nobody asked for it to be ignored, as nohup does."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers
