"""What each distinct layer costs: its products on either device, torch's own layer, and the whole
of a pass over the bus."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_contract.placement import (
    PASSES,
    TENSORS,
    LayerPlacement,
    PassPlacement,
    PlacementPlan,
    Transfers,
)
from narrowgauge_contract.placement_costs import (
    NATIVE,
    WIRE_OF,
    NativeCost,
    PlacedCost,
    ProductCost,
    Shape,
)
from narrowgauge_lab.layers.hetero.convert import convert
from narrowgauge_lab.layers.passes import Passes, Problem, missing, passes_for
from narrowgauge_lab.layers.passes.quantise import FORMATS, quantise

from .instrument import CPU, Instrument, Part

__all__ = [
    "native",
    "over_the_bus",
    "placed",
    "plan_of",
    "products",
]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def forms_of(precision: str, device_name: str) -> Tuple[str, ...]:
    """What operands are measured in: float32, and what travels where that is narrower."""
    if device_name == "cpu" or WIRE_OF[precision] == "fp32":
        return ("fp32",)
    return ("fp32", WIRE_OF[precision])


def products(
    by: Instrument, shapes: Sequence[Shape], precisions: Sequence[str], device_name: str
) -> Tuple[ProductCost, ...]:
    """The three products of every shape on one device, in each precision that works there."""
    device = CPU if device_name == "cpu" else by.device
    parts = []
    for number, shape in enumerate(shapes):
        for precision in precisions:
            if missing(precision, device):
                continue
            for form in forms_of(precision, device_name):
                for pass_, call in _calls(shape, precision, device, form):
                    parts.append(Part((number, pass_, precision, form), call, device))
    found = by.sweep(parts)
    return tuple(
        ProductCost(
            shape=number,
            pass_=pass_,
            device=device_name,
            precision=precision,
            form=form,
            seconds=timed.seconds,
            host_seconds=timed.host_seconds,
        )
        for (number, pass_, precision, form), timed in found.items()
    )


def _calls(
    shape: Shape, precision: str, device: torch.device, form: str
) -> Iterator[Tuple[str, Callable[[], Any]]]:
    """(pass, its call); none where the layer's shape does not allow the precision."""
    problem = _problem(shape)
    result = _DTYPES.get(form, torch.float32)  # int8 is made of float32
    passes = passes_for(precision, device, problem, result)
    try:
        passes.require(shape.weight)
    except NotApplicableError:
        return
    x, grad = (_operand(size, form, device) for size in (shape.input, shape.output))
    weight = torch.randn(shape.weight, device=device)
    bias = torch.randn(shape.weight[0], device=device) if shape.bias else None
    yield "forward", _Forward(passes, x, weight, bias)
    yield "input_grad", _InputGrad(passes, grad, weight, shape.input)
    yield "weight_grad", _WeightGrad(passes, grad, x, shape.weight)


@dataclasses.dataclass(frozen=True)
class _Forward:
    passes: Passes
    x: Any
    weight: torch.Tensor
    bias: Optional[torch.Tensor]

    def __call__(self) -> torch.Tensor:
        return self.passes.forward(self.x, self.weight, self.bias)


@dataclasses.dataclass(frozen=True)
class _InputGrad:
    passes: Passes
    grad: Any
    weight: torch.Tensor
    shape: Tuple[int, ...]

    def __call__(self) -> torch.Tensor:
        return self.passes.input_grad(self.grad, self.weight, self.shape)


@dataclasses.dataclass(frozen=True)
class _WeightGrad:
    passes: Passes
    grad: Any
    x: Any
    shape: Tuple[int, ...]

    def __call__(self) -> torch.Tensor:
        return self.passes.weight_grad(self.grad, self.x, self.shape)


