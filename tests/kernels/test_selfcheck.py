"""The self-check finds every operator by itself, and a wrong one does not pass it."""

from __future__ import annotations

import pytest
import torch

from narrowgauge_kernels import selfcheck


def test_every_operator_is_found_and_right() -> None:
    names = {"fake_quantize", "linear_mac", "pack_int8", "unpack_int8"}
    assert names <= set(selfcheck.find_operators())
    checked = selfcheck.check_all()
    assert all(checked[f"{name} on cpu"] <= selfcheck.TOLERANCE for name in names)


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_a_wrong_result_or_gradient_is_an_error(wrong: float) -> None:
    right = selfcheck.find_operators()["linear_mac"]
    broken = right._replace(function=lambda *inputs: right.function(*inputs) * wrong)

    with pytest.raises(ArithmeticError, match="linear_mac on cpu is off by"):
        selfcheck.check(broken)


def test_a_wrong_gradient_alone_is_an_error() -> None:
    right = selfcheck.find_operators()["linear_mac"]

    def detached_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = right.function(x, weight, bias + bias - bias.detach())
        return result

    with pytest.raises(ArithmeticError):
        selfcheck.check(right._replace(function=detached_bias))


def test_a_wrong_second_result_is_an_error() -> None:
    right = selfcheck.find_operators()["pack_int8"]

    def other_scale(x: torch.Tensor, seed: int) -> object:
        values, scale = right.function(x, seed)
        return values, scale * 1.01

    with pytest.raises(ArithmeticError, match="pack_int8 on cpu is off by"):
        selfcheck.check(right._replace(function=other_scale))


def test_a_result_without_history_is_an_error_where_the_reference_has_one() -> None:
    right = selfcheck.find_operators()["linear_mac"]

    def detached(*inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = right.function(*inputs)
        return result.detach()

    with pytest.raises(ArithmeticError, match="lacks a gradient"):
        selfcheck.check(right._replace(function=detached))


def test_a_gradient_that_the_reference_has_not_is_an_error() -> None:
    """The scale of a fake quantisation is a float input without a gradient."""
    right = selfcheck.find_operators()["fake_quantize"]

    def through_the_scale(x: torch.Tensor, scale: torch.Tensor, *rest: object) -> torch.Tensor:
        result: torch.Tensor = right.function(x, scale, *rest)
        return result + 0 * scale.sum()

    with pytest.raises(ArithmeticError, match="one too many"):
        selfcheck.check(right._replace(function=through_the_scale))
