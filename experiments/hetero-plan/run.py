"""One row of `hetero-plan`: the costs of a network's parts, or steps by a plan, or by all plans."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.codec import dumps
from narrowgauge_contract.errors import NotApplicableError, UnknownNameError
from narrowgauge_contract.placement import BUILTIN, NO_PLAN, parse_plan, plan_document
from narrowgauge_contract.placement_costs import (
    COSTS_FILE,
    FORMAT,
    WIRE_OF,
    Costs,
    Shape,
    StepCost,
)
from narrowgauge_lab import precision
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.hetero.bus import MOST_PIECES, PIECE_BYTES
from narrowgauge_lab.layers.hetero.elsewhere import elsewhere_by
from narrowgauge_lab.layers.hetero.host import HostMemory
from narrowgauge_lab.layers.hetero.locking import lock_pages
from narrowgauge_lab.layers.passes import PRECISIONS, missing
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.optim import SGD

from .elsewhere import beside_torch
from .instrument import Instrument, rounded
from .layers import native, placed, products
from .segments import segments
from .steps import Stepper, Taken, all_plans, by_turns, in_turn
from .subjects import Subject, layers_of, subject
from .wires import conversions, copies, fixed

#: Raw samples of every plan that was measured.
PLANS_FILE = "plans.json"
_DEVICES = ("cpu", "accelerator")


def run(ctx: RowContext) -> None:
    """Measure what `ctx.parameters` ask for. Raises what `convert` raises of a plan."""
    parameters = ctx.parameters
    precision.enter("fp32", ctx.device)
    what = subject(parameters["network"], parameters["batch"], ctx.seed)
    ctx.fact("accelerator", _accelerator(ctx.device))
    if ctx.device.type != "cuda":
        ctx.log("no GPU: the CPU stands in for the accelerator, and no speed here is a claim")
    if parameters["exhaustive"]:
        _lock_pages(ctx)
        _every_plan(ctx, what)
    elif parameters["plan"] != NO_PLAN:
        _one_plan(ctx, what)
    else:
        _costs(ctx, what)


def _costs(ctx: RowContext, what: Subject) -> None:
    found = steadily(ctx, lambda: _measured(ctx, what), ctx.device)
    ctx.side_file(COSTS_FILE).write_text(dumps(found, indent=None), encoding="utf-8")
    for step in found.steps:
        _metric(ctx, f"step.{step.plan}", step.seconds)
    for name in _DEVICES:
        between = [segment.seconds for segment in found.segments if segment.device == name]
        _metric(ctx, f"elsewhere.{name}", [sum(parts) for parts in zip(*between)])
    largest = max(each.bytes for each in found.copies)
    for each in found.copies:
        if each.bytes == largest:
            _metric(ctx, f"copy.{each.policy}.{each.direction}", each.seconds)
    ctx.fact("copied_bytes", largest)
    ctx.fact("layers", len(found.layers))
    ctx.fact("measured", {name: len(getattr(found, name)) for name in ("products", "placed")})


def _measured(ctx: RowContext, what: Subject) -> Costs:
    """Every part in its turn. A device's memory of the parts before is free again.

    Whole steps come before the parts, each plan's beside those all on the accelerator: so a run of
    a plan measures it. After the parts, and all plans in one turn, the same steps took 10 % longer.
    """
    seconds = ctx.parameters["seconds"]
    by = Instrument(ctx.device, seconds)
    layers, shapes = layers_of(what)
    wanted = _precisions(ctx.parameters["precisions"], ctx.device)
    wires = tuple(dict.fromkeys(WIRE_OF[name] for name in wanted))
    # Pageable copies are only to be had before the plans' page-locking, which is for good.
    copied = copies(by)
    _lock_pages(ctx)
    on_cpu_by = elsewhere_by(parse_plan(BUILTIN["hetero-fp32"], "hetero-plan"))
    ctx.progress(0, 6, "parts", "steps")
    steps, most = _steps(ctx, what, wanted, on_cpu_by)
    made = _per_layer(ctx, by, shapes, wanted)
    ctx.progress(4, 6, "parts", "segments")
    between = segments(by, what, layers, shapes, 20 * seconds, on_cpu_by)
    ctx.progress(5, 6, "parts", "copies")
    converted, calls = conversions(by, wires), fixed(by)
    ctx.progress(6, 6, "parts")
    return Costs(
        format=FORMAT,
        network=what.name,
        batch=ctx.parameters["batch"],
        accelerator=_accelerator(ctx.device),
        stand_in=ctx.device.type != "cuda",
        shared_memory=_shares_memory(ctx.device),
        launches_hidden=by.hidden,
        page_locked=HostMemory(ctx.device.type == "cuda").page_locking(),
        piece_bytes=PIECE_BYTES,
        most_pieces=MOST_PIECES,
        parameters=_flat(what),
        accelerator_bytes=most,
        layers=layers,
        shapes=shapes,
        products=tuple(cost for each in made[0] for cost in each),
        native=tuple(cost for each in made[1] for cost in each),
        placed=made[2],
        copies=copied,
        conversions=converted,
        segments=between,
        fixed=calls,
        steps=steps,
        elsewhere_by=on_cpu_by,
    )


def _lock_pages(ctx: RowContext) -> None:
    """As training by a plan has it."""
    lock_pages(parse_plan(BUILTIN["hetero-fp32"], "hetero-plan"), ctx.device)


def _per_layer(
    ctx: RowContext, by: Instrument, shapes: Sequence[Shape], wanted: Sequence[str]
) -> Tuple[List[Any], List[Any], Any]:
    ctx.progress(1, 6, "parts", "products")
    multiplied = [products(by, shapes, wanted, name) for name in _DEVICES]
    ctx.progress(2, 6, "parts", "torch's own layers")
    native_ones = [native(by, shapes, wanted, name) for name in _DEVICES]
    ctx.progress(3, 6, "parts", "passes over the bus")
    return multiplied, native_ones, placed(by, shapes, wanted)


def _steps(
    ctx: RowContext, what: Subject, wanted: Sequence[str], on_cpu_by: str
) -> Tuple[Tuple[StepCost, ...], Optional[int]]:
    """Whole steps of built-in plans, and what the one all on a GPU takes of its memory. The plan
    that is all on the CPU has the operators that segments there are measured with."""
    plans = {}
    for name in ("cpu", *(f"hetero-{each}" for each in wanted)):
        plan = parse_plan(BUILTIN[name], name)
        plans[name] = dataclasses.replace(plan, elsewhere_by=on_cpu_by)
    other = Stepper(what, parse_plan(BUILTIN["accelerator"], "accelerator"), ctx.device)
    most = other.most_bytes() if other.home.type == "cuda" else None
    taken: Dict[str, List[float]] = {"accelerator": []}
    for name, plan in plans.items():
        try:
            mine = Stepper(what, plan, ctx.device)
        except NotApplicableError as error:
            ctx.log(f"no steps by {name}: {error.what}")
            continue
        taken[name], beside = by_turns((mine, other), ctx.parameters["rounds"])
        taken["accelerator"] += beside
    steps = (StepCost(plan=name, seconds=rounded(seconds)) for name, seconds in taken.items())
    return tuple(steps), most


def _one_plan(ctx: RowContext, what: Subject) -> None:
    """Steps by the row's plan beside all on the accelerator, sample by sample in turn; then what is
    on the CPU by the plan beside torch's own operators."""
    plan = ctx.plan(ctx.parameters["plan"])
    lock_pages(plan, ctx.device)
    mine = Stepper(what, plan, ctx.device)
    other = Stepper(what, parse_plan(BUILTIN["accelerator"], "accelerator"), ctx.device)
    rounds = ctx.parameters["rounds"]
    taken = steadily(ctx, lambda: by_turns((mine, other), rounds), ctx.device)
    ctx.fact("plan", plan_document(plan))
    ctx.fact("placed", mine.converted.facts())
    _metric(ctx, "step", taken[0])
    _metric(ctx, "step.accelerator", taken[1])
    _predicted(ctx)
    if plan.elsewhere == "cpu":
        outside = steadily(ctx, lambda: beside_torch(what, plan, ctx.device, rounds), ctx.device)
        _metric(ctx, "elsewhere.plan", outside[0])
        _metric(ctx, "elsewhere.torch", outside[1])
    before = ctx.parameters["accelerator_step"]
    if before:
        # It is the host that launches these steps, and where others use it, it changes by the hour.
        ctx.metric(
            "speed_since_costs", [before / each for each in taken[1]], unit="1", source="monotonic"
        )
    bound = ctx.parameters["bound"]
    if bound:
        ctx.metric(
            "step_over_bound", [each / bound for each in taken[0]], unit="1", source="monotonic"
        )


