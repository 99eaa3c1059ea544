"""The fastest decision, as an integer program (`scipy.optimize.milp`, HiGHS).

Layers of a group are alike, so whole numbers say how many of them have which place; of a group of
one layer they are binaries. That loses nothing: what couples the passes of a layer is that an input
or a gradient is on the accelerator already, and of n layers the fewest copies are needed where the
first ones have all that goes over the bus, which `_spread` then does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from narrowgauge.planner.instance import (
    Choice,
    Cost,
    Decision,
    Group,
    Instance,
    Native,
    limiting,
)
from narrowgauge_contract.placement import PASSES

__all__ = ["Solved", "solve"]

#: How far a whole number may be from one, and HiGHS' own codes.
_WHOLE = 1e-4
_OPTIMAL, _INFEASIBLE = 0, 2
#: HiGHS' tolerances are absolute, 1e-6 and 1e-7: its seconds are us here, and its bytes MiB.
_US, _MIB = 1e6, 2.0**-20

_Terms = dict[int, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Solved:
    """`seconds` as the program has them; `instance.predict` of `decisions` says the same."""

    seconds: float
    decisions: dict[str, Decision]


def solve(instance: Instance, *, least_memory: bool = False) -> Solved | None:
    """The fastest decision, or, `least_memory`, one that takes the fewest bytes (its `seconds` are
    those then); None where there is none. Raises RuntimeError where HiGHS gives up."""
    if instance.memory is not None or least_memory:
        instance = _one_by_one(instance)
    program = _Program()
    groups = [_GroupVariables(program, group) for group in instance.groups]
    on_bus, late = program.binary(), program.binary()
    for each in groups:
        each.constrain(instance, on_bus, late)
    _once_native(program, groups)
    objective = _seconds(program, instance, groups, on_bus, late)
    held = _bytes(program, instance, groups, on_bus, late)
    if instance.memory is not None:
        program.at_most(held, (instance.memory - instance.base_bytes) * _MIB)
    found = program.solve(held if least_memory else objective)
    if found is None:
        return None
    value, values = found
    value, constant = value / _US, instance.forward.chain if instance.split else 0.0
    if least_memory:
        value, constant = value * _US / _MIB, instance.base_bytes
    decisions = {}
    for each in groups:
        decisions.update(each.decisions(values))
    return Solved(value + constant, decisions)


def _one_by_one(instance: Instance) -> Instance:
    """Every layer a group of its own: of alike layers, which have their input kept matters where
    memory does."""
    groups = tuple(
        replace(group, layers=(layer,)) for group in instance.groups for layer in group.layers
    )
    return replace(instance, groups=groups)


class _Program:
    """Variables, all of them at least 0, and rows `terms <= bound` or `== bound`."""

    def __init__(self) -> None:
        self._integrality: list[int] = []
        self._upper: list[float] = []
        self._rows: list[_Terms] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def whole(self, most: float) -> int:
        return self._variable(1, most)

    def binary(self) -> int:
        return self._variable(1, 1)

    def real(self) -> int:
        return self._variable(0, np.inf)

    def _variable(self, integrality: int, most: float) -> int:
        self._integrality.append(integrality)
        self._upper.append(most)
        return len(self._upper) - 1

    def at_most(self, terms: _Terms, bound: float) -> None:
        self._row(terms, -np.inf, bound)

    def equal(self, terms: _Terms, bound: float) -> None:
        self._row(terms, bound, bound)

    def _row(self, terms: _Terms, low: float, high: float) -> None:
        self._rows.append(terms)
        self._low.append(low)
        self._high.append(high)

    def solve(self, objective: _Terms) -> tuple[float, np.ndarray] | None:
        count = len(self._upper)
        costs = np.zeros(count)
        for variable, weight in objective.items():
            costs[variable] += weight
        entries = [(r, c, v) for r, row in enumerate(self._rows) for c, v in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), count))
        with _quiet():
            result = milp(
                costs,
                integrality=np.array(self._integrality),
                bounds=Bounds(np.zeros(count), np.array(self._upper)),
                constraints=LinearConstraint(matrix, np.array(self._low), np.array(self._high)),
                options={"mip_rel_gap": 0.0},
            )
        if result.status == _INFEASIBLE:
            return None
        if result.status != _OPTIMAL:
            raise RuntimeError(f"HiGHS: {result.message}")
        return float(result.fun), result.x


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the C++ in the block prints off standard output, which may be a JSON document:
    HiGHS says "transformNewIntegerFeasibleSolution tmpSolver.run();" whatever it is told."""
    library = ctypes.CDLL(None)
    sys.stdout.flush()
    library.fflush(None)
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        library.fflush(None)  # a pipe's text would otherwise come out later
        os.dup2(kept, 1)
        os.close(kept)


