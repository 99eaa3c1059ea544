"""The fastest plan over everything that a plan says once for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median

from narrowgauge.planner.instance import Decision, Instance, Predicted, predict
from narrowgauge.planner.milp import solve
from narrowgauge.planner.options import Options, Unmodelled, Variant
from narrowgauge.planner.rates import Rates
from narrowgauge.planner.whatif import HERE, Machine
from narrowgauge_contract.errors import NotApplicableError, UnknownNameError, UsageError
from narrowgauge_contract.placement import (
    BUILTIN,
    PASSES,
    PRECISIONS,
    TENSORS,
    LayerPlacement,
    PassPlacement,
    PlacementPlan,
    Transfers,
    parse_plan,
)
from narrowgauge_contract.placement_costs import WIRE_OF, Costs

__all__ = ["ELSEWHERE", "Asked", "Found", "Planner", "plan_of", "precisions_of"]

ELSEWHERE = ("cpu", "accelerator", "free")
#: How a plan's name is made where nothing says another one.
_NAME = "solved"


@dataclass(frozen=True)
class Asked:
    """Constraints: `elsewhere` one of ELSEWHERE; `precisions` that passes may have, in the order of
    PRECISIONS; `memory` of the accelerator, in bytes."""

    elsewhere: str = "cpu"
    precisions: tuple[str, ...] = ("fp32",)
    memory: float | None = None


@dataclass(frozen=True)
class Found:
    """The fastest decision, what it takes, and what it was chosen by; `elsewhere_by`: whose
    operators everything else was measured with."""

    variant: Variant
    instance: Instance
    decisions: Mapping[str, Decision]
    predicted: Predicted
    elsewhere_by: str = "torch"


def precisions_of(text: str) -> tuple[str, ...]:
    """`fp32,bf16` as they are ordered everywhere. Raises UnknownNameError."""
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in PRECISIONS:
            raise UnknownNameError("precision", name, PRECISIONS)
    if not names:
        raise UsageError("--precision names none", next_step=f"some of {', '.join(PRECISIONS)}")
    return tuple(name for name in PRECISIONS if name in names)


class Planner:
    """Plans for one network on the machine that was measured, and on others like it."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.measured = {each.plan: median(each.seconds) for each in costs.steps}

    def fastest(self, asked: Asked, machine: Machine = HERE) -> Found:
        """Over all variants. Raises NotApplicableError, naming the constraint that leaves none."""
        best: Found | None = None
        for variant in self._variants(asked, machine):
            instance = self._instance(variant, machine, asked)
            if self._impossible(instance):
                continue
            solved = solve(instance)
            if solved is None:
                continue
            predicted = predict(instance, solved.decisions)
            if best is None or predicted.seconds < best.predicted.seconds:
                by = self.costs.elsewhere_by if variant.elsewhere == "cpu" else "torch"
                best = Found(variant, instance, solved.decisions, predicted, by)
        if best is None:
            raise self._refusal(asked, machine)
        return best

    def step_of(self, name: str) -> float:
        """What the parts say of a built-in plan's step, as it is or corrected by nothing."""
        return self._predicted(name, Unmodelled()).seconds

    def unmodelled(self, variant: Variant) -> Unmodelled:
        """What whole steps took beyond their parts, by the built-in plans that were measured: all
        at one place, and, for a wire, all passes over the bus."""
        return self._unmodelled(variant.elsewhere, variant.wire)

    @cache  # noqa: B019 - a planner lives as long as its answers
    def _unmodelled(self, elsewhere: str, wire: str) -> Unmodelled:
        if elsewhere not in self.measured:
            return Unmodelled()
        step = self.measured[elsewhere] - self.step_of(elsewhere)
        names = [
            name
            for name in self.measured
            if name.startswith("hetero-") and WIRE_OF[name.partition("-")[2]] == wire
        ]
        if elsewhere == "accelerator" or not names:
            return Unmodelled(step)
        passes = sum(2 + layer.input_grad for layer in self.costs.layers)
        longer = [
            (self.measured[name] - self._predicted(name, Unmodelled(step)).seconds) / passes
            for name in names
        ]
        return Unmodelled(step, median(longer))

    def _predicted(self, name: str, unmodelled: Unmodelled) -> Predicted:
        """Of a built-in plan, by the parts."""
        plan = parse_plan(BUILTIN[name], name)
        variant = Variant(plan.elsewhere, plan.transfers.wire["input"])
        placed = plan.default.forward
        options = Options(self.costs, variant)
        instance = options.instance((placed.precision,), unmodelled)
        decisions = {}
        for group in instance.groups:
            native = [n for n in group.native if n.device == placed.device]
            choices = {
                key: [c for c in each if c.device == placed.device]
                for key, each in group.choices.items()
            }
            if not native and not all(choices.values()):
                raise NotApplicableError(f"the costs do not have all parts of the plan '{name}'")
            for layer in group.layers:
                decisions[layer] = (
                    Decision(native[0], {})
                    if native
                    else Decision(None, {key: each[0] for key, each in choices.items()})
                )
        return predict(instance, decisions)

    def _variants(self, asked: Asked, machine: Machine) -> Iterator[Variant]:
        places = ("cpu", "accelerator") if asked.elsewhere == "free" else (asked.elsewhere,)
        for elsewhere in places:
            if elsewhere == "accelerator":
                yield Variant("accelerator")
                continue
            wires = dict.fromkeys(("fp32", *(WIRE_OF[name] for name in asked.precisions)))
            policies = Rates(self.costs, machine).policies()
            for wire in ("fp32",) if machine.coherent else wires:
                for policy in policies:
                    for resident in (True,) if asked.memory is None else (True, False):
                        yield Variant("cpu", wire, policy, resident)

    def _instance(self, variant: Variant, machine: Machine, asked: Asked) -> Instance:
        options = Options(self.costs, variant, machine)
        return options.instance(asked.precisions, self.unmodelled(variant), asked.memory)

    def _impossible(self, instance: Instance) -> list[tuple[str, str]]:
        """(layer, pass) that no allowed precision was measured for."""
        return [
            (layer, name)
            for group in instance.groups
            for name, choices in group.choices.items()
            if not choices
            for layer in group.layers
        ]

    def _refusal(self, asked: Asked, machine: Machine) -> NotApplicableError:
        """Which constraint leaves no plan."""
        least: list[float] = []
        lacking: list[tuple[str, str]] = []
        for variant in self._variants(asked, machine):
            instance = self._instance(variant, machine, asked)
            missing = self._impossible(instance)
            if missing:
                lacking = lacking or missing
                continue
            unlimited = Options(self.costs, variant, machine).instance(
                asked.precisions, Unmodelled()
            )
            solved = solve(unlimited, least_memory=True)
            if solved is not None:
                least.append(solved.seconds)
        if least and asked.memory is not None:
            return NotApplicableError(
                f"--memory {asked.memory / 1e9:g} is too little: no plan fits",
                why=f"with everything else on: {asked.elsewhere}, and passes in "
                f"{', '.join(asked.precisions)}, the least is {min(least) / 1e9:.3g} GB",
                next_step=f"--memory {min(least) * 1.01 / 1e9:.3g}, or another --network-elsewhere",
            )
        layer, pass_ = lacking[0]
        return NotApplicableError(
            f"--precision {','.join(asked.precisions)} leaves no place for the {pass_} of "
            f"layer '{layer}'",
            why=f"{len(lacking)} passes were not measured in any of them: this machine, this torch "
            "or the layer's shape do not have it, or the run left it out (-p precisions=…)",
            next_step="allow another one: --precision fp32," + ",".join(asked.precisions),
        )


