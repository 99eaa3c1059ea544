"""Why a step takes what it takes: its bytes over the bus, and its products over the best product,
both as measured in this row."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.ceilings import ceiling
from narrowgauge_lab.measure.cost import Cost, peak_memory
from narrowgauge_lab.measure.roofline import ceiling_of_precision

from .setups import Training

__all__ = ["record_bytes", "record_memory", "record_reason"]

#: Forward pass, input gradient, weight gradient. (Of the first layer the second one is not taken.)
_PASSES = 3
#: Seconds that a ceiling is measured for at most.
_CEILING_S = 0.25
_DIRECTIONS = (("to_device", "h2d"), ("from_device", "d2h"))


def record_bytes(ctx: RowContext, training: Training) -> Tuple[int, int]:
    """Record `bytes_to_device` and `bytes_from_device` of a step, by our own count, and
    `bytes_moved`, both together."""
    up = down = 0
    if training.placed is not None:
        converted = training.placed.converted
        converted.weights_changed()
        converted.ledger.mode = "bytes"
        try:
            training.differentiate()
            training.finish()
            up, down = converted.ledger.bytes_moved()
        finally:
            converted.ledger.mode = "off"
            converted.ledger.clear()
    both = (("bytes_to_device", up), ("bytes_from_device", down), ("bytes_moved", up + down))
    for name, moved in both:
        ctx.metric(name, moved, unit="B", source="ledger, as queued")
    return up, down


def record_memory(ctx: RowContext, training: Training) -> None:
    """Record the most that a step holds on the GPU; nothing where there is none. Launch by launch:
    what a graph holds while it is replayed, torch does not count."""
    if training.device.type == "cuda":
        held = peak_memory(training.device, training.unreplayed)
        ctx.metric("peak_memory", held, unit="B", source="torch")


def record_reason(
    ctx: RowContext, cost: Cost, moved: Tuple[int, int], batch: int, precision: str
) -> None:
    """Record `copy_seconds`, what the busier direction of the bus would take for the step's bytes,
    and `product_seconds`, what its products would at the rate of the best product here; the fact
    `reason` says both in words. `…_missing` says why one is not there.

    Neither can be beaten by any overlap of the one with the other.
    """
    device, limit = ctx.device, min(_CEILING_S, ctx.parameters["limit_s"])
    words = []
    macs = _PASSES * cost.macs / cost.batch * batch
    ctx.fact("macs_per_step", macs)
    try:
        best = ceiling_of_precision(precision, device, limit)
    except NotApplicableError as error:
        ctx.fact("product_seconds_missing", f"{error.what}: {error.why}")
    else:
        ctx.fact("ceiling", best.to_fact())
        source = f"MACs over {best.library}"
        ctx.metric("product_seconds", macs / best.per_second, unit="s", source=source)
        words.append(
            f"{2e-9 * macs:.4g} GFLOP of products are {1e3 * macs / best.per_second:.3g} ms at the "
            f"{2e-12 * best.per_second:.3g} TFLOP/s of the best {best.name} product here"
        )
    if device.type != "cuda":
        ctx.fact("copy_seconds_missing", "the CPU stands in: its copies cross no bus")
    elif not any(moved):
        # The bus is not measured: that takes longer than most of the row, for a quotient of 0.
        ctx.metric("copy_seconds", 0.0, unit="s", source="nothing crosses the bus")
    else:
        seconds, said = _copying(device, moved, limit)
        ctx.fact("bus", said)
        ctx.metric("copy_seconds", seconds, unit="s", source="bytes over the bus as measured")
        words.append(
            f"{moved[0] / 1e9:.4g} GB up and {moved[1] / 1e9:.4g} GB down are "
            f"{1e3 * seconds:.3g} ms at {said['h2d'] / 1e9:.3g} and {said['d2h'] / 1e9:.3g} GB/s"
        )
    ctx.fact("reason", "; ".join(words))


def _copying(
    device: torch.device, moved: Tuple[int, int], limit: float
) -> Tuple[float, Dict[str, Any]]:
    rates = {name: ceiling(name, device, limit).per_second for _, name in _DIRECTIONS}
    taken = [size / rates[name] for size, (_, name) in zip(moved, _DIRECTIONS)]
    return max(taken), rates
