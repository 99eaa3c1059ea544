"""Training by a placement plan: what the plan makes of a model, and what a record says of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.placement import (
    NO_PLAN,
    PASSES,
    LayerPlacement,
    PlacementPlan,
    plan_document,
)
from narrowgauge_lab import precision, tf32_flags, torch_compat
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.hetero.convert import convert, home_of
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.hetero.locking import lock_pages
from narrowgauge_lab.layers.hetero.overflow import OverflowWatch, TensorStatistics
from narrowgauge_lab.layers.passes.primitives import float32_math
from narrowgauge_lab.measure import probe
from narrowgauge_lab.stepping import Placing

__all__ = ["OVERFLOW_FILE", "Placed", "asked_plan", "home"]

#: One line per epoch of a plan whose numbers have a short range: what each pass's operands lost.
OVERFLOW_FILE = "overflow.jsonl"
_CPU = torch.device("cpu")
_SHORT = ("fp16", "int8", "fp8")
#: A device's type and what a product there computes in.
_Ran = Tuple[str, str]


def asked_plan(ctx: RowContext) -> Optional[PlacementPlan]:
    """The plan of the row's parameter `plan`, or None. Raises UsageError where another parameter
    says what the plan says, or what it rules out."""
    value = ctx.parameters["plan"]
    if value == NO_PLAN:
        return None
    chosen = ctx.parameters["precision"]
    if chosen != "fp32":
        raise UsageError(
            f"-p precision={chosen} and -p plan={value} do not go together",
            why="the plan says what each pass computes in; all else is float32",
            next_step=f"leave precision out: -p plan=hetero-{chosen}, or a plan's file",
        )
    if ctx.parameters["nproc"] != 1:
        raise UsageError(
            f"-p nproc={ctx.parameters['nproc']} and -p plan={value} do not go together",
            why="a plan divides a step between one CPU and one accelerator",
            next_step="-p nproc=1, or no plan",
        )
    return ctx.plan(value)


def home(ctx: RowContext, plan: Optional[PlacementPlan]) -> torch.device:
    """Where model, data, loss and optimiser live."""
    return ctx.device if plan is None else home_of(plan, ctx.device)


class Placed:
    """A model whose layers are placed, for one row. Raises what `convert` raises."""

    def __init__(self, ctx: RowContext, model: nn.Module, plan: PlacementPlan) -> None:
        self._ctx, self._model, self.plan = ctx, model, plan
        self.mode = precision.enter("fp32", home_of(plan, ctx.device))
        lock_pages(plan, ctx.device)
        self.converted = convert(model, plan, ctx.device)
        # What native layers compute in is a matter of flags; placed ones set their own.
        tf32_flags.allow_tf32(self.converted.native_precision == "tf32")
        captured = self.converted.capturable
        #: Steps that may be captured share one draw; others draw for each pass.
        self._announces = captured and "int8" in plan.precisions()
        self.placing = Placing(deferred_weight_grads, _scales_loss(plan), captured, self._begin)
        self.short_ranged = _short_ranged(plan)
        self._said: Dict[str, Any] = {}

    def _begin(self) -> None:
        """The next step begins."""
        if self._announces:
            self.converted.bus.draws.begin()

    def record(self, differentiate: Callable[[], None], images: int, values: torch.Tensor) -> None:
        """Record the plan and what it became, and show it `values`, the one tensor that all weights
        are parts of. `differentiate`: a step of so many images that changes nothing."""
        plan, fact = self.plan, self._ctx.fact
        fact("plan", plan_document(plan))
        fact("plan_table", _table(self.converted.placements))
        fact("loss_scaling", "dynamic" if self.placing.scales_loss else "none")
        ledger = Ledger("bytes", self._ctx.device)
        self._place(values, ledger)
        differentiate()
        up, down = ledger.bytes_moved()
        fact("bytes_per_step", {"to_device": up, "from_device": down, "images": images})
        # Anew, without accounts: those of every step would cost every step.
        self._place(values, None)
        self.record_ran()

    def _place(self, values: torch.Tensor, ledger: Optional[Ledger]) -> None:
        self.converted.close()
        self.converted = convert(self._model, self.plan, self._ctx.device, ledger)
        self.converted.watch(values)

    def record_ran(self) -> None:
        """How it ran by now: what the conversion left alone, how copies are made, and what did not
        go as asked."""
        facts = self.converted.facts()
        if facts != self._said:
            self._said = facts
            self._ctx.fact("placed", facts)

    def require_precisions(self, seen: Sequence[probe.Observation]) -> None:
        """Record what ran; the row is invalid where that is not what the plan says.

        Before torch 2.0 products inside of a backward pass are seen in part, so there a precision
        of gradients may be missing. Products inside of TensorRT are not seen at all.
        """
        forms = self._tf32()
        ran: Set[_Ran] = set()
        for each in seen:
            device = each.device.partition(":")[0]
            ran.add((device, probe.precision_ran([each], forms.get(device, {}))))
        wanted, certain = self._wanted()
        allowed = wanted | {(self.mode.device.type, "fp32")}
        merged = {device for device, name in wanted if name == "tf32"}
        merged &= {device for device, name in wanted if name == "fp32"}
        ran, certain, allowed = (_merge(each, merged) for each in (ran, certain, allowed))
        names = "+".join(sorted({name for _, name in ran})) or "none"
        self._ctx.fact("probe", [dataclasses.asdict(each) for each in seen])
        self._ctx.fact("precision_ran", names)
        self._ctx.fact("precision_by_device", _by_device(ran))
        self._ctx.fact("tf32_measured", forms)
        if not (certain <= ran <= allowed):
            self._ctx.invalid(
                f"the plan '{self.plan.name}' asks for {_text(wanted)}, and what ran is "
                f"{_text(ran)}"
            )

    def watch(self, differentiate: Callable[[], None]) -> OverflowWatch:
        """What each pass of a step sees, with no trace in torch's generators."""
        aside = self.converted.bus.draws.aside()
        with torch.random.fork_rng(devices=[]), aside, self.converted.watch_overflow() as watch:
            differentiate()
        return watch

    def keep(self, epoch: int, watch: OverflowWatch) -> float:
        """Add an epoch to OVERFLOW_FILE. The largest share, in percent, of a gradient's values not
        0 that some pass took for 0."""
        seen = watch.statistics()
        line = {"epoch": epoch, "passes": [dataclasses.asdict(each) for each in seen]}
        with self._ctx.side_file(OVERFLOW_FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        shares = [each.underflow or 0.0 for each in seen if each.role == "grad_output"]
        return 100.0 * max(shares, default=0.0)

    def forget_after(self, epoch: int) -> None:
        """Leave no epoch in OVERFLOW_FILE that comes after `epoch`: the row goes on from there."""
        path = self._ctx.folder / OVERFLOW_FILE
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line and json.loads(line)["epoch"] <= epoch]
            self._ctx.side_file(OVERFLOW_FILE).write_text("".join(f"{line}\n" for line in kept))

    def name_overflow(self, differentiate: Callable[[], None]) -> str:
        """Which layer and pass of a step first gave NaN or infinity, in words; the fact `overflow`
        has the figures."""
        first = self.watch(differentiate).first()
        if first is None:
            self._ctx.fact("overflow", None)
            return "in no product of a placed layer"
        self._ctx.fact("overflow", dataclasses.asdict(first))
        return _overflow_text(first)

    def _wanted(self) -> Tuple[Set[_Ran], Set[_Ran]]:
        """What the plan says, for all its layers' passes, and of that what must have been seen."""
        products = self.converted.facts()["products"]
        wanted, certain = set(), set()
        for layer, placement in self.converted.placements:
            for name in PASSES:
                placed = placement.of(name)
                device = "cpu" if placed.device == "cpu" else self._ctx.device.type
                form = placed.precision
                if products.get(layer, {}).get(name, "").endswith("float64"):
                    form = "fp64"  # exact products of int8, where there is no int8 product
                elif placed.backend == "faithful" and device == "cpu":
                    form = "fp32"  # of rounded values: a stand-in may have no fp16 product
                wanted.add((device, form))
                seen = name == "forward" or torch_compat.has_dispatch_mode()
                if seen and placed.backend != "tensorrt":
                    certain.add((device, form))
        return wanted, certain

    def _tf32(self) -> Dict[str, Dict[str, bool]]:
        """By device, whether float32 products use TF32 as the plan's passes set it there."""
        forms = {}
        for device in {
            "cpu": torch.device("cpu"),
            self._ctx.device.type: self._ctx.device,
        }.values():
            asked = any(name == "tf32" and at == device.type for at, name in self._wanted()[0])
            setting: Any = float32_math(tf32=asked, device=device)
            if device.type == "cpu":
                setting = contextlib.nullcontext()
            with setting:
                forms[device.type] = probe.tf32_by_arithmetic(device)
        return forms


