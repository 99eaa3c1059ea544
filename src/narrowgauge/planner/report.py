"""What the planner found, as a value, as tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from narrowgauge.planner.instance import RESOURCES, Decision, Group, of_layer, total
from narrowgauge.planner.search import Asked, Found, Planner, plan_of
from narrowgauge.planner.whatif import CHANGES, machine_of
from narrowgauge.show_tables import plain_table
from narrowgauge.units import format_value
from narrowgauge.view import widen
from narrowgauge_contract.placement import PASSES, PlacementPlan, plan_document
from narrowgauge_contract.placement_costs import Costs

__all__ = ["Change", "Line", "Report", "make_report", "print_report", "report_json"]

#: Parts that are further than this from a step that was measured do not explain it.
_EXPLAINED = 0.25
#: Columns from which a line holds all there is to say of a layer.
_WIDE = 108
#: Below this share of a step nothing that is busy explains it: it is a chain of waits.
_BUSY = 0.7
_NAMES = {"cpu": "the CPU", "accelerator": "the accelerator", "up": "the bus up",
          "down": "the bus down", "chain": "the chain of work and waits"}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One layer: `places` by pass, with the us that each adds to the chain (those of torch's own
    backward pass stand with the last); `alone`: seconds of the whole layer at one place."""

    layer: str
    shape: str
    places: Mapping[str, str]
    seconds: float
    alone: Mapping[str, float]


@dataclass(frozen=True)
class Change:
    """A step by the best plan of a changed machine, against one of this machine."""

    text: str
    seconds: float
    ratio: float


