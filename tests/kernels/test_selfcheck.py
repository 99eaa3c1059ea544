"""The self-check finds every operator by itself, and a wrong one does not pass it."""

from __future__ import annotations

import pytest
import torch

from narrowgauge_kernels import selfcheck


def test_every_operator_is_found_and_right() -> None:
    assert "linear_mac" in selfcheck.find_operators()
    checked = selfcheck.check_all()
    assert checked["linear_mac on cpu"] <= selfcheck.TOLERANCE


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