@dataclass
class _GroupVariables:
    """How many layers of a group have which choice. `resend` and `send` count copies."""

    program: _Program
    group: Group
    passes: dict[str, list[tuple[int, Choice]]] = field(init=False)
    native: list[tuple[int, Native]] = field(init=False)

    def __post_init__(self) -> None:
        program, most = self.program, len(self.group.layers)
        self.passes = {
            name: [(program.whole(most), choice) for choice in choices]
            for name, choices in self.group.choices.items()
        }
        self.native = [(program.whole(most), each) for each in self.group.native]
        self.resend, self.send, self.kept = (program.whole(most) for _ in range(3))

    def constrain(self, instance: Instance, on_bus: int, late: int) -> None:
        program, count = self.program, len(self.group.layers)
        for listed in self.passes.values():
            variables = [variable for variable, _ in (*listed, *self.native)]
            program.equal(dict.fromkeys(variables, 1.0), count)
        for name in PASSES:
            once = late if name == "weight_grad" else on_bus
            if self.away(name):
                program.at_most({**self.away(name), once: -float(count)}, 0)
        by_weight = self.away("weight_grad")
        there = self.away("forward") if instance.resident else {}
        program.at_most({**by_weight, **_negative(there), self.resend: -1.0}, 0)
        program.at_most({**by_weight, **_negative(self.away("input_grad")), self.send: -1.0}, 0)
        # Of one layer: kept where both the forward pass and the weight gradient are there.
        program.at_most({**by_weight, **there, self.kept: -1.0}, count)

    def away(self, name: str) -> _Terms:
        return {variable: 1.0 for variable, choice in self.passes.get(name, ()) if choice.away}

    def costs(self, direction: str) -> Iterable[tuple[int, Cost]]:
        """(variable, what one of it costs) of forward or backward."""
        for name, listed in self.passes.items():
            if (name == "forward") == (direction == "forward"):
                yield from ((variable, choice.cost) for variable, choice in listed)
        yield from ((variable, getattr(each, direction)) for variable, each in self.native)
        if direction == "backward":
            yield self.resend, self.group.resend
            yield self.send, self.group.send

    def decisions(self, values: np.ndarray) -> dict[str, Decision]:
        """One for each layer: those over the bus first, for every pass; the native ones last."""
        native = _spread(self.native, values)
        places = {
            name: _spread(sorted(listed, key=lambda each: not each[1].away), values)
            for name, listed in self.passes.items()
        }
        found = {}
        for at, layer in enumerate(self.group.layers):
            if at < len(self.group.layers) - len(native):
                found[layer] = Decision(None, {name: each[at] for name, each in places.items()})
            else:
                found[layer] = Decision(native[at - len(self.group.layers)], {})
        return found


def _spread(counted: Sequence[tuple[int, T]], values: np.ndarray) -> list[T]:
    """Each as often as its variable says, in order."""
    found: list[T] = []
    for variable, each in counted:
        count = round(float(values[variable]))
        if abs(count - values[variable]) > _WHOLE:
            raise RuntimeError(f"HiGHS gave {values[variable]} for a whole number")
        found += [each] * count
    return found


def _once_native(program: _Program, groups: Sequence[_GroupVariables]) -> None:
    """Flags of the process say what torch's own float32 products are: one precision for all."""
    precisions = {each.precision for group in groups for _, each in group.native}
    if len(precisions) < 2:
        return
    chosen = {name: program.binary() for name in sorted(precisions)}
    program.at_most(dict.fromkeys(chosen.values(), 1.0), 1)
    for group in groups:
        for variable, each in group.native:
            most = float(len(group.group.layers))
            program.at_most({variable: 1.0, chosen[each.precision]: -most}, 0)


def _seconds(
    program: _Program,
    instance: Instance,
    groups: Sequence[_GroupVariables],
    on_bus: int,
    late: int,
) -> _Terms:
    """The objective in us, without what is fixed of the forward pass: see `instance.predict`."""
    bound = program.real()
    first = [pair for group in groups for pair in group.costs("forward")]
    first.append((on_bus, instance.weights))
    later = [pair for group in groups for pair in group.costs("backward")]
    objective: _Terms = {bound: 1.0, late: instance.late * _US}
    if instance.split:
        _add(objective, first, "chain")
        fixed, overlapping = instance.backward, later
    else:
        fixed, overlapping = instance.forward + instance.backward, [*first, *later]
    for name in limiting(instance.split):
        terms: _Terms = {bound: -1.0}
        _add(terms, overlapping, name)
        program.at_most(terms, -getattr(fixed, name) * _US)
    for group in groups:
        for variable in group.away("weight_grad"):
            weight = instance.late_per_byte * group.group.weight_bytes * _US
            objective[variable] = objective.get(variable, 0.0) + weight
    return objective


def _add(terms: _Terms, costs: Iterable[tuple[int, Cost]], name: str) -> None:
    for variable, cost in costs:
        terms[variable] = terms.get(variable, 0.0) + getattr(cost, name) * _US


def _bytes(
    program: _Program,
    instance: Instance,
    groups: Sequence[_GroupVariables],
    on_bus: int,
    late: int,
) -> _Terms:
    """What a decision takes of the accelerator's memory beyond `base_bytes`."""
    anything = program.binary()
    program.at_most({on_bus: 1.0, anything: -1.0}, 0)
    program.at_most({late: 1.0, anything: -1.0}, 0)
    terms: _Terms = {anything: instance.working_bytes * _MIB}
    if instance.resident:
        terms.update({group.kept: group.group.kept_bytes * _MIB for group in groups})
    return terms


def _negative(terms: _Terms) -> _Terms:
    return {variable: -weight for variable, weight in terms.items()}
