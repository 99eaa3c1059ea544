"""The best answer that there is before a deadline: stages run while the next one still fits.

An interruptible algorithm in Zilberstein's sense (AI Magazine, 1996), with stages as its steps:
what overshoots a deadline is one stage at most.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Callable, List, Optional, Tuple

import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import turns
from narrowgauge_lab.anytime.adaptive import require_eval
from narrowgauge_lab.anytime.network import AnytimeNetwork

__all__ = ["StageTimes", "Timely", "deadline", "measure_stages"]

Now = Callable[[], float]

#: Passes before the first one that counts: they compile, allocate and warm the caches.
_WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """Seconds that each stage with its head takes for batches of `batch`, until its answer is
    there: `typical`, the medians, and `safe`, a high quantile, which deadlines are planned with.
    The first stage's are with the network's `begin`, which a deadline has to wait for too."""

    batch: int
    typical: Tuple[float, ...]
    safe: Tuple[float, ...]

    @property
    def until(self) -> Tuple[float, ...]:
        """Typical seconds until each answer."""
        return tuple(sum(self.typical[: number + 1]) for number in range(len(self.typical)))

    @property
    def longest(self) -> float:
        """The longest stage, typically: what a deadline should be overshot by at most."""
        return max(self.typical)


@dataclasses.dataclass(frozen=True)
class Timely:
    """`logits` [B, classes] of `exit`, the best one that was done before the deadline. `late`: none
    was, and this is the first, after it. `seconds`: from the call until it returned."""

    logits: torch.Tensor
    exit: int
    late: bool
    seconds: float
    deadline_s: float

    @property
    def overshoot_s(self) -> float:
        """How long after its deadline the call returned; 0 where it did before."""
        return max(0.0, self.seconds - self.deadline_s)


def measure_stages(
    net: AnytimeNetwork,
    images: torch.Tensor,
    passes: int = 30,
    quantile: float = 1.0,
    now: Now = time.perf_counter,
) -> StageTimes:
    """Time each stage on `images` over so many passes; `quantile` (0 to 1; 1 is the longest seen)
    is what is taken for safe. Raises BadValueError for what cannot be."""
    require_eval(net)
    if passes < 1 or not 0.0 <= quantile <= 1.0 or not images.shape[0]:
        raise BadValueError(
            "stages cannot be timed like this",
            why=f"passes={passes}, quantile={quantile}, {images.shape[0]} images",
            next_step="at least one pass of at least one image, and a quantile from 0 to 1",
        )
    taken: List[List[float]] = [[] for _ in range(net.exits)]
    with torch.no_grad(), turns.alone():
        for number in range(_WARM_UP + passes):
            spent = _stages(net, images, now)
            if number >= _WARM_UP:
                for seconds, stage in zip(spent, taken):
                    stage.append(seconds)
    ordered = [sorted(stage) for stage in taken]
    place = max(0, math.ceil(quantile * passes) - 1)
    return StageTimes(
        batch=int(images.shape[0]),
        typical=tuple(stage[passes // 2] for stage in ordered),
        safe=tuple(stage[place] for stage in ordered),
    )


def _stages(net: AnytimeNetwork, images: torch.Tensor, now: Now) -> List[float]:
    _wait(images.device)
    spent: List[float] = []
    before = now()
    state = net.begin(images)
    for number in range(net.exits):
        state = net.advance(number, state).state
        _wait(images.device)
        after = now()
        spent.append(after - before)
        before = after
    return spent


def deadline(
    net: AnytimeNetwork,
    images: torch.Tensor,
    ms: float,
    times: Optional[StageTimes] = None,
    now: Now = time.perf_counter,
) -> Timely:
    """Answers for `images` [B, C, H, W] within `ms` milliseconds of this call.

    The first stage always runs. With `times` (of batches of this size), a stage begins only if it
    is done in time as far as those know; without, while there is time left. Then the best answer
    that was done before the deadline is returned. A GPU is waited for after each stage.

    Raises BadValueError for a deadline that is no number of ms from 0 on, for times of another
    batch or network, and for a network in training mode.
    """
    began = now()
    require_eval(net)
    _require_deadline(net, images, ms, times)
    limit = ms / 1e3
    if not images.shape[0]:
        empty = torch.zeros((0, net.classes), dtype=images.dtype, device=images.device)
        return Timely(empty, net.exits - 1, False, now() - began, limit)
    with torch.no_grad():
        answer = net.advance(0, net.begin(images))
        _wait(images.device)
        spent = now() - began
        best, late = answer.logits, spent > limit
        reached = 0
        for number in range(1, net.exits):
            needed = times.safe[number] if times is not None else 0.0
            if spent + needed > limit or spent >= limit:
                break
            answer = net.advance(number, answer.state)
            _wait(images.device)
            spent = now() - began
            if spent <= limit:
                best, reached = answer.logits, number
    return Timely(best, reached, late, now() - began, limit)


def _require_deadline(
    net: AnytimeNetwork, images: torch.Tensor, ms: float, times: Optional[StageTimes]
) -> None:
    if math.isnan(ms) or ms < 0:
        raise BadValueError(
            f"a deadline of {ms} ms", why="it is a number of milliseconds from 0 on"
        )
    if times is None or not images.shape[0]:
        return
    if len(times.safe) != net.exits or times.batch != images.shape[0]:
        raise BadValueError(
            "these stage times are not of this network and batch",
            why=f"{len(times.safe)} stages of batch {times.batch}, "
            f"for {net.exits} stages and {images.shape[0]} images",
            next_step="measure_stages(net, images)",
        )


def _wait(device: torch.device) -> None:
    """Until what was queued is done; a CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
