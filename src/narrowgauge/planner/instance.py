"""What has to be decided for one network, and how long a step takes by a decision.

A step is a chain of what the host does and waits for. Where everything else lives on the CPU
(`split`), the forward pass is all chain: a layer's call returns when its output is there. In the
backward pass weight gradients come late, so accelerator and bus may still be busy when the chain
ends, and it takes at least as long as each of them needs for all its work. Where everything else
lives on the accelerator, the host only queues, and the longer of the two counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from narrowgauge_contract.placement import PASSES

__all__ = [
    "RESOURCES",
    "Choice",
    "Cost",
    "Decision",
    "Group",
    "Instance",
    "Native",
    "Predicted",
    "limiting",
    "of_layer",
    "predict",
    "total",
]

#: What a step keeps busy, beside the chain; see `Cost`.
RESOURCES = ("cpu", "accelerator", "up", "down")


@dataclass(frozen=True)
class Cost:
    """Seconds: on the chain, and for how long each resource is busy meanwhile or later."""

    chain: float = 0.0
    accelerator: float = 0.0
    up: float = 0.0
    down: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))

    def times(self, factor: float) -> Cost:
        return Cost(*(factor * getattr(self, f.name) for f in fields(Cost)))


@dataclass(frozen=True)
class Choice:
    """One place and precision of one pass. `away`: over the bus."""

    device: str
    precision: str
    cost: Cost
    away: bool = False


@dataclass(frozen=True)
class Native:
    """A layer that stays torch's own: all three passes where everything lives, in one precision."""

    device: str
    precision: str
    forward: Cost
    backward: Cost


@dataclass(frozen=True)
class Group:
    """Layers that cost the same. `choices` by pass; a layer whose input gradient nobody wants has
    none of that. `resend`: the input goes up again in backward; `send`: the gradient goes up for
    the weight gradient alone; `kept_bytes`: the input, kept on the accelerator; `weight_bytes`.
    """

    layers: tuple[str, ...]
    choices: Mapping[str, tuple[Choice, ...]]
    native: tuple[Native, ...]
    resend: Cost
    send: Cost
    kept_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class Instance:
    """`forward`, `backward`: what is paid whatever is decided. `weights`: once, where a forward
    pass or an input gradient goes over the bus; `late`: once, where a weight gradient does, and
    `late_per_byte` for each. `working_bytes`: on the accelerator once anything is there,
    `base_bytes` always. `resident`: inputs stay there; `memory`: its limit in bytes.
    """

    groups: tuple[Group, ...]
    split: bool
    forward: Cost
    backward: Cost
    weights: Cost = Cost()
    late: float = 0.0
    late_per_byte: float = 0.0
    resident: bool = True
    base_bytes: int = 0
    working_bytes: int = 0
    memory: float | None = None


@dataclass(frozen=True)
class Decision:
    """For one layer: a native place, or a choice for each pass that it has."""

    native: Native | None
    choices: Mapping[str, Choice]

    def away(self, pass_name: str) -> bool:
        return pass_name in self.choices and self.choices[pass_name].away


@dataclass(frozen=True)
class Predicted:
    """A step. `busy` by resource; `binding`: what the backward pass (or, not split, all of it)
    waits for at last: `chain` or a resource; `bytes`: on the accelerator."""

    seconds: float
    busy: Mapping[str, float]
    chain: float
    binding: str
    bytes: int


def predict(instance: Instance, decisions: Mapping[str, Decision]) -> Predicted:
    """What a step takes by these decisions, one for each layer by its name."""
    first, later = instance.forward, instance.backward
    held, late_bytes, on_bus = instance.base_bytes, 0, False
    for group in instance.groups:
        for layer in group.layers:
            decision = decisions[layer]
            one, other = of_layer(instance, group, decision)
            first, later = first + one, later + other
            on_bus |= decision.away("forward") or decision.away("input_grad")
            if decision.away("weight_grad"):
                late_bytes += group.weight_bytes
                if instance.resident and decision.away("forward"):
                    held += group.kept_bytes
    anything = on_bus or late_bytes > 0
    if on_bus:
        first = first + instance.weights
    tail = (instance.late if late_bytes else 0.0) + instance.late_per_byte * late_bytes
    bound = later if instance.split else first + later
    limits = {name: getattr(bound, name) for name in limiting(instance.split)}
    binding = max(limits, key=lambda name: limits[name])
    seconds = (first.chain if instance.split else 0.0) + limits[binding] + tail
    total = first + later
    return Predicted(
        seconds,
        {name: getattr(total, name) for name in RESOURCES},
        total.chain + tail,
        binding,
        held + (instance.working_bytes if anything else 0),
    )


def limiting(split: bool) -> tuple[str, ...]:
    """What the part of a step in which things overlap takes at least, each by itself."""
    return ("chain", "accelerator", "up", "down") if split else ("chain", "accelerator")


def of_layer(instance: Instance, group: Group, decision: Decision) -> tuple[Cost, Cost]:
    """(forward, backward) of one layer."""
    if decision.native is not None:
        return decision.native.forward, decision.native.backward
    backward = Cost()
    for name in PASSES[1:]:
        if name in decision.choices:
            backward = backward + decision.choices[name].cost
    if decision.away("weight_grad"):
        if not (instance.resident and decision.away("forward")):
            backward = backward + group.resend
        if not decision.away("input_grad"):
            backward = backward + group.send
    return decision.choices["forward"].cost, backward


def total(costs: Sequence[Cost]) -> Cost:
    """Of all of them."""
    found = Cost()
    for cost in costs:
        found = found + cost
    return found
