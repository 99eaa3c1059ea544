"""The network's cost with its gradient written out: no autograd in it, one node of autograd around
it, through which the training loop asks for the gradient as it asks any other."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

import torch

from narrowgauge_lab import written_out as by_hand

from .network import POOL, Network

__all__ = ["cost_and_outputs", "penalty"]

_ACTIVATIONS: Dict[str, Any] = {
    "sigmoid": (by_hand.sigmoid, by_hand.sigmoid_backward),
    "tanh": (by_hand.tanh, by_hand.tanh_backward),
    "relu": (by_hand.relu, by_hand.relu_backward),
}
_COSTS: Dict[str, Any] = {
    "quadratic": (by_hand.quadratic, by_hand.quadratic_backward),
    "cross-entropy": (by_hand.cross_entropy, by_hand.cross_entropy_backward),
    "log-likelihood": (by_hand.log_likelihood, by_hand.log_likelihood_backward),
}


def cost_and_outputs(
    net: Network, cost: str, images: torch.Tensor, labels: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The mean cost of images [B, 1, H, W] with labels int64 [B], which may be differentiated by
    the network's parameters, and the outputs z [B, classes], which may not."""
    plan = _Plan(net.activation, net.convolution, cost, tuple(net.masks(images)))
    found: Tuple[torch.Tensor, torch.Tensor] = _Cost.apply(
        plan, images, labels, *net.weights, *net.biases
    )
    return found


def penalty(net: Network, l1: float, l2: float) -> torch.Tensor:
    """`written_out.penalty` over all weights; biases have none."""
    found: torch.Tensor = _Penalty.apply(l1, l2, *net.weights)
    return found


class _Plan(NamedTuple):
    activation: str
    convolution: bool
    cost: str
    masks: Tuple[torch.Tensor, ...]


class _Passed(NamedTuple):
    """What a forward pass leaves for the backward pass: by layer, what went in and what came out
    before activation; of the convolution, before pooling as well."""

    inputs: List[torch.Tensor]
    weighted: List[torch.Tensor]
    unpooled: List[torch.Tensor]


class _Cost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, images: Any, labels: Any, *parameters: Any) -> Any:
        layers = len(parameters) // 2
        weights, biases = parameters[:layers], parameters[layers:]
        passed = _forward(plan, images, weights, biases)
        ctx.plan, ctx.passed, ctx.weights, ctx.labels = plan, passed, weights, labels
        outputs = passed.weighted[-1]
        ctx.mark_non_differentiable(outputs)
        return _COSTS[plan.cost][0](outputs, labels), outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        outputs = ctx.passed.weighted[-1]
        first = _COSTS[ctx.plan.cost][1](outputs, ctx.labels) * gradient
        by_weights, by_biases = _backward(ctx.plan, ctx.passed, ctx.weights, first)
        return (None, None, None, *by_weights, *by_biases)


class _Penalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, l1: float, l2: float, *weights: Any) -> Any:
        ctx.how, ctx.weights = (l1, l2), weights
        return by_hand.penalty(weights, l1, l2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        found = by_hand.penalty_backward(ctx.weights, *ctx.how)
        return (None, None, *(each * gradient for each in found))


def _forward(plan: _Plan, images: Any, weights: Any, biases: Any) -> _Passed:
    active = _ACTIVATIONS[plan.activation][0]
    passed = _Passed([], [], [])
    found = images
    if plan.convolution:
        passed.unpooled.append(by_hand.convolution(found, weights[0], biases[0]))
        passed.inputs.append(found)
        passed.weighted.append(by_hand.max_pool(passed.unpooled[0], POOL))
        found = active(passed.weighted[0])
    found = found.reshape(len(images), -1)
    for number in range(len(passed.inputs), len(weights)):
        passed.inputs.append(found)
        passed.weighted.append(by_hand.dense(found, weights[number], biases[number]))
        if number < len(weights) - 1:
            found = active(passed.weighted[-1])
            found = found * plan.masks[number - plan.convolution] if plan.masks else found
    return passed


def _backward(plan: _Plan, passed: _Passed, weights: Any, gradient: Any) -> Any:
    """`gradient` [B, classes] by the outputs; gradients by all weights and by all biases."""
    back = _ACTIVATIONS[plan.activation][1]
    by_weights: List[torch.Tensor] = []
    by_biases: List[torch.Tensor] = []
    for number in range(len(weights) - 1, -1, -1):
        if plan.convolution and number == 0:
            spread = by_hand.max_pool_backward(passed.unpooled[0], gradient, POOL)
            layer = by_hand.convolution_backward(passed.inputs[0], weights[0], spread)
        else:
            layer = by_hand.dense_backward(passed.inputs[number], weights[number], gradient)
        by_weights.insert(0, layer.weights)
        by_biases.insert(0, layer.biases)
        if number:
            before = passed.weighted[number - 1]
            by_active = layer.inputs.reshape(before.shape)
            place = number - 1 - plan.convolution
            if plan.masks and place >= 0:
                by_active = by_active * plan.masks[place]
            gradient = back(before, by_active)
    return by_weights, by_biases
