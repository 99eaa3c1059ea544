"""FGSM and PGD against what a hand computes, and what is counted of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from one_row import Rows
from torch import nn

from narrowgauge_contract.errors import BadValueError

_ROWS = Rows("robustness")


def _attack() -> Any:
    return _ROWS.module("attack")


class _Linear(nn.Module):
    """Two classes: the second one's logit is w·x, the first one's 0."""

    def __init__(self, *weights: float) -> None:
        super().__init__()
        self.weights = torch.tensor(weights)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logit = images.flatten(1) @ self.weights
        return torch.stack((torch.zeros_like(logit), logit), dim=1)


class _Parabola(nn.Module):
    """The second logit is -100 (x - 0.5)² of the one pixel: the loss of class 1 is least at 0.5."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logit = -100.0 * (images.flatten(1)[:, 0] - 0.5).square()
        return torch.stack((torch.zeros_like(logit), logit), dim=1)


def _images(*pixels: float) -> torch.Tensor:
    return torch.tensor(pixels).reshape(1, 1, 1, -1)


def test_fgsm_is_what_a_hand_computes_for_a_linear_model() -> None:
    """Loss of class 1: log(1 + exp(-w·x)), of class 0: log(1 + exp(w·x)). Against the former every
    pixel moves against its weight, against the latter with it; the one of weight 0 stays."""
    attack = _attack()
    model = _Linear(2.0, -3.0, 0.0, 1.0)
    images = _images(0.5, 0.5, 0.5, 0.05).repeat(2, 1, 1, 1)
    labels = torch.tensor([1, 0])
    found = attack.adversarial(
        attack.Attack("fgsm", 0.1), images, labels, attack.loss_gradient(model), model
    )
    # The last pixel would leave the image, and is clipped to black.
    assert found[0].flatten().tolist() == pytest.approx([0.4, 0.6, 0.5, 0.0])
    assert found[1].flatten().tolist() == pytest.approx([0.6, 0.4, 0.5, 0.15])


def test_the_gradient_is_the_one_of_the_formula() -> None:
    attack = _attack()
    model = _Linear(2.0, -3.0)
    images = _images(0.3, 0.1)
    (first, second) = attack.loss_gradient(model)(images, torch.tensor([1])).flatten().tolist()
    wrong = 1.0 / (1.0 + math.exp(2.0 * 0.3 - 3.0 * 0.1))  # the odds of class 0
    assert (first, second) == pytest.approx((-2.0 * wrong, 3.0 * wrong))


def test_an_image_is_attacked_alike_whatever_is_in_its_batch() -> None:
    attack = _attack()
    model = _Linear(2.0, -3.0, 1.0)
    images, labels = torch.rand(5, 1, 1, 3), torch.tensor([0, 1, 0, 1, 1])
    made = attack.Attack("pgd", 0.2, 4)
    gradient = attack.loss_gradient(model)
    together = attack.adversarial(made, images, labels, gradient, model)
    alone = attack.adversarial(made, images[2:3], labels[2:3], gradient, model)
    assert torch.equal(together[2:3], alone)


@pytest.mark.parametrize("epsilon", [0.0, 0.07, 0.3, 1.0])
def test_one_step_of_pgd_is_fgsm(epsilon: float) -> None:
    attack = _attack()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 10))
    images, labels = torch.rand(6, 1, 8, 8), torch.arange(6)
    gradient = attack.loss_gradient(model)
    one = attack.adversarial(attack.Attack("fgsm", epsilon), images, labels, gradient, model)
    other = attack.adversarial(attack.Attack("pgd", epsilon, 1), images, labels, gradient, model)
    assert torch.equal(one, other)


@pytest.mark.parametrize("start", [False, True])
def test_pgd_stays_in_the_box_and_in_the_image(start: bool) -> None:
    attack = _attack()
    model = _Linear(*torch.randn(16).tolist())
    images, labels = torch.rand(8, 1, 4, 4), torch.ones(8, dtype=torch.int64)
    generator = torch.Generator().manual_seed(1)
    found = attack.adversarial(
        attack.Attack("pgd", 0.25, 7, start), images, labels, attack.loss_gradient(model), model,
        generator,
    )  # fmt: skip
    assert float((found - images).abs().max()) <= 0.25 + 1e-6
    assert float(found.min()) >= 0.0
    assert float(found.max()) <= 1.0
    # The optimum of a linear model is a corner of the box, and seven steps reach it from anywhere.
    corner = (images - 0.25 * model.weights.sign().reshape(1, 1, 4, 4)).clamp(0.0, 1.0)
    assert torch.allclose(found, corner, atol=1e-6)


def test_pgd_keeps_the_iterate_that_the_attacked_network_likes_least() -> None:
    """The gradient, of another network, drives the pixel from 0.35 through 0.5, where the loss that
    counts is least, to 0.55: the first step, to 0.45 at most, did better than the last."""
    attack = _attack()
    judge, other = _Parabola(), _Linear(-1.0)
    images, labels = _images(0.35), torch.tensor([1])
    made = attack.Attack("pgd", 0.2, 8)
    found = attack.adversarial(made, images, labels, attack.loss_gradient(other), judge)
    first = 0.35 + 2.5 * 0.2 / 8
    assert abs(first - 0.5) > abs(0.55 - 0.5)
    assert float(found) == pytest.approx(first)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("cw", 0.1), "neither fgsm nor pgd"),
        (("fgsm", 1.5), "between 0 and 1"),
        (("pgd", 0.1, 0), "0 steps"),
        (("fgsm", 0.1, 3), "FGSM is one step"),
    ],
)
def test_what_is_no_attack_is_refused(words: Any, match: str) -> None:
    with pytest.raises(BadValueError, match=match):
        _attack().Attack(*words)


def test_a_gradient_that_is_not_finite_is_no_direction() -> None:
    attack = _attack()
    with pytest.raises(BadValueError, match="not finite"):
        attack.loss_gradient(_Linear(float("inf")))(_images(0.5), torch.tensor([0]))


def test_a_change_is_measured_in_pixels_of_0_to_1() -> None:
    outcomes = _ROWS.module("outcomes")
    images = torch.zeros(2, 1, 2, 2)
    attacked = images.clone()
    attacked[0, 0, 0, 0] = 0.2
    found = outcomes.change(images, attacked)
    assert found.l2 == pytest.approx(0.1)  # 0.2 and 0
    assert found.linf == pytest.approx(0.1)
    assert found.psnr == pytest.approx(-10.0 * math.log10(0.04 / 4))  # of the changed one
    assert found.unchanged == 50.0
    assert math.isnan(outcomes.change(images, images).psnr)


def test_what_transfers_is_a_share_of_what_fooled_its_own_network() -> None:
    success = _ROWS.module("outcomes").transfer_success

    def of(*bits: int) -> torch.Tensor:
        return torch.tensor(bits).bool()

    # The fourth fools the source, and the target had it wrong before; the fifth fools the target.
    right = of(1, 1, 1, 1, 1), of(1, 1, 1, 0, 1)
    fooled = of(1, 1, 1, 1, 0), of(1, 0, 0, 1, 1)
    assert success(right, fooled) == (pytest.approx(100.0 / 3), 3)
    share, count = success(right, (of(0, 0, 0, 0, 0), fooled[1]))
    assert math.isnan(share)
    assert count == 0
