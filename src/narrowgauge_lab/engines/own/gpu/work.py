"""The launches of a network at one batch size, in order, some beside others."""

from __future__ import annotations

import functools
from typing import Callable, List, Optional, Tuple

import torch

from narrowgauge_lab.engines.own.gpu.candidate import Launch
from narrowgauge_lab.engines.own.gpu.launches import Launches
from narrowgauge_lab.engines.own.gpu.lowered import Lowered
from narrowgauge_lab.engines.own.gpu.memory import Memory
from narrowgauge_lab.engines.own.gpu.scheduling import Queued, in_turn

__all__ = ["Work"]


class Work:
    """Runs `network` in `memory` on `images` [N, C, H, W], which it reads anew each time; or on
    others, see `reading`.

    `beside`: whether the steps that may do so run on a second stream.
    """

    def __init__(self, network: Lowered, memory: Memory, images: torch.Tensor) -> None:
        self._device = network.device
        self._waiting = memory.placement.waits
        makes = Launches(memory, network.modules, network.weights, network.affines, network.scales)
        self._makes, self._turn = makes, memory.turn
        self._steps: List[Tuple[Launch, ...]] = [
            tuple(makes.of(step, beside=place in self._waiting))
            for place, step in enumerate(network.plan.steps)
        ]
        self._read, self._finish = makes.read(images), makes.finish()
        self.beside = False
        self._second: Optional[torch.cuda.Stream] = None

    @property
    def has_besides(self) -> bool:
        return bool(self._waiting)

    def launches(self) -> Tuple[Launch, ...]:
        return tuple(launch for step in self._steps for launch in step)

    def run(self) -> torch.Tensor:
        """Queue everything; the result, in memory that the next run writes over."""
        return self._run(self._read)

    def reading(self, images: torch.Tensor) -> Callable[[], torch.Tensor]:
        """`run`, but on these images of the same size: by the same launches, in the same memory."""
        return functools.partial(self._run, self._makes.read(images))

    def _run(self, read: Callable[[], None]) -> torch.Tensor:
        queue = in_turn(self._steps, self._waiting if self.beside else {})
        first = torch.cuda.current_stream(self._device) if self.beside else None
        for now, after in zip([None, *queue], [*queue, None]):
            self._turn.allow_next = int(after is not None and _may_begin_early(after))
            if now is None:
                read()
            elif first is None:
                now.launch()
            else:
                self._start_on(first, now)
        # Whoever launches a step alone launches it again and again.
        self._turn.allow_next = 1
        if first is not None and self._second is not None:
            first.wait_stream(self._second)
        return self._finish()

    def _start_on(self, first: torch.cuda.Stream, each: Queued[Launch]) -> None:
        if self._second is None:
            self._second = torch.cuda.Stream(self._device)
        if each.joins:
            first.wait_stream(self._second)
        if each.forks:
            self._second.wait_stream(first)
        with torch.cuda.stream(self._second if each.aside else first):
            each.launch()


def _may_begin_early(each: Queued[Launch]) -> bool:
    """While what is launched before it still runs; see `Turn`."""
    return each.follows and each.launch.running().is_ours
