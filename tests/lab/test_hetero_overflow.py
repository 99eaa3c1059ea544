"""Who overflowed first, and what became 0."""

from __future__ import annotations

import pytest
import torch
from placed_cases import images, loss_of, placed, residual
from torch import nn

from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.overflow import OverflowWatch


def test_the_first_result_that_overflowed_is_named() -> None:
    model = residual()
    converted = placed(model, wire="fp16")
    with torch.no_grad():
        model.first.weight.mul_(1e7)
    with converted.watch_overflow() as watch:
        loss_of(model, images()).backward()
    first = watch.first()
    assert first is not None
    assert (first.layer, first.pass_, first.role) == ("first", "forward", "output")
    assert first.inf > 0
    assert first.nan == 0
    assert converted.bus.overflow is None


def test_a_gradient_that_overflows() -> None:
    layer = nn.Conv2d(4, 4, 3)
    nn.init.constant_(layer.weight, 0.5)
    converted = placed(layer, wire="fp16")
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    with converted.watch_overflow() as watch, deferred_weight_grads():
        (layer(x) * 6e4).sum().backward()
    first = watch.first()
    assert first is not None
    assert first.pass_ == "input_grad"
    assert first.role == "grad_input"
    assert {each.pass_ for each in watch.statistics()} == {"forward", "input_grad", "weight_grad"}


def test_what_came_in_broken_is_not_the_layers_fault() -> None:
    layer = nn.Conv2d(4, 4, 3)
    converted = placed(layer)
    x = torch.randn(2, 4, 6, 6)
    x[0, 0, 0, 0] = float("nan")
    with converted.watch_overflow() as watch:
        layer(x)
    first = watch.first()
    assert first is not None
    assert first.role == "input"
    assert first.nan == 1
    watch.clear()
    assert watch.first() is None
    layer(torch.ones(1, 4, 6, 6))
    assert watch.statistics() == ()


@pytest.mark.parametrize(
    ("forms", "share"),
    [
        (("fp32", "fp32"), 0.0),
        (("bf16", "bf16"), 0.0),
        (("fp16", "fp16"), 0.5),
        (("int8", "fp32"), 0.75),
        (("fp32", "int8"), 0.75),
    ],
)
def test_underflow_is_the_share_of_values_that_became_zero(forms: tuple, share: float) -> None:
    watch = OverflowWatch()
    # Half of what is not 0 lies below float16's numbers, a quarter is less than half of a 127th.
    x = torch.tensor([1e-9, 1e-9, 0.0, 1e-4, 1.0, 0.0]).view(1, 1, 6)
    watch.see("layer", "forward", "input", x, forms)
    (found,) = watch.statistics()
    assert found.underflow == share
    assert found.amax == 1.0
    for form in set(forms) & {"fp16", "bf16"}:
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[form]
        kept = x[x != 0].to(dtype)
        assert float((kept == 0).float().mean()) == share


def test_the_watch_tells_of_float8_by_role() -> None:
    watch = OverflowWatch()
    x = torch.tensor([1e-6, 1.0]).view(1, 1, 2)
    watch.see("layer", "forward", "input", x, ("fp8",))
    watch.see("layer", "input_grad", "grad_output", x, ("fp8",))
    # e4m3 spans 448 / 2^-10, e5m2 57344 / 2^-17.
    assert [each.underflow for each in watch.statistics()] == [0.5, 0.0]