def _every_plan(ctx: RowContext, what: Subject) -> None:
    """All plans in turn, the row's own among them. The best is chosen by the first half of the
    rounds, and its samples are those of the second: choosing by a sample flatters it."""
    layers, _ = layers_of(what)
    asked = ctx.parameters["plan"]
    own = None if asked == NO_PLAN else ctx.plan(asked)
    # All by the operators of the plan that they are held against.
    by = "kernels" if own is None else own.elsewhere_by
    plans = list(all_plans(layers, ctx.parameters["granularity"], by))
    if own is not None:
        plans.append(Taken(asked, own))

    def measure() -> None:
        for each in plans:
            each.seconds.clear()
        in_turn(what, plans, ctx.device, ctx.parameters["rounds"], ctx.progress)

    steadily(ctx, measure, ctx.device)
    half = ctx.parameters["rounds"] // 2
    best = min(plans, key=lambda each: sorted(each.seconds[:half])[(half - 1) // 2])
    ctx.side_file(PLANS_FILE).write_text(
        json.dumps([each.document() for each in plans], sort_keys=True) + "\n", encoding="utf-8"
    )
    ctx.fact("plans", len(plans))
    ctx.fact("best", best.code)
    _metric(ctx, "best_step", best.seconds[half:])
    if asked != NO_PLAN:
        _metric(ctx, "step", plans[-1].seconds[half:])
        _predicted(ctx)


def _predicted(ctx: RowContext) -> None:
    if ctx.parameters["predicted"]:
        ctx.metric("predicted_step", ctx.parameters["predicted"], unit="s", source="planner")


def _metric(ctx: RowContext, name: str, seconds: Sequence[float]) -> None:
    ctx.metric(name, seconds, unit="s", source="monotonic")


def _precisions(asked: str, device: torch.device) -> Tuple[str, ...]:
    """Those that were asked for and work on the device. Raises UnknownNameError."""
    names = PRECISIONS if asked == "all" else tuple(map(str.strip, asked.split("+")))
    for name in names:
        if name not in PRECISIONS:
            raise UnknownNameError("precision", name, (*PRECISIONS, "all"))
    return tuple(
        name
        for name in PRECISIONS
        if name == "fp32" or (name in names and not missing(name, device))
    )


def _accelerator(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (stand-in)"


def _shares_memory(device: torch.device) -> bool:
    """Of a CPU that stands in: nothing is shared, since each side has buffers of its own."""
    if device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_properties(device).is_integrated)


def _flat(what: Subject) -> int:
    """Floats of the tensor that all weights are parts of, gaps included."""
    return int(SGD(copy.deepcopy(what.model), 0.0).values.numel())
