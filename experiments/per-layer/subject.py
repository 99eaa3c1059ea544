"""One layer that trains as the original's script has it: random images, a random target that stays,
the sum of squared errors, and RMSprop."""

from __future__ import annotations

import itertools
from typing import Any, ContextManager, Iterator, List, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.placement import PlacementPlan
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.hetero.convert import Converted, convert, home_of
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.hetero.locking import lock_pages

from .shapes import Shape

__all__ = ["LAYER", "OneLayer", "Training"]

#: What the layer is called in plans and in accounts.
LAYER = "conv"
#: Batches made beforehand, of which each step takes the next: making one takes longer than a step.
_BATCHES = 8
_RATE = 1e-3


class OneLayer(nn.Module):
    """A convolution that has a name."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.conv(images)
        return result


class Training:
    """Steps of one layer by a plan. `home`: where all but its products lives.

    The gradient by the images is computed too, as in the middle of a network. `loss_scale` divides
    out again before the update. Raises what `convert` raises.
    """

    def __init__(self, ctx: RowContext, shape: Shape, batch: int, plan: PlacementPlan) -> None:
        self._ctx, self.plan, self.shape = ctx, plan, shape
        self.device, self.home = ctx.device, home_of(plan, ctx.device)
        ctx.fact("pages_locked", lock_pages(plan, ctx.device))
        channels, height, width = shape.image
        conv = nn.Conv2d(channels, shape.filters, 3, shape.stride, 1, bias=False)
        self.model = OneLayer(conv).to(self.home)
        self.batches: List[torch.Tensor] = [
            torch.rand(batch, channels, height, width).to(self.home).requires_grad_()
            for _ in range(_BATCHES)
        ]
        with torch.no_grad():
            self.target = torch.rand_like(self.model(self.batches[0]))
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=_RATE)
        self.ledger = Ledger("off", ctx.device)
        self.converted = self._convert()
        self._native = bool(self.converted.native)
        self.loss_scale = 1.0
        self._next: Iterator[torch.Tensor] = itertools.cycle(self.batches)

    @property
    def weight(self) -> nn.Parameter:
        return self.model.conv.weight

    def account(self, mode: str) -> Ledger:
        """Keep accounts from now on; "off" ends it. Layers that are torch's own are placed for the
        time being: nothing else can look into them."""
        if self._native:
            self.ledger = Ledger(mode, self.device)
            self.converted = self._convert()
        self.ledger.mode = mode
        self.ledger.clear()
        return self.ledger

    def _convert(self) -> Converted:
        converted = convert(self.model, self.plan, self.device, self.ledger)
        tf32_flags.allow_tf32(converted.native_precision == "tf32")
        return converted

    def step(self) -> None:
        """One iteration. On a GPU that is the home it is queued, else it is done."""
        span = self._ctx.spans.span
        images = next(self._next)
        images.grad = self.weight.grad = None
        with span("forward"):
            outputs = self.model(images)
        loss = F.mse_loss(outputs, self.target, reduction="sum")
        with span("backward"), self.deferring():
            (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward()
        with span("optimiser"):
            if self.loss_scale != 1.0 and self.weight.grad is not None:
                self.weight.grad.mul_(1.0 / self.loss_scale)
            self.optimizer.step()

    def forward(self) -> torch.Tensor:
        """The layer's forward pass alone, on the next images, with what a backward pass needs."""
        result: torch.Tensor = self.model(next(self._next))
        return result

    def backward_of(self, outputs: torch.Tensor, images: torch.Tensor, above: torch.Tensor) -> Any:
        """The layer's backward pass alone; `outputs` can be differentiated again."""
        with self.deferring():
            return torch.autograd.grad(outputs, (images, self.weight), above, retain_graph=True)

    def above(self, outputs: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss by the outputs, where these are."""
        return (2.0 * self.loss_scale) * (outputs.detach() - self.target)

    def deferring(self) -> ContextManager[None]:
        """Weight gradients may come back at the end of a backward pass, as in training."""
        return deferred_weight_grads()

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forms(self) -> Tuple[Tuple[str, ...], ...]:
        """What numbers are rounded to on the way to each result: of output, input gradient and
        weight gradient."""
        placed, wire = self.plan.placement(LAYER), dict(self.plan.transfers.wire)
        if self.plan.elsewhere != "cpu":
            wire = dict.fromkeys(wire, "fp32")
        tensors = (("input", "output"), ("grad_output", "grad_input"), ("input", "grad_output"))
        passes = (placed.forward, placed.input_grad, placed.weight_grad)
        return tuple(
            (each.precision, *(wire[name] for name in names if each.device != "cpu"))
            for each, names in zip(passes, tensors)
        )

    def close(self) -> None:
        self.converted.close()
