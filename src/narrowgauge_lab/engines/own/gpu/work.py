"""The launches of a network at one batch size, in order, some beside others."""

from __future__ import annotations

import functools
from typing import Callable, List, Optional, Tuple

import torch

from narrowgauge_lab.engines.own.gpu.candidate import Launch
from narrowgauge_lab.engines.own.gpu.launches import Launches
from narrowgauge_lab.engines.own.gpu.lowered import Lowered
from narrowgauge_lab.engines.own.gpu.memory import Memory

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
        self._makes = makes
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
        read()
        if self.beside:
            self._run_besides()
        else:
            for launch in self.launches():
                launch()
        return self._finish()

    def _run_besides(self) -> None:
        if self._second is None:
            self._second = torch.cuda.Stream(self._device)
        first, second = torch.cuda.current_stream(self._device), self._second
        waited_for: List[int] = []
        for place, step in enumerate(self._steps):
            if place in waited_for:
                first.wait_stream(second)
                waited_for = []
            if place not in self._waiting:
                for launch in step:
                    launch()
                continue
            second.wait_stream(first)
            with torch.cuda.stream(second):
                for launch in step:
                    launch()
            waited_for.append(self._waiting[place])
        first.wait_stream(second)
