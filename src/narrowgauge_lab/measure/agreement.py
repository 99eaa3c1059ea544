"""Whether what runs computes the right thing: logits held against those of the same weights,
computed strictly."""

from __future__ import annotations

import contextlib
from typing import Iterator, Mapping

import torch
from torch import nn

from narrowgauge_lab import tf32_flags
from narrowgauge_lab.context import RowContext

__all__ = ["COMPARED", "LIMITS", "check_output", "reference_output"]

#: So many images are computed a second time, strictly. Each image's logits are its own.
COMPARED = 8

#: A row further than this from the strict result computes something else. Rounding of random
#: weights gives 5e-7 (fp32), 5e-3 (fp16, bf16); 8 bits depend on the network.
LIMITS = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 5e-2, "bf16": 1e-1, "int8": 0.5, "fp8": 0.5}


def reference_output(
    model: nn.Module,
    images: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Logits of the first images, computed in `dtype` (TF32 off) on `device`.

    `model` and `images` are float32 on the CPU, and stay so. The result is float64 on the CPU.
    """
    tf32_flags.allow_tf32(False)
    with _moved(model, device, dtype), torch.no_grad():
        output = model(images[:COMPARED].to(device).to(dtype))
    return output.double().cpu()


@contextlib.contextmanager
def _moved(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """The network's tensors are others inside, and the same ones again behind it. They change their
    dtype on the device: of a large network that takes a second on a CPU, and as much memory."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            there = tensor.data.to(device)
            tensor.data = there.to(dtype) if there.is_floating_point() else there
        yield
    finally:
        for tensor, data in zip(tensors, before):
            tensor.data = data


def check_output(
    ctx: RowContext,
    output: torch.Tensor,
    reference: torch.Tensor,
    precision: str,
    source: str = "strict reference",
    limits: Mapping[str, float] = LIMITS,
) -> None:
    """Hold logits against the strict ones; a row with others, or with NaN, is INVALID.

    Records `relative_error`, the norm of the difference over the norm of the strict logits, and
    `max_error`, the largest difference of a logit. NaN and infinity are counted, not compared: a
    maximum over them can say zero.
    """
    finite = torch.isfinite(output)
    if not bool(finite.all()):
        bad = int(finite.numel() - finite.sum())
        ctx.fact("outputs_not_finite", bad)
        ctx.invalid(f"{bad} of {finite.numel()} outputs are not finite")
        return
    strict = reference.double().cpu()
    difference = output[: len(strict)].double().cpu() - strict
    error = float(difference.norm() / strict.norm())
    ctx.metric("relative_error", error, unit="1", source=source)
    ctx.metric("max_error", float(difference.abs().max()), unit="1", source=source)
    if not error <= limits[precision]:
        ctx.invalid(
            f"the output is off by {error:.3g} of the strict result; "
            f"rounding to {precision} explains {limits[precision]:g} at most"
        )