@dataclass(frozen=True)
class Report:
    """`measured`: built-in plans, (name, measured, what their parts alone add up to)."""

    costs: Costs
    asked: Asked
    found: Found
    plan: PlacementPlan
    lines: tuple[Line, ...]
    changes: tuple[Change, ...]
    ranking: tuple[Change, ...]
    measured: tuple[tuple[str, float, float], ...]

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Built-in plans whose parts do not add up to their step: parts or steps were disturbed, or
        the model lacks something of this machine."""
        return tuple(
            name for name, whole, parts in self.measured if abs(parts / whole - 1) > _EXPLAINED
        )

    @property
    def bound(self) -> float:
        """Seconds for which the busiest resource is busy in a step by the plan, by the costs."""
        return max(self.found.predicted.busy[name] for name in RESOURCES)

    @property
    def accelerator_step(self) -> float:
        """Seconds that a step all on the accelerator took beside the costs; 0: not measured."""
        return next((whole for name, whole, _ in self.measured if name == "accelerator"), 0.0)

    @property
    def options(self) -> tuple[str, ...]:
        """What a run that holds the plan against measurements is told of it, as NAME=VALUE."""
        return (
            f"predicted={self.found.predicted.seconds:.6g}",
            f"bound={self.bound:.6g}",
            f"accelerator_step={self.accelerator_step:.6g}",
        )

    @property
    def binding(self) -> str:
        """The resource that is busy for the largest share of the step, or the chain."""
        predicted = self.found.predicted
        most = max(RESOURCES, key=lambda name: predicted.busy[name])
        return most if predicted.busy[most] >= _BUSY * predicted.seconds else "chain"


def make_report(costs: Costs, asked: Asked, changes: Sequence[str], name: str) -> Report:
    """Solve for this machine, for each of the `changes` alone, for all together, and for those of
    CHANGES. Raises NotApplicableError, naming the constraint that leaves no plan."""
    planner = Planner(costs)
    found = planner.fastest(asked)
    asked_for: list[tuple[str, ...]] = [(change,) for change in changes]
    if len(changes) > 1:
        asked_for.append(tuple(changes))
    tried = {each: _change(planner, asked, found, each) for each in asked_for}
    ranked = [tried.get((each,)) or _change(planner, asked, found, (each,)) for each in CHANGES]
    shapes = {layer.name: costs.shapes[layer.shape].text() for layer in costs.layers}
    return Report(
        costs=costs,
        asked=asked,
        found=found,
        plan=plan_of(found, name),
        lines=tuple(_lines(found, shapes, [layer.name for layer in costs.layers])),
        changes=tuple(tried.values()),
        ranking=tuple(sorted(ranked, key=lambda change: change.seconds)),
        measured=tuple((plan, s, planner.step_of(plan)) for plan, s in planner.measured.items()),
    )


def _change(planner: Planner, asked: Asked, found: Found, changes: tuple[str, ...]) -> Change:
    seconds = planner.fastest(asked, machine_of(changes)).predicted.seconds
    return Change(",".join(changes), seconds, found.predicted.seconds / seconds)


def _lines(found: Found, shapes: Mapping[str, str], order: Sequence[str]) -> Iterator[Line]:
    groups = {layer: group for group in found.instance.groups for layer in group.layers}
    for layer in order:
        group, decision = groups[layer], found.decisions[layer]
        yield Line(
            layer,
            shapes[layer],
            dict(_places(decision)),
            total(of_layer(found.instance, group, decision)).chain,
            dict(_alone(group)),
        )


def _places(decision: Decision) -> Iterator[tuple[str, str]]:
    native = decision.native
    if native is not None:
        each = (native.forward, native.backward)
        yield "forward", f"{native.device} {native.precision} {_us(each[0].chain)}"
        yield "input_grad", f"{native.device} {native.precision}"
        yield "weight_grad", f"{native.device} {native.precision} {_us(each[1].chain)}"
        return
    for name in PASSES:
        if name in decision.choices:
            choice = decision.choices[name]
            yield name, f"{choice.device} {choice.precision} {_us(choice.cost.chain)}"
        else:
            yield name, "not wanted"


def _alone(group: Group) -> Iterator[tuple[str, float]]:
    """What the whole layer adds to the chain at each place, in its fastest precisions there."""
    for device in ("cpu", "accelerator"):
        apart = [
            min((c.cost.chain for c in each if c.device == device), default=None)
            for each in group.choices.values()
        ]
        sums = [(n.forward + n.backward).chain for n in group.native if n.device == device]
        if None not in apart:
            sums.append(sum(seconds for seconds in apart if seconds is not None))
        if sums:
            yield device, min(sums)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def print_report(report: Report, console: Console) -> None:
    """Everything on one page."""
    widen(console)
    costs, predicted = report.costs, report.found.predicted
    print_ = console.print
    print_(f"{costs.network}, batch {costs.batch}, accelerator: {costs.accelerator}")
    if costs.stand_in:
        print_("the CPU stands in for the accelerator: no speed here is a claim")
    if costs.shared_memory:
        print_(_of_one_memory(report))
    print_(f"predicted step: {format_value(predicted.seconds, 's')}, elsewhere: "
           f"{report.found.variant.elsewhere}, wire {report.found.variant.wire}, "
           f"{report.found.variant.policy}")  # fmt: skip
    print_(f"bound by: {_NAMES[report.binding]}; {predicted.bytes / 1e6:.1f} MB on the accelerator")
    for table in _layers(report, wide=console.width >= _WIDE):
        print_(table)
    print_(_busy(report))
    if report.changes:
        print_(_changes("What if", report.changes))
    print_(_changes("What would help most", report.ranking))
    print_(_measured(report))
    if report.doubtful:
        print_(f"the parts of {', '.join(report.doubtful)} do not add up to the step within "
               f"{100 * _EXPLAINED:.0f} %: the prediction is a guess; measure again on a quiet "
               "machine, with more seconds and rounds")  # fmt: skip


def _of_one_memory(report: Report) -> str:
    """Copies are charged there too: layers make them, and a step is predicted as it runs. Beside it
    stands what the same machine would do without."""
    (free,) = (change for change in report.ranking if change.text == "coherent=yes")
    return (
        "host and accelerator share one memory: the layers copy all the same, at the cost that "
        f"was measured; read in place a step would take {format_value(free.seconds, 's')}, "
        f"{free.ratio:.2f} times as fast (--what-if coherent=yes)"
    )


def _layers(report: Report, *, wide: bool) -> list[Table]:
    """A line per layer: where its passes are, and as the reason what it takes in one place. Two
    tables where the screen is not wide enough for one."""
    title, first = "Layers [us on the chain; acc: the accelerator]", (*PASSES, "all")
    reasons = ("if all cpu", "if all acc")
    if wide:
        tables = [plain_table(title, "layer", "shape", *first, *reasons)]
    else:
        tables = [plain_table(title, "layer", *first), plain_table("", "layer", "shape", *reasons)]
    for line in report.lines:
        places = [line.places[name].replace("accelerator", "acc") for name in PASSES]
        alone = [line.alone.get(device) for device in ("cpu", "accelerator")]
        why = ["-" if seconds is None else _us(seconds) for seconds in alone]
        here = [*places, _us(line.seconds)]
        if wide:
            tables[0].add_row(line.layer, line.shape, *here, *why)
        else:
            tables[0].add_row(line.layer, *here)
            tables[1].add_row(line.layer, line.shape, *why)
    return tables


def _busy(report: Report) -> Table:
    table = plain_table("Resources", "", "busy", "of the step")
    predicted = report.found.predicted
    for name in RESOURCES:
        busy = predicted.busy[name]
        table.add_row(
            _NAMES[name], format_value(busy, "s"), f"{100 * busy / predicted.seconds:.0f} %"
        )
    return table


def _changes(title: str, changes: Sequence[Change]) -> Table:
    table = plain_table(title, "change", "step", "times as fast")
    for change in changes:
        table.add_row(change.text, format_value(change.seconds, "s"), f"{change.ratio:.2f}")
    return table


def _measured(report: Report) -> Table:
    """How far the parts explain whole steps; what is left goes into the prediction."""
    table = plain_table(
        "Steps that were measured", "plan", "measured", "its parts", "parts / whole"
    )
    for name, measured, parts in report.measured:
        table.add_row(
            name, format_value(measured, "s"), format_value(parts, "s"), f"{parts / measured:.2f}"
        )
    return table


def report_json(report: Report) -> dict[str, Any]:
    """The same as one document; seconds throughout."""
    predicted = report.found.predicted
    return {
        "network": report.costs.network,
        "batch": report.costs.batch,
        "accelerator": report.costs.accelerator,
        "stand_in": report.costs.stand_in,
        "shared_memory": report.costs.shared_memory,
        "asked": dataclasses.asdict(report.asked),
        "variant": dataclasses.asdict(report.found.variant),
        "predicted_step": predicted.seconds,
        "bound": report.bound,
        "accelerator_step": report.accelerator_step,
        "binding": report.binding,
        "doubtful": list(report.doubtful),
        "busy": dict(predicted.busy),
        "accelerator_bytes": predicted.bytes,
        "layers": [dataclasses.asdict(line) for line in report.lines],
        "what_if": [dataclasses.asdict(change) for change in report.changes],
        "ranking": [dataclasses.asdict(change) for change in report.ranking],
        "measured": [
            {"plan": name, "seconds": seconds, "parts": parts}
            for name, seconds, parts in report.measured
        ],
        "plan": plan_document(report.plan),
    }
