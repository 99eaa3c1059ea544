"""What the other kind of zeros is worth: two of every four weights, which tensor cores skip.

1×1 convolutions of float16 by `SemiStructuredConv2d`, beside the dense one of the same pruned
weight, so that both compute one thing: as a convolution, and as the product of matrices it is.
"""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import SkippedError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.sparse import weights
from narrowgauge_lab.measure import Comparison
from narrowgauge_lab.measure.recording import record_samples

from .looking import Call
from .times import in_turns

__all__ = ["METRIC", "SIZES", "halved"]

METRIC = "times_2to4"
#: (M, N, K): pixels of all images, filters, channels.
SIZES = (
    (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096),
    (4096, 256, 256), (256, 4096, 4096),
)  # fmt: skip
#: What two of float16 may differ by, of the largest result.
_LIMIT = 2e-3


def halved(ctx: RowContext) -> None:
    """Record `times_2to4.MxNxK`, how many times as fast as the faster dense one, and `times_2to4`,
    their medians in the order of SIZES. Raises SkippedError where there is no such product; a wrong
    one makes the row INVALID."""
    if ctx.parameters["precision"] != "fp16":
        raise SkippedError("2:4 weights are measured in float16", next_step="-p precision=fp16")
    generator = torch_compat.generator_for(torch.device("cpu"), ctx.seed)
    facts: List[Dict[str, Any]] = []
    medians: List[float] = []
    source = ""
    for number, (rows, filters, channels) in enumerate(SIZES):
        name = f"{rows}x{filters}x{channels}"
        layer = _layer(filters, channels, generator, ctx.device)
        x = torch.randn(1, channels, rows // 16, 16, generator=generator)
        x = x.to(ctx.device, torch.float16).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            error, kind, pair = _measured(ctx, layer, x)
        facts.append({"size": name, "error": error, "dense": kind})
        if not error <= _LIMIT:
            ctx.invalid(f"2:4 product {name} is off by {error:.2g} of the largest result")
            continue
        record_samples(ctx, f"seconds.{name}", pair.first)
        record_samples(ctx, f"{METRIC}.{name}", pair.first, list(pair.ratios), "1")
        medians.append(statistics.median(pair.ratios))
        source = pair.first.source
        ctx.progress(number + 1, len(SIZES), "sizes")
    ctx.fact("products", facts)
    if len(medians) == len(SIZES):
        ctx.metric(METRIC, medians, unit="1", source=source, index="size")


def _layer(
    filters: int, channels: int, generator: torch.Generator, device: torch.device
) -> nn.Conv2d:
    """A 1×1 convolution, pruned. Raises SkippedError where its product cannot run here."""
    layer = nn.Conv2d(channels, filters, 1, bias=False)
    weight = torch.randn(filters, channels, 1, 1, generator=generator) / channels**0.5
    with torch.no_grad():
        layer.weight.copy_(weights.pruned(weight))
    layer = layer.to(device=device, dtype=torch.float16).eval()
    weights.require(layer, device)
    return layer


def _measured(ctx: RowContext, layer: nn.Conv2d, x: torch.Tensor) -> Tuple[float, str, Comparison]:
    """The error against dense, the faster dense way, and both in turns."""
    halves = weights.SemiStructuredConv2d(layer)
    last = layer.weight.detach().contiguous(memory_format=torch.channels_last)
    flat = last.flatten(1)
    pixels = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    ways: Dict[str, Call] = {
        "convolution": lambda: nn.functional.conv2d(x, last),
        "product": lambda: nn.functional.linear(pixels, flat),
    }
    wanted = nn.functional.conv2d(x.double(), last.double())
    error = float((halves(x).double() - wanted).abs().max() / wanted.abs().max())
    taken = {name: in_turns(ctx, lambda: halves(x), call) for name, call in ways.items()}
    kind = min(taken, key=lambda name: statistics.median(taken[name].second.seconds))
    return error, kind, taken[kind]
