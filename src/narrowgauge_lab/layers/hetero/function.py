"""The autograd function of a placed layer."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab.layers.hetero.late import deferring
from narrowgauge_lab.layers.hetero.runner import Runner
from narrowgauge_lab.layers.passes import Operand, Quantised

__all__ = ["run"]


def run(
    runner: Runner, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]
) -> torch.Tensor:
    """The layer's output: x [B, C, H, W] for a convolution, [B, C] for a linear layer, float32,
    where everything but the products lives. Differentiable once.

    Raises UsageError for tensors of another type or at another place.
    """
    _check(runner, x)
    parameters = (weight, bias)
    result: torch.Tensor = _Placed.apply(
        x, weight, bias, runner, parameters, torch.is_grad_enabled()
    )
    return result


class _Placed(torch.autograd.Function):
    """Saves the input as it stayed on the accelerator, or else the input itself, and only what a
    gradient that is asked for needs. In a call that nobody differentiates it keeps nothing.

    `parameters`: weight and bias as the layer has them. What autograd hands to a function (and, in
    torch 1.8, what it saved) need not be these objects, and has neither their hooks nor their
    gradients. They are saved as well, so that autograd sees where one changed too early.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        runner: Runner,
        parameters: Tuple[torch.Tensor, Optional[torch.Tensor]],
        differentiated: bool,
    ) -> torch.Tensor:
        result, kept, lease = runner.forward(x, *parameters)
        if not differentiated:
            return result
        by_weight = ctx.needs_input_grad[1]
        ctx.runner, ctx.input_shape, ctx.parameters = runner, tuple(x.shape), parameters
        ctx.quantised = isinstance(kept, Quantised)
        saved = [weight, bias]
        if by_weight and isinstance(kept, Quantised):
            saved += [kept.values, kept.scale]
        elif by_weight:
            saved.append(x if kept is None else kept)
        ctx.resident = by_weight and kept is not None
        if ctx.resident:
            ctx.lease = lease  # until autograd forgets this call
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                f"the gradient of layer '{ctx.runner.layer}' cannot be differentiated again",
                why="its products run outside of autograd, and were asked for with create_graph",
                next_step="create_graph=False, or leave the layer out of the plan",
            )
        (grad,) = grads
        rest = ctx.saved_tensors[2:]
        weight, bias = ctx.parameters
        inputs: Optional[Operand] = None
        x = None
        if ctx.resident:
            inputs = Quantised(rest[0], rest[1]) if ctx.quantised else rest[0]
        elif rest:
            x = rest[0]
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        found = ctx.runner.backward(
            grad, weight, bias, ctx.input_shape, inputs, x, wanted, deferring()
        )
        return (*found, None, None, None)


def _check(runner: Runner, x: torch.Tensor) -> None:
    if x.dtype != torch.float32:
        raise UsageError(
            f"layer '{runner.layer}' got {x.dtype}, and a placed layer takes float32",
            why="its plan says what it computes in; autocast, or another dtype, would say it too",
            next_step="no autocast around it, and float32 tensors",
        )
    if x.device.type != runner.home.type:
        raise UsageError(
            f"layer '{runner.layer}' got a tensor on {x.device}, and its plan has all but its "
            f"products on {runner.home}",
            next_step=f"move the model and its input to {runner.home}",
        )
