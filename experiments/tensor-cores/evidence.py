"""What a row says beside its speed: that it computes the right thing, and what binds its speed."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Optional, Sequence

import torch
from torch import nn

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure import agreement

__all__ = ["Bound", "bound_by", "check_loss", "reference_output"]

#: Launches bind where the host is busy queueing for this share of the time, and the device is not.
_HOST_BUSY = 0.9
_DEVICE_IDLE = 0.8


def reference_output(model: nn.Module, images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Logits of the first images, strictly: float32 without TF32 on a GPU, float64 on a CPU."""
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    return agreement.reference_output(model, images, device, dtype)


def check_loss(ctx: RowContext, loss: torch.Tensor) -> None:
    """A training row that ends with a loss that is no number measured no training."""
    ctx.metric("loss", float(loss), unit="1", source="computed")
    if not bool(torch.isfinite(loss)):
        ctx.invalid(f"the loss is not finite: {float(loss)}")


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a row's latency is due to: `launches`, `device`, or `undecided`; and the proof."""

    by: str
    proof: str


def bound_by(
    latency: Sequence[float], enqueue: Sequence[float], gpu_busy: Optional[Sequence[float]]
) -> Bound:
    """Judge samples in seconds per call: device time, host time to queue it, and device time with
    the launches hidden (None: not measured).

    Launches bind where the host queues all the time and the device could be done clearly sooner.
    """
    whole, queueing = statistics.median(latency), statistics.median(enqueue)
    numbers = f"latency {_ms(whole)}, queueing {_ms(queueing)}"
    if queueing < _HOST_BUSY * whole:
        return Bound("device", f"{numbers}: the host is done sooner than the device")
    if gpu_busy is None:
        return Bound("undecided", f"{numbers}; the device's own time was not measured")
    busy = statistics.median(gpu_busy)
    numbers += f", the device alone {_ms(busy)}"
    if busy <= _DEVICE_IDLE * whole:
        return Bound("launches", f"{numbers}: it waits for launches {1 - busy / whole:.0%} of it")
    return Bound("device", f"{numbers}: both are busy, and hiding launches gains little")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
