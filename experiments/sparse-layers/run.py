"""One row of `sparse-layers`: layers by a convolution that skips zeros, checked, then timed beside
dense ones on the same maps; the sweep that finds from how many zeros on it is faster; or what zeros
in weights are worth to tensor cores."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_lab import precision as precisions
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.algorithms import best_algorithms
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.networks.layer_shapes import LayerShape

from .correctness import check
from .crossover import sweep
from .maps import Layer, Library, layer_of, layers_named
from .ours import DTYPES, Ours, ours_of
from .peers import PEERS, Found, peers_of, problem_of
from .selecting import selected
from .table import write_csv, write_json
from .times import DENSE, SELECTED, Times, measure_layer, record_layer, record_together
from .two_to_four import halved

#: By the value of the parameter `peers`.
_ASKED: Dict[str, Tuple[str, ...]] = {
    "none": (), "dense": (*DENSE, "own_dense"), "all": (*PEERS, SELECTED),
}  # fmt: skip
#: How long the layer that chooses is calibrated at each share of zeros, at most.
_CALIBRATE_S = 0.5


def run(ctx: RowContext) -> None:
    """Check and measure as `ctx.parameters` say. A precision or kernel that the device has not is
    skipped; a wrong result makes the row INVALID."""
    parameters = ctx.parameters
    if parameters["threads"]:
        # First of all: torch 1.8 crashes where a convolution ran with another number before.
        torch.set_num_threads(parameters["threads"])
    if parameters["measure"] == "weights":
        halved(ctx)
        return
    _require_precision(parameters["precision"], ctx.device)
    shapes = layers_named(parameters["shapes"])
    library = Library(ctx.files, ctx.seed - ctx.repeat)
    single = "fp32" if DTYPES[parameters["precision"]] == torch.float16 else parameters["precision"]
    precisions.enter(single, ctx.device)
    with torch.no_grad(), best_algorithms(ctx.device):
        if parameters["measure"] == "crossover":
            sweep(ctx, shapes, library)
        else:
            _layers(ctx, shapes, library)


def _require_precision(precision: str, device: torch.device) -> None:
    if device.type != "cuda" and precision != "fp32":
        raise SkippedError(
            f"there is no sparse convolution in {precision} on a CPU",
            why="tensor cores and float16 are the GPU's",
            next_step="-p precision=fp32",
        )


def _layers(ctx: RowContext, shapes: List[LayerShape], library: Library) -> None:
    facts: List[Dict[str, Any]] = []
    measured: Dict[LayerShape, Times] = {}
    different = list(dict.fromkeys(shapes))
    for number, shape in enumerate(different):
        times = _layer(ctx, shape, library, facts)
        if times is not None:
            measured[shape] = times
        ctx.progress(number + 1, len(different), "layers")
    ctx.fact("layers", facts)
    ctx.fact("maps", sorted({fact["source"] for fact in facts}))
    ctx.fact("zeros", sum(fact["zeros"] for fact in facts) / len(facts))
    # A layer that a network has more than once is measured once, and counts as often.
    record_together(ctx, [measured[shape] for shape in shapes if shape in measured])
    if measured:
        write_csv(ctx.side_file("layers.csv"), list(measured.values()))
        write_json(ctx.side_file("layers.json"), list(measured.values()), facts)


def _layer(
    ctx: RowContext, shape: LayerShape, library: Library, facts: List[Dict[str, Any]]
) -> Optional[Times]:
    """The times of a layer, recorded; None where something computed it wrongly."""
    parameters = ctx.parameters
    batch, precision = parameters["batch"], parameters["precision"]
    zeros = None if parameters["zeros"] < 0 else parameters["zeros"]
    layer = layer_of(
        shape, batch, parameters["maps"], library=library, seed=ctx.seed,
        first=ctx.repeat * batch, zeros=zeros,
    )  # fmt: skip
    ours = ours_of(layer, ctx.device, precision, parameters["granularity"], parameters["tune_s"])
    found = _peers(ctx, layer, precision)
    checked = check(ctx, layer, precision, ours, found.peers)
    found = dataclasses.replace(
        found, peers=checked.peers, missing={**found.missing, **checked.dropped}
    )
    about = _about(layer, ours, found)
    about.update(error=checked.error, errors=checked.errors)
    facts.append(about)
    if not checked.right:
        return None
    times: Times = steadily(
        ctx, lambda: measure_layer(ctx, layer, ours, checked.peers), ctx.device,
        prefix=f"{shape.name}_",
    )  # fmt: skip
    record_layer(ctx, times)
    return times


def _peers(ctx: RowContext, layer: Layer, precision: str) -> Found:
    parameters = ctx.parameters
    asked = _ASKED[parameters["peers"]]
    problem = problem_of(layer, ctx.device, precision)
    found = peers_of(
        problem, asked, parameters["plans"], parameters["plan_s"], parameters["tune_s"]
    )
    if SELECTED not in asked:
        return found
    try:
        choosing, lacking = selected(problem, min(parameters["limit_s"], _CALIBRATE_S))
    except NotApplicableError as error:
        choosing, lacking = (), {SELECTED: f"{error.what}: {error.why}"}
    return Found((*found.peers, *choosing), {**found.missing, **lacking}, found.engines)


def _about(layer: Layer, ours: Ours, found: Found) -> Dict[str, Any]:
    return {
        **layer.to_fact(),
        "ours": ours.about,
        "peers": {peer.name: peer.about for peer in found.peers},
        "peers_missing": found.missing,
        "engines": list(found.engines),
    }
