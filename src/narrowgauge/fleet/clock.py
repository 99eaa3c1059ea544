"""How far a board's clock is off, how sure that is, and how much of it is let pass. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.fleet.errors import BoardUnfit

__all__ = ["MOST_SKEW_S", "Clock", "require_clock"]

#: How far a board's clock may be off, in seconds: records must sort by when they were made.
MOST_SKEW_S = 5.0


@dataclass(frozen=True)
class Clock:
    """How far the board's clock is ahead of this host's, in seconds, and how sure that is: it was
    read at some moment between two readings here, `2 * bound_s` apart."""

    skew_s: float
    bound_s: float

    @staticmethod
    def between(before: float, there: float, after: float) -> Clock:
        return Clock(there - (before + after) / 2, (after - before) / 2)

    @property
    def certainly_off_s(self) -> float:
        """The least that it can be off."""
        return max(0.0, abs(self.skew_s) - self.bound_s)


def require_clock(board: str, clock: Clock) -> None:
    """Raises BoardUnfit for a clock that is certainly off by more than MOST_SKEW_S."""
    if clock.certainly_off_s <= MOST_SKEW_S:
        return
    way = "ahead of" if clock.skew_s > 0 else "behind"
    raise BoardUnfit(
        f"the clock of the board {board} is {abs(clock.skew_s):.1f} s {way} this host's",
        why=f"certain to {clock.bound_s:.2f} s, and at most {MOST_SKEW_S:g} s are let pass:"
        " its records would be dated wrongly, and would not sort among others",
        next_step="set the clock that is wrong, here or there: sudo timedatectl set-ntp true;"
        f" then narrowgauge hosts doctor {board}",
    )
