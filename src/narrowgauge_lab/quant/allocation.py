"""How many bits each layer gets: the cheapest losses first, until a budget is met.

    tables = calibrate_widths(model, batches, config, (8, 6, 4, 2))
    losses = width_losses(model, tables, evaluate)
    found = search(losses, costs, budget, lambda widths: evaluate(net of mixed(tables, widths)))
    scales = mixed(tables, found.best.widths)

Losses are of one layer at a time and taken to add up. They do not where widths are very narrow:
what one layer bears alone, several do not bear together. So `search` makes an allocation for each
least width and keeps the one whose network is best as a whole; uniform widths are among them.
AutoQKeras (arXiv 2006.10159) searches by training each
candidate; this needs one evaluation for each layer and width.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, Iterable, List, Mapping, Sequence, Tuple

from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.quant.calibration import Batch, QuantConfig, calibrate
from narrowgauge_lab.quant.layers import LayerScales
from narrowgauge_lab.quant.sensitivity import sensitivity

__all__ = [
    "Allocation", "Found", "Table", "allocate", "calibrate_widths", "mixed", "search",
    "width_losses",
]  # fmt: skip

#: Layer -> bits -> loss or cost.
Table = Mapping[str, Mapping[int, float]]


@dataclasses.dataclass(frozen=True)
class Allocation:
    """`widths`: layer -> bits. `cost` is its cost, `loss` the sum of its layers' losses, `steps`
    what was narrowed in turn: (layer, bits before, bits after)."""

    widths: Dict[str, int]
    cost: float
    loss: float
    steps: Tuple[Tuple[str, int, int], ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """`tried`: each allocation with the score of its network, by the least width it may use, in
    rising order and without repetitions; `best`: the one of the largest score, of equals the
    first."""

    best: Allocation
    tried: Tuple[Tuple[Allocation, float], ...]


def search(
    losses: Table, costs: Table, budget: float, judge: Callable[[Mapping[str, int]], float]
) -> Found:
    """`allocate` with all widths, then with those from the second narrowest up, and so on while
    the budget allows it. `judge`: the score of the network of such widths, larger is better.
    Raises what `allocate` raises."""
    _require_tables(losses, costs)
    tried: List[Tuple[Allocation, float]] = []
    for floor in sorted({bits for row in losses.values() for bits in row}):
        kept = [_from(floor, table) for table in (losses, costs)]
        if tried and _least(kept[1]) > budget:
            break
        made = allocate(kept[0], kept[1], budget)
        if all(made.widths != other.widths for other, _ in tried):
            tried.append((made, float(judge(made.widths))))
    best, _ = max(tried, key=lambda each: each[1])
    return Found(best, tuple(tried))


def _from(floor: int, table: Table) -> Dict[str, Dict[int, float]]:
    """The widths that are not below `floor`; of a layer that has none its widest."""
    return {
        name: {bits: each for bits, each in row.items() if bits >= min(floor, max(row))}
        for name, row in table.items()
    }


def _least(costs: Table) -> float:
    return sum(min(row.values()) for row in costs.values())


def allocate(losses: Table, costs: Table, budget: float) -> Allocation:
    """Begin with every layer at its widest; narrow, again and again, the layer that loses least
    for each unit of cost saved, to whichever width that is, until the cost is within `budget`.
    Then widen again what still fits, most loss first.

    Of equals the first layer and the wider width. Raises BadValueError where even the narrowest
    widths cost more, and for tables of different layers or widths.
    """
    _require_tables(losses, costs)
    widths = {name: max(row) for name, row in losses.items()}
    least = _least({name: costs[name] for name in losses})
    # As is: NaN has to fail too.
    if not least <= budget:
        raise BadValueError(
            f"a budget of {budget:g} cannot be met",
            why=f"the narrowest widths of all layers cost {least:g}",
            next_step="give more, or allow narrower widths",
        )
    steps: List[Tuple[str, int, int]] = []
    while _total(costs, widths) > budget:
        name, bits = min(_narrower(costs, widths), key=lambda m: _price(losses, costs, widths, m))
        steps.append((name, widths[name], bits))
        widths[name] = bits
    _widen(losses, costs, widths, budget)
    return Allocation(widths, _total(costs, widths), _total(losses, widths), tuple(steps))


def _require_tables(losses: Table, costs: Table) -> None:
    if not losses:
        raise BadValueError("no layer to allocate bits to")
    for name in (*losses, *costs):
        if set(losses.get(name, ())) != set(costs.get(name, ())) or not losses.get(name):
            raise BadValueError(
                f"losses and costs of {name} are not of the same widths",
                why=f"{sorted(losses.get(name, ()))} and {sorted(costs.get(name, ()))}",
            )


def _narrower(costs: Table, widths: Mapping[str, int]) -> List[Tuple[str, int]]:
    """Every change that saves something. There is one while the budget is not met: the narrowest
    widths meet it."""
    return [
        (name, bits)
        for name, now in widths.items()
        for bits in sorted(costs[name], reverse=True)
        if costs[name][bits] < costs[name][now]
    ]


def _price(
    losses: Table, costs: Table, widths: Mapping[str, int], change: Tuple[str, int]
) -> float:
    name, bits = change
    saved = costs[name][widths[name]] - costs[name][bits]
    return (losses[name][bits] - losses[name][widths[name]]) / saved


def _widen(losses: Table, costs: Table, widths: Dict[str, int], budget: float) -> None:
    """The last step may have saved more than was needed."""
    while True:
        room = budget - _total(costs, widths)
        fitting = [
            (losses[name][now] - losses[name][bits], name, bits)
            for name, now in widths.items()
            for bits in sorted(costs[name])
            if costs[name][bits] - costs[name][now] <= room
            and losses[name][bits] < losses[name][now]
        ]
        if not fitting:
            return
        _, name, bits = max(fitting, key=lambda each: each[0])
        widths[name] = bits


def _total(table: Table, widths: Mapping[str, int]) -> float:
    return sum(table[name][bits] for name, bits in widths.items())


def calibrate_widths(
    model: nn.Module, batches: Sequence[Batch], config: QuantConfig, widths: Iterable[int]
) -> Dict[int, Dict[str, LayerScales]]:
    """The scales of every layer at each of `widths`, weights and activations alike. Raises what
    `calibrate` raises."""
    return {
        bits: calibrate(
            model, batches, dataclasses.replace(config, activation_bits=bits, weight_bits=bits)
        )
        for bits in widths
    }


def width_losses(
    model: nn.Module,
    tables: Mapping[int, Mapping[str, LayerScales]],
    evaluate: Callable[[nn.Module], float],
) -> Dict[str, Dict[int, float]]:
    """What each layer alone loses at each width: layer -> bits -> the float score less the score.
    `evaluate`: larger is better; a likelihood tells small losses apart, an accuracy hardly does."""
    found: Dict[str, Dict[int, float]] = {}
    for bits, scales in tables.items():
        losses = {row.layer: row.loss for row in sensitivity(model, scales, evaluate).rows}
        for name in scales:
            found.setdefault(name, {})[bits] = losses[name]
    return found


def mixed(
    tables: Mapping[int, Mapping[str, LayerScales]], widths: Mapping[str, int]
) -> Dict[str, LayerScales]:
    """The scales of each layer at the width that it got."""
    return {name: tables[bits][name] for name, bits in widths.items()}
