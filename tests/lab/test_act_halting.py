"""The mathematics of adaptive computation time against a reference by loops."""

from __future__ import annotations

import itertools
from typing import List, Tuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.systems.act import EPSILON, Halter, halting


def _slowly(scores: List[float]) -> Tuple[List[float], int, float]:
    """p, N and R of one position by the definitions, by the scores of all units but the last."""
    last = len(scores) + 1
    steps = next((unit for unit in range(1, last) if sum(scores[:unit]) >= 1 - EPSILON), last)
    remainder = 1 - sum(scores[: steps - 1])
    weights = [*scores[: steps - 1], remainder] + [0.0] * (last - steps)
    return weights, steps, remainder


@pytest.mark.parametrize("shape", [(), (5,), (2, 1, 7, 3)])
@pytest.mark.parametrize("units", [2, 5])
def test_random_scores_halt_as_the_definitions_say(shape: Tuple[int, ...], units: int) -> None:
    generator = torch.Generator().manual_seed(units)
    # Cubed, so that some halt at once and others never by themselves.
    scores = torch.rand((units - 1, *shape), generator=generator) ** 3
    scores.view(units - 1, -1)[0, ::3] = 0.999
    scores.view(units - 1, -1)[:, 1::3] *= 0.1

    found = halting(list(scores))

    flat = scores.view(units - 1, -1)
    for position in range(flat.shape[1]):
        weights, steps, remainder = _slowly(flat[:, position].double().tolist())
        assert found.distribution.view(units, -1)[:, position].tolist() == pytest.approx(
            weights, abs=1e-6
        )
        assert int(found.steps.view(-1)[position]) == steps
        assert float(found.remainder.view(-1)[position]) == pytest.approx(remainder, abs=1e-6)
        assert float(found.ponder.view(-1)[position]) == pytest.approx(steps + remainder, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=8))
def test_the_distribution_is_whole_and_pondering_costs_at_least_the_units(
    scores: List[float],
) -> None:
    found = halting([torch.tensor([each]) for each in scores])

    assert float(found.distribution.sum()) == pytest.approx(1.0, abs=1e-6)
    assert bool((found.distribution >= 0).all())
    assert float(found.ponder) >= float(found.steps)
    assert 1 <= int(found.steps) <= len(scores) + 1
    assert EPSILON < float(found.remainder) <= 1.0 + 1e-6


def test_scores_that_reach_the_threshold_only_just_count_as_reaching_it() -> None:
    enough, not_quite = torch.tensor([1 - EPSILON + 1e-4]), torch.tensor([1 - EPSILON - 1e-4])

    assert int(halting([enough]).steps) == 1
    assert int(halting([not_quite]).steps) == 2


def test_the_gradient_of_the_ponder_cost_is_the_remainders() -> None:
    """-1 for the scores before the last unit that ran, 0 for it and for those after."""
    scores = [torch.tensor([each], requires_grad=True) for each in (0.3, 0.4, 0.6, 0.5)]

    halting(scores).ponder.sum().backward()

    assert [float(each.grad) for each in scores if each.grad is not None] == [-1, -1, 0, 0]


def test_gradients_of_the_distribution_are_those_of_its_formula() -> None:
    """By differences, away from where N changes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(4, 3, generator=generator).double() * 0.4
    values.requires_grad_()
    factors = torch.rand(5, 3, generator=generator).double()

    def weighed(given: torch.Tensor) -> torch.Tensor:
        found = halting(list(given))
        return (found.distribution * factors).sum() + found.ponder.sum()

    (gradient,) = torch.autograd.grad(weighed(values), values)

    for unit, position in itertools.product(range(4), range(3)):
        shift = torch.zeros_like(values)
        shift[unit, position] = 1e-3  # the halter computes in float32
        with torch.no_grad():
            slope = (weighed(values + shift) - weighed(values - shift)) / 2e-3
        assert float(gradient[unit, position]) == pytest.approx(float(slope), abs=2e-3)


def test_halters_of_half_precision_scores_compute_in_float32() -> None:
    halter = Halter(torch.zeros(2, dtype=torch.float16))
    weight = halter.take(torch.tensor([0.25, 0.999], dtype=torch.float16))

    assert weight.dtype == halter.left.dtype == torch.float32
    assert halter.running.tolist() == [True, False]


@pytest.mark.parametrize("scores", [[], [torch.zeros(2), torch.zeros(3)]])
def test_scores_of_no_block_are_refused(scores: List[torch.Tensor]) -> None:
    with pytest.raises(BadValueError, match="scores of one shape"):
        halting(scores)
