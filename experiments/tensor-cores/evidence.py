"""What a row says beside its speed: that it computes the right thing, and what binds its speed."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Optional, Sequence

import torch
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.context import RowContext

__all__ = [
    "COMPARED",
    "Bound",
    "bound_by",
    "check_loss",
    "check_output",
    "reference_output",
]

#: So many images are computed a second time, strictly. Each image's logits are its own.
COMPARED = 8

#: A row further than this from the strict result computes something else. Rounding of random
#: weights gives 5e-7 (fp32), 5e-3 (fp16, bf16); 8 bits depend on the network.
_LIMITS = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 5e-2, "bf16": 1e-1, "int8": 0.5, "fp8": 0.5}

#: Launches bind where the host is busy queueing for this share of the time, and the device is not.
_HOST_BUSY = 0.9
_DEVICE_IDLE = 0.8


def reference_output(model: nn.Module, images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Logits of the first images, strictly: float32 without TF32 on a GPU, float64 on a CPU.

    `model` and `images` are float32 on the CPU, and stay so. The result is float64 on the CPU.
    """
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    torch_compat.allow_tf32(False)
    try:
        with torch.no_grad():
            strict = model.to(device=device, dtype=dtype)
            output = strict(images[:COMPARED].to(device=device, dtype=dtype))
    finally:
        model.to(device="cpu", dtype=torch.float32)
    return output.double().cpu()


def check_output(
    ctx: RowContext, output: torch.Tensor, reference: torch.Tensor, precision: str
) -> None:
    """Hold logits against the strict ones; a row with others, or with NaN, is INVALID.

    Records `relative_error`: the norm of the difference over the norm of the strict logits.
    """
    finite = torch.isfinite(output)
    if not bool(finite.all()):
        bad = int(finite.numel() - finite.sum())
        ctx.invalid(f"{bad} of {finite.numel()} outputs are not finite")
        return
    strict = reference.double().cpu()
    found = output[: len(strict)].double().cpu()
    error = float((found - strict).norm() / strict.norm())
    ctx.metric("relative_error", error, unit="1", source="strict reference")
    if not error <= _LIMITS[precision]:
        ctx.invalid(
            f"the output is off by {error:.3g} of the strict result; "
            f"rounding to {precision} explains {_LIMITS[precision]:g} at most"
        )


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
