"""One row of `sparse-kernels`: a generated convolution's source, or the search for its tile."""

from __future__ import annotations

import json
import math
from typing import Any, Dict, List, Sequence, Tuple

from narrowgauge_contract.errors import NotApplicableError, UsageError
from narrowgauge_kernels.sparse.compiling import cache_directory
from narrowgauge_kernels.sparse.generate import generate
from narrowgauge_kernels.sparse.geometry import derive
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant
from narrowgauge_kernels.sparse.tiles import NETWORKS, PUBLISHED, default_tile, network_shapes
from narrowgauge_kernels.sparse.tuning import Trial, best_tile, device_identity, tune
from narrowgauge_lab.context import RowContext

_AUTO = "auto"


def run(ctx: RowContext) -> None:
    """Generate or tune, as the row says. Raises UsageError and SparseArgumentError for what cannot
    be generated, NotApplicableError where tuning has no GPU."""
    variant = _variant(ctx.parameters)
    ctx.fact("variant", variant.text())
    if ctx.parameters["action"] == "generate":
        _generate(ctx, variant)
    else:
        _tune(ctx, variant)


def _generate(ctx: RowContext, variant: Variant) -> None:
    shape = Shape.parse(ctx.parameters["shape"])
    arch, tile = _arch_and_tile(ctx, shape, variant)
    source = generate(shape, tile, variant, arch)
    geometry = derive(shape, tile, variant, arch)
    lines = source.count("\n") + 1
    ctx.fact("shape", shape.text())
    ctx.fact("tile", tile.text())
    ctx.fact("arch", arch)
    ctx.fact("blocks", geometry.cells * geometry.slices)
    ctx.fact("threads", geometry.threads)
    ctx.fact("shared_bytes", geometry.shared_bytes)
    ctx.metric("source_lines", lines, unit="1", source="the generated text")
    ctx.side_file("source.cu").write_text(source, encoding="utf-8")


def _arch_and_tile(ctx: RowContext, shape: Shape, variant: Variant) -> Tuple[str, Tile]:
    """As the parameters say; what they leave open, as the GPU here has it."""
    arch, text = ctx.parameters["arch"], ctx.parameters["tile"]
    if text != _AUTO and arch != _AUTO:
        return arch, Tile.parse(text)
    if arch != _AUTO:
        return arch, default_tile(shape, variant, arch)
    if ctx.device.type != "cuda":
        raise UsageError(
            "no compute capability to generate for",
            why="none was named, and this row runs on a CPU",
            next_step="name one: arch=9.0 (narrowgauge kernels generate SHAPE --arch 9.0)",
        )
    found = device_identity(ctx.device)[1]
    tile = best_tile(shape, variant, ctx.device) if text == _AUTO else Tile.parse(text)
    return found, tile


def _tune(ctx: RowContext, variant: Variant) -> None:
    if ctx.device.type != "cuda":
        raise NotApplicableError(
            "tiles are tuned on a GPU, and this row runs on a CPU",
            next_step="a host with an NVIDIA GPU",
        )
    text = ctx.parameters["shape"]
    shapes: Tuple[Shape, ...] = (Shape.parse(text),) if text not in NETWORKS else ()
    shapes = shapes or network_shapes(text, ctx.parameters["batch"])
    lines, trials, times, gains = [], {}, [], []
    for number, shape in enumerate(shapes):
        found = tune(shape, variant, ctx.device, ctx.parameters["seconds"])
        best = found.trials[0]
        name, tried = best.tile.text(), f"{len(found.trials)} tried, {found.untried} not"
        lines.append(f"{shape.text():28} {name:22} {best.microseconds:9.2f} µs  {tried}")
        trials[shape.text()] = [
            {"tile": trial.tile.text(), "microseconds": trial.microseconds}
            for trial in found.trials
        ]
        times.append(best.microseconds)
        gains += _over_published(shape, found.trials)
        ctx.progress(number + 1, len(shapes), "shapes")
    ctx.fact("cache", str(cache_directory()))
    ctx.fact("tiles", {name: tried[0]["tile"] for name, tried in trials.items()})
    ctx.metric("microseconds", sum(times), unit="us", source="replays of a CUDA graph")
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        ctx.metric("over_published", mean, unit="1", source="replays of a CUDA graph")
    ctx.side_file("tune.txt").write_text(
        f"{variant.text()}\n" + "\n".join(lines) + f"\nstored in {cache_directory()}\n",
        encoding="utf-8",
    )
    ctx.side_file("tune.json").write_text(json.dumps(trials, sort_keys=True) + "\n", "utf-8")


def _over_published(shape: Shape, trials: Sequence[Trial]) -> List[float]:
    """Of the shape, how many times as fast its fastest tile is as the fastest published one; empty
    where none of those was tried."""
    known = PUBLISHED.get((shape.channels, shape.height, shape.width, shape.filters), ())
    theirs = [
        trial.microseconds
        for trial in trials
        if (trial.tile.rows, trial.tile.columns, trial.tile.channels) in known
    ]
    return [min(theirs) / trials[0].microseconds] if theirs else []


def _variant(parameters: Dict[str, Any]) -> Variant:
    return Variant(
        parameters["precision"],
        parameters["accumulation"],
        parameters["bias"],
        parameters["relu_input"],
        parameters["relu_output"],
        parameters["granularity"],
        parameters["layout"],
        parameters["path"],
    )
