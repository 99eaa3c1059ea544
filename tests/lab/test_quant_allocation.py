"""Bits for each layer: the search against all allocations there are, and the tables it starts
from."""

from __future__ import annotations

import itertools

import pytest
import torch
from quant_models import images, small_network

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.quant.allocation import (
    allocate,
    calibrate_widths,
    mixed,
    search,
    width_losses,
)
from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
from narrowgauge_lab.quant.layers import fake_quantized

WIDTHS = (8, 6, 4, 2)


def _tables(seed, layers=4):
    """Losses that grow as widths shrink, ever faster; costs as bits squared."""
    draw = torch.Generator().manual_seed(seed)
    weights = (torch.rand(layers, generator=draw) * 9 + 1).tolist()
    losing = (torch.rand(layers, generator=draw) * 3).tolist()
    names = [f"layer{k}" for k in range(layers)]
    costs = {n: {b: w * b * b for b in WIDTHS} for n, w in zip(names, weights)}
    losses = {n: {b: w * 2.0 ** (-2 * b) for b in WIDTHS} for n, w in zip(names, losing)}
    return losses, costs


def _of(table, widths):
    return sum(table[name][bits] for name, bits in widths.items())


def _best(losses, costs, budget):
    """By trying all."""
    every = (dict(zip(losses, w)) for w in itertools.product(WIDTHS, repeat=len(losses)))
    return min(_of(losses, each) for each in every if _of(costs, each) <= budget)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
def test_it_keeps_the_budget_and_is_next_to_the_best(seed, share):
    losses, costs = _tables(seed)
    budget = share * _of(costs, dict.fromkeys(losses, 8))
    found = allocate(losses, costs, budget)
    assert found.cost == pytest.approx(_of(costs, found.widths))
    assert found.loss == pytest.approx(_of(losses, found.widths))
    assert found.cost <= budget
    # Widening any layer by itself is dearer or no better.
    for name, now in found.widths.items():
        for bits in WIDTHS:
            more = found.cost - costs[name][now] + costs[name][bits]
            assert more > budget or losses[name][bits] >= losses[name][now]
    # One layer may be a width too narrow: that is what going greedily costs.
    best = _best(losses, costs, budget)
    worst_step = max(row[b] for row in losses.values() for b in WIDTHS if row[b] <= 4 * found.loss)
    assert best <= found.loss + 1e-12
    assert found.loss <= best + worst_step


def test_what_costs_most_and_loses_nothing_goes_first():
    costs = {"big": {8: 640, 4: 160}, "small": {8: 64, 4: 16}}
    losses = {"big": {8: 0.0, 4: 0.0}, "small": {8: 0.0, 4: 0.5}}
    found = allocate(losses, costs, 300)
    assert found.widths == {"big": 4, "small": 8}
    assert found.steps == (("big", 8, 4),)
    # And where that is not enough, the other.
    assert allocate(losses, costs, 176).widths == {"big": 4, "small": 4}


def test_a_layer_may_skip_a_width():
    losses = {"a": {8: 0.0, 6: 5.0, 4: 0.1}, "b": {8: 0.0, 6: 1.0, 4: 2.0}}
    costs = {name: {8: 64, 6: 36, 4: 16} for name in losses}
    assert allocate(losses, costs, 80).widths == {"a": 4, "b": 8}


def test_a_roomy_budget_changes_nothing():
    losses, costs = _tables(0)
    found = allocate(losses, costs, 1e9)
    assert set(found.widths.values()) == {8}
    assert found.steps == ()


def test_the_search_is_never_worse_than_uniform_widths():
    """A network that falls apart as soon as any layer has 2 bits, which no layer alone shows."""
    losses, costs = _tables(3)
    losses = {name: dict.fromkeys(WIDTHS, 0.0) for name in losses}
    budget = _of(costs, dict.fromkeys(losses, 4))

    def judge(widths):
        return -100.0 if min(widths.values()) < 4 else 0.0

    found = search(losses, costs, budget, judge)
    assert min(found.best.widths.values()) >= 4
    assert judge(found.tried[0][0].widths) == -100.0
    assert found.best in [each for each, _ in found.tried]
    assert {score for _, score in found.tried} == {-100.0, 0.0}


class TestBadInput:
    def test_a_budget_below_everything(self):
        losses, costs = _tables(0)
        for act in (allocate, lambda *given: search(*given, lambda widths: 0.0)):
            for budget in (1.0, float("nan")):
                with pytest.raises(BadValueError, match="cannot be met") as caught:
                    act(losses, costs, budget)
                assert "narrowest" in caught.value.why

    def test_tables_that_do_not_fit(self):
        losses, costs = _tables(0)
        del costs["layer1"][6]
        with pytest.raises(BadValueError, match="layer1 are not of the same widths"):
            allocate(losses, costs, 1e9)
        with pytest.raises(BadValueError, match="extra are not"):
            allocate(losses, {**costs, "extra": {8: 1.0}, "layer1": costs["layer0"]}, 1e9)
        with pytest.raises(BadValueError, match="no layer"):
            allocate({}, {}, 1.0)


def test_losses_of_a_network_one_layer_and_width_at_a_time():
    torch.manual_seed(3)
    model, x = small_network(), images(16)
    with torch.no_grad():
        wanted = model(x)

    def evaluate(candidate):
        with torch.no_grad():
            return -float((candidate(x) - wanted).pow(2).mean())

    tables = calibrate_widths(model, [x], QuantConfig(), (8, 2))
    assert tables[2]["4"].weight.bits == tables[2]["4"].input.bits == 2
    losses = width_losses(model, tables, evaluate)
    assert list(losses) == ["0", "2", "4", "8"]
    for name, row in losses.items():
        alone = fake_quantized(model, {name: tables[2][name]})
        assert row[2] == evaluate(model) - evaluate(alone)
        assert row[2] > row[8] >= 0
    scales = mixed(tables, {"0": 8, "2": 2, "4": 8, "8": 8})
    assert [each.weight.bits for each in scales.values()] == [8, 2, 8, 8]
    again = calibrate(model, [x], QuantConfig(activation_bits=2, weight_bits=2))
    assert torch.equal(scales["2"].weight.scale, again["2"].weight.scale)
