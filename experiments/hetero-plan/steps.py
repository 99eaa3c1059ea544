"""Whole training steps by placement plans: one at a time, in pairs, or all plans in turn."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from narrowgauge_contract.errors import BadValueError
from narrowgauge_contract.placement import (
    PASSES,
    LayerPlacement,
    PassPlacement,
    PlacementPlan,
    Transfers,
    plan_document,
)
from narrowgauge_contract.placement_costs import PlacedLayer
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.layers.hetero.convert import Converted, convert, home_of
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.optim import SGD

from .subjects import Subject

__all__ = ["MOST_LAYERS", "Stepper", "Taken", "all_plans", "by_turns", "in_turn"]

MOST_LAYERS = 4
#: Steps after a change of plan that are not counted, and steps of a sample.
_SETTLING, _PER_SAMPLE = 3, 5


class Stepper:
    """A training step of a network, by one plan after the other; calling it makes one.

    It returns when the step is queued, where everything else lives on a GPU, and when it is done
    where that is the CPU. Raises what `convert` raises.
    """

    def __init__(self, what: Subject, plan: PlacementPlan, accelerator: torch.device) -> None:
        self._accelerator = accelerator
        self.home = home_of(plan, accelerator)
        self._model = copy.deepcopy(what.model).to(self.home)
        self._images, self._labels = what.images.to(self.home), what.labels.to(self.home)
        self._optimizer = SGD(self._model, 0.0)
        self.place(plan)

    def place(self, plan: PlacementPlan) -> None:
        """Go on by another plan that has everything else at the same place."""
        self.converted: Converted = convert(self._model, plan, self._accelerator)
        self.converted.watch(self._optimizer.values)
        self._tf32 = self.converted.native_precision == "tf32"

    def __call__(self) -> None:
        loss = F.cross_entropy(self._model(self._images), self._labels)
        with deferred_weight_grads():
            self._optimizer.differentiate(loss)
        self._optimizer.step()

    def finish(self) -> None:
        """Wait until all steps are done."""
        if self._accelerator.type == "cuda":
            torch.cuda.synchronize(self._accelerator)

    def sample(self) -> float:
        """Seconds of one of a few steps in a row, by the host's clock, the device at rest before
        and after. Some that are not counted come first: other plans' steps have left the caches to
        themselves."""
        tf32_flags.allow_tf32(self._tf32)  # of native layers; the others see to it themselves
        for _ in range(_SETTLING):
            self()
        self.finish()
        began = time.perf_counter()
        for _ in range(_PER_SAMPLE):
            self()
        self.finish()
        return (time.perf_counter() - began) / _PER_SAMPLE

    def most_bytes(self) -> int:
        """What a step takes of a GPU at most, in use by tensors."""
        self()
        self.finish()
        torch.cuda.reset_peak_memory_stats(self._accelerator)
        self()
        self.finish()
        return int(torch.cuda.max_memory_allocated(self._accelerator))


def by_turns(steppers: Sequence[Stepper], rounds: int) -> List[List[float]]:
    """A sample of each in every round, there and back in turn, so that a drift meets all alike.
    One round more comes first and does not count."""
    taken: List[List[float]] = [[] for _ in steppers]
    for number in range(-1, rounds):
        order = range(len(steppers))
        for at in order if number % 2 == 0 else reversed(order):
            seconds = steppers[at].sample()
            if number >= 0:
                taken[at].append(seconds)
    return taken


@dataclasses.dataclass
class Taken:
    """One plan's samples, in the order of rounds. `code`: a letter per layer and pass."""

    code: str
    plan: PlacementPlan
    seconds: List[float] = dataclasses.field(default_factory=list)

    def document(self) -> Dict[str, Any]:
        return {"code": self.code, "plan": plan_document(self.plan), "seconds": self.seconds}


def all_plans(
    layers: Sequence[PlacedLayer], granularity: str, elsewhere_by: str = "kernels"
) -> Tuple[Taken, ...]:
    """Every division of these layers' fp32 passes between the devices, all else on the CPU, by
    whose operators `elsewhere_by` says.

    A code has `c` and `a` per layer, or per pass in the order of `PASSES`. Of a layer without an
    input gradient that pass goes with the weight's: it never runs. Raises BadValueError.
    """
    if len(layers) > MOST_LAYERS:
        raise BadValueError(
            f"{len(layers)} layers have too many plans to measure all of them",
            why=f"of {MOST_LAYERS} layers there are 16, or 2048 by passes",
            next_step="-p network=small, or -p network=mnist",
        )
    places = [list(_placements(layer, granularity)) for layer in layers]
    found = []
    for chosen in itertools.product(*places):
        code = ".".join(letters for letters, _ in chosen)
        named = tuple((layer.name, placed) for layer, (_, placed) in zip(layers, chosen))
        plan = PlacementPlan(
            f"all-{code}", "cpu", named, _layer("ccc"), Transfers(), elsewhere_by=elsewhere_by
        )
        found.append(Taken(code, plan))
    return tuple(found)


def _placements(layer: PlacedLayer, granularity: str) -> Iterator[Tuple[str, LayerPlacement]]:
    if granularity == "layer":
        for letter in "ca":
            yield letter, _layer(3 * letter)
        return
    for letters in map("".join, itertools.product("ca", repeat=len(PASSES))):
        if layer.input_grad or letters[1] == letters[2]:
            yield letters, _layer(letters)


def _layer(letters: str) -> LayerPlacement:
    names = {"c": "cpu", "a": "accelerator"}
    return LayerPlacement(*[PassPlacement(names[letter], "fp32") for letter in letters])


def in_turn(
    what: Subject,
    plans: Sequence[Taken],
    accelerator: torch.device,
    rounds: int,
    progress: Optional[Any] = None,
) -> None:
    """A sample of every plan in each round, forwards and backwards in turn: a drift, and what the
    plan before leaves behind, meet all alike."""
    stepper = Stepper(what, plans[0].plan, accelerator)
    for number in range(rounds):
        for taken in plans if number % 2 == 0 else reversed(plans):
            stepper.place(taken.plan)
            taken.seconds.append(stepper.sample())
        if progress is not None:
            progress(number + 1, rounds, "rounds")
