"""Whether a plan computes the right thing: a layer's output and gradients against float64."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_contract.placement import PlacementPlan
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.hetero.convert import convert, home_of

from .subject import OneLayer, Training

__all__ = ["LIMITS", "check_layer", "check_sweep"]

#: By what the least precise number on the way is: beyond it something else is computed. The
#: original's wrong gradient is off by 1.45, and float32 sums of 1.6 million products by 1e-5.
LIMITS = {"fp32": 1e-4, "tf32": 4e-3, "bf16": 2e-2, "fp16": 3e-3, "int8": 6e-2, "fp8": 0.15}
_RESULTS = ("forward", "input_grad", "weight_grad")
#: Loss scales that are tried where float16 overflows; below them values underflow instead.
_HALVINGS = 16

#: Small layers of every kind: (name, image [B, C, H, W], Conv2d's arguments).
_SWEEP: Tuple[Tuple[str, Tuple[int, ...], Dict[str, Any]], ...] = (
    ("stride 2", (3, 4, 9, 9), {"out": 6, "window": 3, "stride": 2, "padding": 1}),
    ("groups", (3, 4, 8, 8), {"out": 6, "window": 3, "padding": 1, "groups": 2}),
    ("dilation", (2, 4, 9, 9), {"out": 4, "window": 3, "padding": 2, "dilation": 2}),
    ("not square", (2, 4, 11, 7), {"out": 5, "window": (2, 3), "padding": (0, 2)}),
    ("stride 2, dilation 2, not square", (2, 4, 11, 10),
     {"out": 4, "window": (3, 2), "stride": 2, "padding": (2, 1), "dilation": 2}),
    ("one image, with bias", (1, 4, 8, 8), {"out": 6, "window": 3, "padding": 1, "bias": True}),
)  # fmt: skip


def check_layer(ctx: RowContext, training: Training) -> None:
    """Record `relative_error_forward`, `…_input_grad` and `…_weight_grad` of the row's own layer;
    beyond `LIMITS` the row is INVALID. Finds the loss scale first, where float16 needs one."""
    if _scales(training.plan):
        training.loss_scale = _finite_scale(training)
        ctx.fact("loss_scale", training.loss_scale)
    # Values around 0, unlike the images that it trains on: where all neighbours are much alike, a
    # gradient of the wrong pixels is hardly wrong.
    images = torch.randn_like(training.batches[0]).requires_grad_()
    above = torch.randn(_strict(training.model.conv, images.detach().cpu().double()).shape)
    errors = _errors(training.model, images, above)
    for name, error, forms in zip(_RESULTS, errors, training.forms()):
        ctx.metric(f"relative_error_{name}", error, unit="1", source="float64 autograd")
        if name == "weight_grad" and training.plan.stride_bug:
            ctx.fact("weight_grad_wrong_as_planned", "the plan has stride_bug on")
        elif not error <= _limit(forms):
            ctx.invalid(
                f"the layer's {name} is off by {error:.3g} of float64; rounding to "
                f"{' and '.join(dict.fromkeys(forms))} explains {_limit(forms):g} at most"
            )


def check_sweep(ctx: RowContext, training: Training) -> None:
    """Record the fact `sweep`: small layers of all kinds by the row's plan, each with its three
    relative errors, or with why device or plan cannot do it. Beyond `LIMITS` the row is INVALID."""
    found: List[Dict[str, Any]] = []
    for number, (name, image, said) in enumerate(_SWEEP):
        entry: Dict[str, Any] = {"layer": name}
        found.append(entry)
        try:
            errors = _case(training.plan, training.device, image, said, ctx.seed + number)
        except NotApplicableError as error:
            entry["refused"] = f"{error.what}: {error.why}"
            continue
        entry.update(zip(_RESULTS, errors))
        for result, off, forms in zip(_RESULTS, errors, training.forms()):
            wrong_as_planned = result == "weight_grad" and training.plan.stride_bug
            if not off <= _limit(forms) and not wrong_as_planned:
                ctx.invalid(f"sweep, {name}: {result} is off by {off:.3g} of float64")
    ctx.fact("sweep", found)
    if all("refused" in entry for entry in found):
        ctx.invalid("sweep: no layer of it can be computed by this plan")


def _case(
    plan: PlacementPlan, device: torch.device, image: Sequence[int], said: Dict[str, Any], seed: int
) -> Tuple[float, ...]:
    arguments = dict(said)
    outputs, window = arguments.pop("out"), arguments.pop("window")
    arguments.setdefault("bias", False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        conv = nn.Conv2d(image[1], outputs, window, **arguments)
        images = torch.randn(tuple(image))
        above = torch.randn(_strict(conv, images.double()).shape)
    home = home_of(plan, device)
    model = OneLayer(conv).to(home)
    converted = convert(model, plan, device)
    try:
        return _errors(model, images.to(home).requires_grad_(), above)
    finally:
        converted.close()


def _finite_scale(training: Training) -> float:
    """The largest power of two, 1 at most, by which the loss can be scaled so that the gradients of
    a step are finite."""
    images = training.batches[0]
    for halvings in range(_HALVINGS):
        outputs = training.model(images)
        above = training.above(outputs) * 0.5**halvings
        wanted = (images, training.weight)
        gradients = torch.autograd.grad(outputs, wanted, above)
        if all(bool(torch.isfinite(each).all()) for each in gradients):
            break
    return 0.5**halvings


def _errors(model: OneLayer, images: torch.Tensor, above: torch.Tensor) -> Tuple[float, ...]:
    """Relative errors in L2 of output, input gradient and weight gradient; NaN where something is
    not finite. `above`: the gradient by the output, on the CPU."""
    outputs = model(images)
    found = torch.autograd.grad(outputs, (images, model.conv.weight), above.to(images.device))
    exact = _exact(model.conv, images, above)
    return tuple(_distance(one.detach(), other) for one, other in zip((outputs, *found), exact))


def _exact(
    conv: nn.Conv2d, images: torch.Tensor, above: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = images.detach().cpu().double().requires_grad_()
    weight = conv.weight.detach().cpu().double().requires_grad_()
    outputs = _strict(conv, x, weight)
    by_input, by_weight = torch.autograd.grad(outputs, (x, weight), above.double())
    return outputs.detach(), by_input, by_weight


def _strict(conv: nn.Conv2d, x: torch.Tensor, weight: Any = None) -> torch.Tensor:
    """The convolution in float64 on the CPU, by torch itself."""
    weight = conv.weight.detach().cpu().double() if weight is None else weight
    bias = None if conv.bias is None else conv.bias.detach().cpu().double()
    padding: Any = conv.padding
    return F.conv2d(x, weight, bias, conv.stride, padding, conv.dilation, conv.groups)


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.cpu().double() - exact).norm() / exact.norm())


def _limit(forms: Sequence[str]) -> float:
    return max(LIMITS[form] for form in forms)


def _scales(plan: PlacementPlan) -> bool:
    """Whether gradients may need a loss scale: those of float16, except as the original had it."""
    ours = [each for each in plan.passes() if each.backend != "faithful"]
    forms = {each.precision for each in ours}
    return "fp16" in forms or (bool(ours) and "fp16" in plan.transfers.wire.values())
