"""Schedules, flat optimisers against torch's own, the choice of eager or captured steps."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict

import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.graphs import EagerStep, make_step
from narrowgauge_lab.optim import SGD, Adadelta, Adam, FlatOptimizer
from narrowgauge_lab.schedule import Cosine, MultiStep, Step, milestones

CPU = torch.device("cpu")


def test_step_is_torchs_step_lr() -> None:
    schedule = Step(1.0, 0.7)
    parameter = nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(theirs, step_size=1, gamma=0.7)
    for epoch in range(12):
        assert schedule.rate(epoch) == pytest.approx(theirs.param_groups[0]["lr"])
        theirs.step()
        scheduler.step()


def test_multi_step_is_the_published_schedule() -> None:
    schedule = MultiStep(0.1, milestones(200, (0.5, 0.75)))

    changes = [e for e in range(1, 200) if schedule.rate(e) != schedule.rate(e - 1)]
    assert changes == [100, 150]
    assert [schedule.rate(e) for e in (0, 99, 100, 149, 150, 199)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )


@pytest.mark.parametrize("least", [0.0, 0.01])
def test_cosine_is_torchs_cosine_annealing(least: float) -> None:
    schedule = Cosine(0.1, 12, least)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=12, eta_min=least)
    for epoch in range(12):
        assert schedule.rate(epoch) == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-6)
        theirs.step()
        scheduler.step()
    assert schedule.rate(12) == schedule.rate(40) == pytest.approx(least), "there it stays"


def test_warm_up_is_the_first_epochs_only() -> None:
    schedule = MultiStep(0.1, (4,), warm_up_epochs=1, warm_up_rate=0.01)

    assert [schedule.rate(e) for e in range(6)] == pytest.approx([0.01, 0.1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("epochs", "expected"), [(200, (100, 150)), (4, (2, 3)), (3, (2, 3)), (2, (1, 2)), (1, (1, 1))]
)
def test_milestones_scale_and_the_first_epoch_has_the_full_rate(
    epochs: int, expected: tuple
) -> None:
    assert milestones(epochs, (0.5, 0.75)) == expected
    assert MultiStep(0.1, milestones(epochs, (0.5, 0.75))).rate(0) == 0.1


def test_a_fraction_that_floats_cannot_hold_is_not_rounded_up() -> None:
    assert milestones(30, (0.1,)) == (3,)
    assert milestones(100, (0.07, 0.29, 0.58)) == (7, 29, 58)


@pytest.mark.parametrize("fractions", [(0.75, 0.5), (0.0, 0.5), (0.5, 1.0), (0.5, 0.5)])
def test_milestones_must_rise_within_the_run(fractions: tuple) -> None:
    with pytest.raises(BadValueError, match="do not rise"):
        milestones(200, fractions)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)
    )


_OURS_AND_THEIRS = [
    pytest.param(
        functools.partial(SGD, rate=0.1, momentum=0.9, weight_decay=1e-2),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
        id="sgd",
    ),
    pytest.param(
        functools.partial(SGD, rate=0.1, momentum=0.0),
        functools.partial(torch.optim.SGD, lr=0.1),
        id="sgd-plain",
    ),
    pytest.param(
        functools.partial(SGD, rate=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
        id="sgd-nesterov",
    ),
    pytest.param(
        # The convolution's bias has a gradient of rounding only, which Adam without eps would make
        # whole steps of.
        functools.partial(Adam, rate=1e-2, eps=1e-3),
        functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3),
        id="adam",
    ),
    pytest.param(
        functools.partial(Adam, rate=1e-2, betas=(0.99, 0.999), weight_decay=1e-2),
        functools.partial(torch.optim.Adam, lr=1e-2, betas=(0.99, 0.999), weight_decay=1e-2),
        id="adam-branchynet",
    ),
    pytest.param(
        functools.partial(Adadelta, rate=1.0),
        functools.partial(torch.optim.Adadelta, lr=1.0, rho=0.9, eps=1e-6),
        id="adadelta",
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), _OURS_AND_THEIRS)
def test_a_flat_optimiser_walks_as_torchs_does(
    ours: Callable[..., FlatOptimizer], theirs: Callable[..., torch.optim.Optimizer]
) -> None:
    """30 steps, the rate changed on the way. Rounding differs (other order of products): 1e-5."""
    flat_net, torch_net = _net(), _net()
    flat, reference = ours(flat_net), theirs(torch_net.parameters())
    base = float(flat.rate)
    for step in range(30):
        rate = base * (0.5 if step >= 15 else 1.0)
        flat.set_rate(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        images = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(step))
        flat.differentiate(flat_net(images).pow(2).mean())
        flat.step()
        reference.zero_grad()
        torch_net(images).pow(2).mean().backward()
        reference.step()

    for one, other in zip(flat_net.parameters(), torch_net.parameters()):
        difference = (one.detach() - other.detach()).abs().max().item()
        assert difference <= 1e-5 * max(1.0, other.detach().abs().max().item())


def test_parameters_are_views_and_keep_their_values() -> None:
    model = _net()
    before: Dict[str, Any] = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = SGD(model, rate=0.1)

    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    optimizer.values.zero_()
    assert all(not p.detach().any() for p in model.parameters())
    model.load_state_dict({**model.state_dict(), **before})
    assert optimizer.values.abs().sum() > 0, "loading a state fills the flat tensor"


def test_every_parameter_begins_aligned_and_the_gaps_stay_zero() -> None:
    model = _net()
    optimizer = Adadelta(model, rate=1.0)
    for _ in range(3):
        optimizer.differentiate(model(torch.randn(4, 2, 4, 4)).pow(2).mean())
        optimizer.step()

    places = [p.data_ptr() - optimizer.values.data_ptr() for p in model.parameters()]
    assert all(place % 64 == 0 for place in places)
    used = torch.zeros_like(optimizer.values, dtype=torch.bool)
    for place, parameter in zip(places, model.parameters()):
        used[place // 4 : place // 4 + parameter.numel()] = True
    assert used.sum() == sum(p.numel() for p in model.parameters()) < len(used)
    assert not optimizer.values[~used].any()


def test_frozen_parameters_stay_out() -> None:
    model = _net()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    optimizer = SGD(model, rate=0.1, weight_decay=0.5)
    optimizer.differentiate(model(torch.ones(2, 2, 4, 4)).sum())
    optimizer.step()

    assert torch.equal(model[0].weight, frozen)


def test_an_optimiser_state_comes_back() -> None:
    one, other = Adadelta(_net(), rate=1.0), Adadelta(_net(), rate=1.0)
    one.gradient.fill_(0.5)
    one.step()
    other.values.copy_(one.values)
    other.load_state_dict(one.state_dict())
    for optimizer in (one, other):
        optimizer.gradient.fill_(-0.25)
        optimizer.step()

    assert torch.equal(one.values, other.values)


def test_adams_steps_come_back_and_are_not_counted_where_one_is_skipped() -> None:
    one, other = Adam(_net(), rate=0.1), Adam(_net(), rate=0.1)
    for optimizer in (one, other):
        optimizer.gradient.fill_(0.5)
    one.step()
    other.values.copy_(one.values)
    other.load_state_dict(one.state_dict())
    other.gradient.fill_(float("nan"))
    other.step(skip=torch.tensor(True))
    for optimizer in (one, other):
        optimizer.gradient.fill_(-0.25)
        optimizer.step()

    assert float(other.state["steps"]) == 2
    assert torch.equal(one.values, other.values)


def test_a_loss_of_some_parameters_only_leaves_zeros_for_the_others() -> None:
    model = _net()
    optimizer = SGD(model, rate=0.1)
    optimizer.gradient.fill_(3.0)
    optimizer.differentiate_partly(model[0](torch.ones(1, 2, 4, 4)).sum())
    first = model[0].weight.numel()

    assert optimizer.gradient[:first].ne(0).all()
    assert not optimizer.gradient[sum(optimizer.extents()[:2]) :].any()
    assert sum(optimizer.extents()) == optimizer.gradient.numel()
    with pytest.raises(RuntimeError):
        optimizer.differentiate(model[0](torch.ones(1, 2, 4, 4)).sum())


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_cpu_has_no_graphs(graphs: str) -> None:
    seen = []
    step = make_step(graphs, seen.append, 4, CPU)
    step(torch.arange(3))

    assert isinstance(step, EagerStep)
    assert len(seen) == 1
    assert not torch_compat.graphs_available(CPU)


def test_unknown_graphs_value_is_refused() -> None:
    with pytest.raises(BadValueError, match="graphs 'on'"):
        make_step("on", lambda indices: None, 4, CPU)