def _scales_loss(plan: PlacementPlan) -> bool:
    """float16 has a range too short for gradients, in products and on the wire. The backend
    `faithful` does without, as the original did."""
    gradients = [each.of(name) for each in _all(plan) for name in PASSES[1:]]
    wires = {plan.transfers.wire[name] for name in ("grad_output", "grad_input")}
    ours = [placed for placed in gradients if placed.backend != "faithful"]
    travels = any(placed.device == "accelerator" for placed in ours) and plan.elsewhere == "cpu"
    return any(placed.precision == "fp16" for placed in ours) or (travels and "fp16" in wires)


def _short_ranged(plan: PlacementPlan) -> bool:
    wires = plan.transfers.wire.values() if plan.elsewhere == "cpu" else ()
    return any(name in _SHORT for name in (*plan.precisions(), *wires))


def _all(plan: PlacementPlan) -> List[LayerPlacement]:
    return [plan.default, *(placement for _, placement in plan.layers)]


def _table(placements: Sequence[Tuple[str, LayerPlacement]]) -> List[str]:
    """A line per layer: its name, and device, precision and backend of its passes."""
    rows = [("layer", *PASSES)]
    for layer, placement in placements:
        passes = (placement.of(name) for name in PASSES)
        rows.append((layer, *(f"{p.device} {p.precision} {p.backend}" for p in passes)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _merge(ran: Set[_Ran], devices: Set[str]) -> Set[_Ran]:
    """Where a plan has both on one device, products of float32 operands are either."""
    return {(d, "fp32|tf32" if d in devices and n in ("fp32", "tf32") else n) for d, n in ran}


def _by_device(ran: Set[_Ran]) -> Dict[str, List[str]]:
    devices = sorted({device for device, _ in ran})
    return {device: sorted(name for at, name in ran if at == device) for device in devices}


def _text(ran: Set[_Ran]) -> str:
    parts = (f"{'+'.join(names)} on {device}" for device, names in _by_device(ran).items())
    return ", ".join(parts) or "nothing"


def _overflow_text(first: TensorStatistics) -> str:
    kind = "NaN" if first.nan else "infinity"
    what = first.role.replace("_", " ")
    if first.role in ("input", "grad_output"):
        return f"layer '{first.layer}' got {kind} as the {what} of its pass {first.pass_}"
    return f"layer '{first.layer}' gave {kind} first, in its pass {first.pass_}"