def native(
    by: Instrument, shapes: Sequence[Shape], precisions: Sequence[str], device_name: str
) -> Tuple[NativeCost, ...]:
    """torch's own layers, forward and backward, as autograd runs them."""
    device = CPU if device_name == "cpu" else by.device
    parts = []
    for number, shape in enumerate(shapes):
        layer = _module(shape).to(device)
        x = torch.randn(shape.input, device=device)
        for precision in precisions:
            if precision not in NATIVE or missing(precision, device):
                continue
            for wanted in (True, False):
                for direction, call in _autograd(layer, x, wanted):
                    if direction == "backward" or wanted:
                        key = (number, precision, direction, wanted)
                        parts.append(Part(key, call, device, tf32=precision == "tf32"))
    found = by.sweep(parts)
    return tuple(
        NativeCost(
            shape=number,
            device=device_name,
            precision=precision,
            direction=direction,
            input_grad=wanted,
            seconds=timed.seconds,
            host_seconds=timed.host_seconds,
        )
        for (number, precision, direction, wanted), timed in found.items()
    )


def _autograd(
    layer: nn.Module, x: torch.Tensor, wanted: bool
) -> Iterator[Tuple[str, Callable[[], Any]]]:
    """A layer's forward call, and its backward one by all parameters and, if `wanted`, input."""
    leaf = x.detach().clone().requires_grad_(wanted)
    y = layer(leaf)
    grad = torch.randn_like(y)
    by = [leaf] * wanted + [each for each in layer.parameters() if each.requires_grad]
    yield "forward", lambda: layer(leaf)
    yield "backward", lambda: torch.autograd.grad(y, by, grad, retain_graph=True)


def placed(
    by: Instrument, shapes: Sequence[Shape], precisions: Sequence[str]
) -> Tuple[PlacedCost, ...]:
    """Whole passes over the bus, as a converted layer runs them, tensors on the host on both ends.

    With the input gradient alone: weight gradients come late and are nobody's to wait for.
    """
    parts: List[Part] = []
    for number, shape in enumerate(shapes):
        for precision in precisions:
            if missing(precision, by.device):
                continue
            for wire in forms_of(precision, "accelerator"):
                layer = _module(shape)
                for parameter in layer.parameters():
                    parameter.requires_grad_(False)
                try:
                    over_the_bus(layer, precision, wire, by.device)
                except NotApplicableError:
                    continue
                calls = dict(_autograd(layer, torch.randn(shape.input), True))
                for pass_, direction in (("forward", "forward"), ("input_grad", "backward")):
                    key = (number, pass_, precision, wire)
                    parts.append(Part(key, calls[direction], by.device, host=True))
    found = by.sweep(parts)
    return tuple(
        PlacedCost(shape=number, pass_=pass_, precision=precision, wire=wire, seconds=timed.seconds)
        for (number, pass_, precision, wire), timed in found.items()
    )


def over_the_bus(model: nn.Module, precision: str, wire: str, device: torch.device) -> None:
    """Convert a model on the CPU so that all its layers' passes go over the bus."""
    convert(model, plan_of("parts", PassPlacement("accelerator", precision), wire), device)


def plan_of(
    name: str, everywhere: PassPlacement, wire: str, elsewhere: str = "cpu"
) -> PlacementPlan:
    """All passes at one place, and all tensors as one wire."""
    layer = LayerPlacement(*[everywhere for _ in PASSES])
    moved = Transfers(wire=dict.fromkeys(TENSORS, wire))
    return PlacementPlan(name, elsewhere, (), layer, moved)


def _problem(shape: Shape) -> Problem:
    stride, padding, dilation = (
        (each[0], each[1]) for each in (shape.stride, shape.padding, shape.dilation)
    )
    return Problem(shape.kind, stride, padding, dilation, shape.groups)


def _module(shape: Shape) -> nn.Module:
    if shape.kind == "linear":
        return nn.Linear(shape.weight[1], shape.weight[0], bias=shape.bias)
    problem = _problem(shape)
    return nn.Conv2d(
        shape.input[1], shape.weight[0], (shape.weight[2], shape.weight[3]), problem.stride,
        problem.padding, problem.dilation, problem.groups, shape.bias,
    )  # fmt: skip


def _operand(size: Tuple[int, ...], form: str, device: torch.device) -> Any:
    """Random numbers, as they lie on a device after they travelled as `form`."""
    tensor = torch.randn(size, device=device)
    if form == "int8":
        return quantise(tensor, FORMATS["int8"])
    return tensor.to(_DTYPES[form])