def plan_of(found: Found, name: str = _NAME) -> PlacementPlan:
    """As a plan that a run can take; layers of one placement in a row share nothing but that."""
    layers = [
        (layer, _placement(found.decisions[layer]))
        for group in found.instance.groups
        for layer in group.layers
    ]
    counted: dict[LayerPlacement, int] = {}
    for _, placement in layers:
        counted[placement] = counted.get(placement, 0) + 1
    default = max(counted, key=lambda placement: counted[placement])
    named = tuple((_literal(layer), each) for layer, each in layers if each != default)
    variant = found.variant
    moved = Transfers(
        policy=variant.policy,
        resident=variant.resident,
        wire=dict.fromkeys(TENSORS, variant.wire),
    )
    return PlacementPlan(
        name, variant.elsewhere, named, default, moved, elsewhere_by=found.elsewhere_by
    )


def _placement(decision: Decision) -> LayerPlacement:
    if decision.native is not None:
        native = PassPlacement(decision.native.device, decision.native.precision)
        return LayerPlacement(*[native for _ in PASSES])
    # An input gradient that nobody wants goes where the weight's is.
    chosen = [decision.choices.get(name, decision.choices["weight_grad"]) for name in PASSES]
    placed = [PassPlacement(choice.device, choice.precision) for choice in chosen]
    return LayerPlacement(placed[0], placed[1], placed[2])


def _literal(layer: str) -> str:
    """A pattern that matches this name only."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in layer)
