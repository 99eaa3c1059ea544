"""Everything but the layers, on the CPU: as it runs under a plan, and by torch's own operators.

Under a plan tensors come from copies and the optimiser is the training loop's; beside it runs the
same network with layers that do nothing, whose tensors are ordinary and lie ready, and torch's
own SGD. What a plan costs the CPU besides its layers is the difference; where it has the kernels'
operators there (`elsewhere_by`), what these spare is in it too.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from typing import Any, Callable, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.placement import PlacementPlan
from narrowgauge_lab.layers.hetero.convert import Converted, convert
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.hetero.runner import Runner
from narrowgauge_lab.optim import SGD

from .instrument import CPU
from .segments import StubbedStep
from .subjects import Subject, layers_of

__all__ = ["OutsideLayers", "beside_torch"]

#: Steps before a sample, since the other one's have left the caches to themselves, and of it.
_SETTLING, _PER_SAMPLE = 3, 5


class OutsideLayers:
    """Steps of a network by a plan; calling it makes one, and gives its seconds outside of layers.

    All layers that the plan can place are placed, also those that training would leave to torch:
    each is then a call with a beginning and an end. Weight gradients come at once, since waiting
    for late ones is nothing that the CPU does.
    """

    def __init__(self, what: Subject, plan: PlacementPlan, accelerator: torch.device) -> None:
        self._model = copy.deepcopy(what.model)
        self._images, self._labels = what.images, what.labels
        self._optimizer = SGD(self._model, 0.0)
        ledger = Ledger("bytes", accelerator)
        self.converted: Converted = convert(self._model, plan, accelerator, ledger)
        self.converted.watch(self._optimizer.values)
        self._inside = 0.0
        for runner in self.converted.runners:
            self._note(runner, "forward")
            self._note(runner, "backward")

    def _note(self, runner: Runner, name: str) -> None:
        call: Callable[..., Any] = getattr(runner, name)

        @functools.wraps(call)
        def noted(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._inside += time.perf_counter() - began

        setattr(runner, name, noted)

    def __call__(self) -> float:
        began, self._inside = time.perf_counter(), 0.0
        loss = F.cross_entropy(self._model(self._images), self._labels)
        self._optimizer.differentiate(loss)
        self._optimizer.step()
        return time.perf_counter() - began - self._inside


class _TorchSGD:
    """torch's own, called as the training loop's is."""

    def __init__(self, model: nn.Module) -> None:
        self._own = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def differentiate(self, loss: torch.Tensor) -> None:
        self._own.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self._own.step()


def beside_torch(
    what: Subject, plan: PlacementPlan, accelerator: torch.device, rounds: int
) -> Tuple[List[float], List[float]]:
    """Seconds under the plan and by torch's operators, a sample of each in every round, there and
    back in turn, so that a drift meets both alike. Raises what `convert` raises."""
    under = OutsideLayers(what, plan, accelerator)
    layers, shapes = layers_of(what)
    stubbed = StubbedStep(what, layers, shapes, CPU, _TorchSGD)

    def plain() -> float:
        stubbed()
        return sum(seconds for seconds, _ in stubbed.clock.take().values())

    calls: Sequence[Callable[[], float]] = (under, plain)
    taken: Tuple[List[float], List[float]] = ([], [])
    for number in range(rounds):
        for at in (0, 1) if number % 2 == 0 else (1, 0):
            taken[at].append(_sample(calls[at]))
    under.converted.close()
    return taken


def _sample(call: Callable[[], float]) -> float:
    for _ in range(_SETTLING):
        call()
    return statistics.mean(call() for _ in range(_PER_SAMPLE))
