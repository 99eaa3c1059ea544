"""`narrowgauge placement show` and `list`: placement plans as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowgauge.show_tables import plain_table
from narrowgauge.view import widen
from narrowgauge_contract.placement import (
    PASSES,
    TENSORS,
    LayerPlacement,
    PassPlacement,
    PlacementPlan,
    Transfers,
)

__all__ = ["print_plan", "print_plans"]


def print_plan(plan: PlacementPlan, value: str, console: Console) -> None:
    """One plan: where each pass runs, and how tensors get there. `value`: what a row calls it."""
    widen(console)
    told = "built in" if value == plan.name else f"rows call it {value}"
    console.print(Text.assemble((plan.name, "bold"), f"   {told}"))
    console.print(
        f"elsewhere: {plan.elsewhere} (batch normalisation, activations, pooling, loss, weights,"
        " optimiser)"
    )
    if plan.elsewhere_by == "kernels":
        console.print("elsewhere_by: kernels (batch normalisation; the others are torch's)")
    if plan.convolutions_only:
        console.print("convolutions_only: linear layers stay elsewhere, whole")
    if plan.stride_bug:
        console.print("stride_bug: the original's wrong weight gradient at stride 2 is repeated")
    console.print(_passes(plan))
    if plan.layers:
        console.print("of the patterns that match a layer's name, the last one counts")
    console.print(_transfers(plan))


def print_plans(plans: Iterable[PlacementPlan], console: Console) -> None:
    """A line per plan."""
    widen(console)
    table = plain_table("", "plan", "elsewhere", "passes", "transfers", "on the wire")
    table.columns[-1].no_wrap = False
    for plan in plans:
        moved = (plan.transfers.policy, _wire(plan.transfers))
        cells = moved if _travels(plan) else ("none", "")
        table.add_row(plan.name, plan.elsewhere, _summary(plan), *cells)
    console.print(table)
    console.print("\na file of your own: narrowgauge placement show NAME --toml > my.toml")


def _passes(plan: PlacementPlan) -> Table:
    table = plain_table("Passes", "layers", "pass", "device", "precision", "backend")
    for pattern, placement in (("every layer", plan.default), *plan.layers):
        for number, (name, placed) in enumerate(_lines(placement)):
            # A pattern may hold brackets, which a console would take for its own.
            shown = Text(pattern if number == 0 else "")
            table.add_row(shown, name, placed.device, placed.precision, placed.backend)
    return table


def _lines(placement: LayerPlacement) -> Iterator[tuple[str, PassPlacement]]:
    """(pass, where); a single line where all three are alike."""
    if placement.forward == placement.input_grad == placement.weight_grad:
        yield "all", placement.forward
        return
    for name in PASSES:
        yield name, placement.of(name)


def _transfers(plan: PlacementPlan) -> Table:
    table = plain_table("Transfers", "", "", headers=False)
    if not _travels(plan):
        table.add_row("none", f"all is on one device: {plan.elsewhere}")
        return table
    moved = plan.transfers
    table.add_row("policy", moved.policy)
    table.add_row("inputs", f"{_inputs(moved)} between forward and backward")
    table.add_row("weights", "sent when changed" if moved.weights == "dirty" else "sent each call")
    table.add_row("pieces", str(moved.pieces) if moved.pieces else "as the layer chooses")
    for name in TENSORS:
        table.add_row(f"{name} on the wire", moved.wire[name])
    return table


def _travels(plan: PlacementPlan) -> bool:
    return any(placed.device != plan.elsewhere for placed in plan.passes())


def _inputs(moved: Transfers) -> str:
    return "stay there" if moved.resident else "sent again"


def _wire(moved: Transfers) -> str:
    """One word where all tensors travel alike."""
    kinds = dict.fromkeys(moved.wire.values())
    if len(kinds) == 1:
        return next(iter(kinds))
    named = {kind: [name for name in TENSORS if moved.wire[name] == kind] for kind in kinds}
    return "; ".join(f"{kind} {', '.join(names)}" for kind, names in named.items())


def _summary(plan: PlacementPlan) -> str:
    placed = dict.fromkeys(f"{p.device} {p.precision} {p.backend}" for p in plan.passes())
    return ", ".join(placed)
