"""A clock that stands still but for what a test lets pass, and intervals by brute force."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from typing import Callable, Iterator, Sequence

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow all the time where other work has the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class FakeClock:
    """Seconds, as the monotonic clock gives them."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def call(self, durations: Iterator[float]) -> Callable[[], None]:
        """Work whose calls take these durations."""

        def work() -> None:
            self.time += next(durations)

        return work


def forever(seconds: float) -> Iterator[float]:
    while True:
        yield seconds


def noisy(seconds: float, spread: float, seed: int) -> Iterator[float]:
    """Log-normal durations around a median."""
    chance = random.Random(seed)
    while True:
        yield seconds * math.exp(chance.gauss(0.0, spread))


def interval_width(values: Sequence[float]) -> float:
    """The narrowest symmetric 95 % order-statistic interval, as a share of the median."""
    n, ordered = len(values), sorted(values)
    rank, tail = 0, 0
    while 40 * (tail + math.comb(n, rank)) <= 2**n:
        tail += math.comb(n, rank)
        rank += 1
    if rank == 0:
        return math.inf
    return (ordered[n - rank] - ordered[rank - 1]) / statistics.median(ordered)
