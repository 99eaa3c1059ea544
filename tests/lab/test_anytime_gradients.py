"""Combined gradients, held against Gram and Schmidt's process and PCGrad written out in float64."""

from __future__ import annotations

import math
from typing import Callable, List

import numpy as np
import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.gradients import (
    Orthogonalised,
    PCGrad,
    PerExit,
    Sum,
    Weighted,
    cosines,
    gram_schmidt,
    pcgrad,
    products,
)
from narrowgauge_lab.optim import SGD, Adam

Vectors = List[np.ndarray]


def _slow_gram_schmidt(
    rows: np.ndarray, negative_only: bool = False, last_first: bool = False
) -> Vectors:
    """By the definition, vector by vector."""
    order = range(len(rows))[:: -1 if last_first else 1]
    found: dict = {}
    for i in order:
        mine = rows[i].astype(np.float64)
        for before in found.values():
            square = float(before @ before)
            along = float(mine @ before)
            if square > 0 and not (negative_only and along >= 0):
                mine = mine - along / square * before
        found[i] = mine
    return [found[i] for i in range(len(rows))]


def _slow_pcgrad(rows: np.ndarray) -> Vectors:
    found = []
    for i, row in enumerate(rows):
        mine = row.astype(np.float64)
        for j, other in enumerate(rows):
            wide = other.astype(np.float64)
            if i != j and mine @ wide < 0:
                mine = mine - (mine @ wide) / (wide @ wide) * wide
        found.append(mine)
    return found


def _rows(count: int, size: int, seed: int) -> torch.Tensor:
    """Vectors that share a direction, as gradients of exits do, some the other way round."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(size, generator=generator)
    signs = torch.randint(0, 2, (count, 1), generator=generator) * 2.0 - 1
    noise = torch.randn(count, size, generator=generator)
    scale = 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator).float()
    return (signs * shared + noise) * scale


def _combined(chosen: torch.Tensor, rows: torch.Tensor) -> np.ndarray:
    return (chosen @ rows.double()).numpy()


def _close(one: np.ndarray, other: np.ndarray, scale: float, tolerance: float = 1e-9) -> bool:
    return float(np.abs(one - other).max()) <= tolerance * max(scale, 1e-30)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("negative_only", [False, True])
@pytest.mark.parametrize("last_first", [False, True])
def test_gram_schmidt_is_the_slow_one(seed: int, negative_only: bool, last_first: bool) -> None:
    rows = _rows(2 + seed, 50, seed)

    found = _combined(gram_schmidt(products(rows), negative_only, last_first), rows)

    expected = _slow_gram_schmidt(rows.numpy(), negative_only, last_first)
    for one, other, row in zip(found, expected, rows):
        assert _close(one, other, float(row.norm()))


@pytest.mark.parametrize("seed", range(6))
def test_every_vector_is_orthogonal_to_all_before_it(seed: int) -> None:
    rows = _rows(5, 40, seed)
    found = _combined(gram_schmidt(products(rows)), rows)

    for i in range(5):
        for j in range(i):
            scale = float(rows[i].norm()) * float(np.linalg.norm(found[j]))
            assert abs(found[i] @ found[j]) <= 1e-10 * scale
        assert np.linalg.norm(found[i]) <= float(rows[i].norm()) * (1 + 1e-6)
    assert np.array_equal(found[0], rows[0].double().numpy()), "the first has priority"


def test_priority_may_be_the_last_ones() -> None:
    rows = _rows(3, 20, 1)
    found = _combined(gram_schmidt(products(rows), last_first=True), rows)

    assert np.array_equal(found[2], rows[2].double().numpy())
    assert abs(found[0] @ found[2]) < 1e-6 * float(rows[0].norm() * rows[2].norm())


@pytest.mark.parametrize("process", [gram_schmidt, pcgrad])
def test_orthogonal_vectors_stay_as_they_are(process: Callable[..., torch.Tensor]) -> None:
    rows = torch.diag(torch.tensor([3.0, -0.5, 1e-4, 7e3]))

    assert torch.equal(process(products(rows)), torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("process", [gram_schmidt, pcgrad])
def test_a_vector_of_zeros_changes_nothing(process: Callable[..., torch.Tensor]) -> None:
    rows = _rows(3, 20, 4)
    rows[1] = 0
    others = rows[[0, 2]]

    found = _combined(process(products(rows)), rows)
    expected = _combined(process(products(others)), others)

    assert np.allclose(found[[0, 2]], expected, rtol=1e-12, atol=0)
    assert not found[1].any()


def test_what_others_span_has_no_direction_of_its_own() -> None:
    """Twice the first, up to float32's rounding: the rest is noise, and the third is not turned by
    it."""
    rows = _rows(3, 200, 5)
    rows[1] = 2 * rows[0] + 1e-7 * rows[0].abs().max() * torch.ones(200)

    found = _combined(gram_schmidt(products(rows)), rows)

    assert not found[1].any()
    without = rows[[0, 2]]
    alone = _combined(gram_schmidt(products(without)), without)
    assert _close(found[2], alone[1], float(rows[2].norm()))


@pytest.mark.parametrize("seed", range(6))
def test_pcgrad_is_the_slow_one(seed: int) -> None:
    rows = _rows(4, 30, seed)
    found = _combined(pcgrad(products(rows)), rows)

    for one, other, row in zip(found, _slow_pcgrad(rows.numpy()), rows):
        assert _close(one, other, float(row.norm()), 1e-8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "projection", [Orthogonalised(), Orthogonalised(per_tensor=True), PCGrad()], ids=str
)
@pytest.mark.parametrize("place", [0, 2])
def test_what_is_not_finite_stays_so(bad: float, projection: object, place: int) -> None:
    """Or a gradient that overflowed under a loss scale would go unnoticed."""
    optimizer = PerExit(SGD(nn.Linear(4, 2), 0.1), 3, projection)  # type: ignore[arg-type]
    rows = _rows(3, optimizer.values.numel(), 0)
    rows[place, 3] = bad

    assert not torch.isfinite(optimizer.combined(rows)).all()


def test_products_of_parts_add_up() -> None:
    rows = _rows(3, 24, 2)

    parts = products(rows, [8, 10, 6])

    assert parts.shape == (3, 3, 3)
    assert torch.allclose(parts.sum(0), products(rows), rtol=1e-12)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _losses(model: nn.Module, step: int) -> List[torch.Tensor]:
    """Three losses of one forward pass; the second does not depend on the last layer."""
    images = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    hidden = model[1](model[0](images))  # type: ignore[index]
    logits = model[2](hidden)  # type: ignore[index]
    return [logits.pow(2).mean(), hidden.sum() * 0.01, -logits[:, 0].mean()]


def _flat_gradients(model: nn.Module, losses: List[torch.Tensor]) -> torch.Tensor:
    parameters = list(model.parameters())
    rows = []
    for loss in losses:
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters)]
        rows.append(torch.cat([part.reshape(-1) for part in parts]))
    return torch.stack(rows)


def test_an_update_is_by_the_sum_of_the_projected_gradients() -> None:
    """One plain step, against the slow process on gradients that autograd gives one by one."""
    model, reference = _net(), _net()
    optimizer = PerExit(SGD(model, rate=0.5, momentum=0.0), 3, Orthogonalised())
    optimizer.differentiate_each(_losses(model, 0))
    optimizer.step()

    rows = _flat_gradients(reference, _losses(reference, 0)).numpy()
    moved = sum(_slow_gram_schmidt(rows))
    before = torch.cat([p.detach().reshape(-1) for p in reference.parameters()]).double().numpy()
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().numpy()
    assert np.abs(after - (before - 0.5 * moved)).max() < 1e-6


def test_projection_may_be_of_each_parameter_by_itself() -> None:
    model = _net()
    optimizer = PerExit(SGD(model, 0.5, momentum=0.0), 3, Orthogonalised(per_tensor=True))
    optimizer.differentiate_each(_losses(model, 0))
    combined = optimizer.combined(optimizer.gradient[:-1])

    start = 0
    for parameter, extent in zip(model.parameters(), optimizer.inner.extents()):
        part = optimizer.gradient[:3, start : start + extent].numpy()
        mine = combined[start : start + extent].double().numpy()
        assert np.abs(mine - sum(_slow_gram_schmidt(part))).max() < 1e-5
        assert not mine[parameter.numel() :].any(), "the gap stays 0"
        start += extent


def test_rescaled_gradients_have_their_norms_back() -> None:
    rows = _rows(4, 30, 3)
    found = _combined(Orthogonalised(rescale=True).coefficients(products(rows)), rows)

    plain = _slow_gram_schmidt(rows.numpy())
    for one, other, row in zip(found, plain, rows):
        assert np.linalg.norm(one) == pytest.approx(float(row.norm()), rel=1e-6)
        cosine = one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
        assert cosine == pytest.approx(1.0)


def test_the_extra_loss_is_not_projected() -> None:
    """It points against the first exit, and is added as it is."""
    model = _net()
    optimizer = PerExit(SGD(model, 0.1, momentum=0.0), 1, Orthogonalised())
    loss = _losses(model, 0)[0]
    before = optimizer.values.clone()
    optimizer.differentiate_each([loss], extra=-loss)
    optimizer.step()

    assert torch.equal(optimizer.values, before)


def test_an_exit_that_is_left_out_gives_zeros() -> None:
    model = _net()
    optimizer = PerExit(SGD(model, 0.1), 3, Orthogonalised())
    optimizer.gradient.fill_(7.0)
    one, _, three = _losses(model, 0)
    optimizer.differentiate_each([one, None, three])

    assert not optimizer.gradient[1].any()
    assert not optimizer.gradient[3].any()
    assert optimizer.gradient[0].any()
    assert optimizer.gradient[2].any()


class _Unchanged(Orthogonalised):
    """A projection that does nothing: what is left is the optimiser."""

    def coefficients(self, gram: torch.Tensor) -> torch.Tensor:
        return torch.eye(gram.shape[-1], dtype=gram.dtype).expand_as(gram)


@pytest.mark.parametrize("momentum", [None, 0.9], ids=["raw", "after momentum"])
def test_without_a_change_it_is_the_optimiser_of_the_sum(momentum: float) -> None:
    """Weight decay, momentum and an extra loss included, ten steps."""
    ours, theirs = _net(), _net()
    optimizer = PerExit(SGD(ours, 0.1, 0.9, weight_decay=1e-2), 3, _Unchanged(momentum=momentum))
    plain = SGD(theirs, 0.1, 0.9, weight_decay=1e-2)
    for step in range(10):
        mine, its = _losses(ours, step), _losses(theirs, step)
        optimizer.differentiate_each(mine, extra=mine[0] * 0.1)
        optimizer.step()
        plain.differentiate(its[0] + its[1] + its[2] + its[0] * 0.1)
        plain.step()

    assert torch.allclose(optimizer.values, plain.values, atol=1e-6)


def test_projecting_momentum_is_not_projecting_gradients() -> None:
    nets = [_net(), _net()]
    walks = [
        PerExit(SGD(nets[0], 0.1, 0.9), 3, Orthogonalised()),
        PerExit(SGD(nets[1], 0.1, 0.9), 3, Orthogonalised(momentum=0.9)),
    ]
    for step in range(3):
        for net, optimizer in zip(nets, walks):
            optimizer.differentiate_each(_losses(net, step))
            optimizer.step()
        if step == 0:
            assert torch.allclose(walks[0].values, walks[1].values, atol=1e-6)

    assert not torch.allclose(walks[0].values, walks[1].values, atol=1e-4)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_skipped_update_changes_nothing(momentum: float) -> None:
    model = _net()
    optimizer = PerExit(SGD(model, 0.1), 3, Orthogonalised(momentum=momentum))
    optimizer.differentiate_each(_losses(model, 0))
    optimizer.step()
    before = [optimizer.values.clone(), *(t.clone() for t in optimizer.state.values())]
    optimizer.gradient.fill_(math.nan)
    optimizer.step(skip=torch.tensor(True))

    after = [optimizer.values, *optimizer.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after))


def test_its_state_comes_back() -> None:
    nets = [_net(), _net()]
    one, other = (PerExit(SGD(net, 0.1), 3, Orthogonalised(momentum=0.5)) for net in nets)
    one.differentiate_each(_losses(nets[0], 0))
    one.step()
    other.values.copy_(one.values)
    other.load_state_dict(one.state_dict())
    for net, optimizer in zip(nets, (one, other)):
        optimizer.differentiate_each(_losses(net, 1))
        optimizer.step()

    assert set(one.state_dict()) == {"momentum", "exit_momentum"}
    assert torch.equal(one.values, other.values)


def test_the_rate_is_that_of_the_inner_optimiser() -> None:
    optimizer = PerExit(Adam(_net(), 0.1), 3, PCGrad())
    optimizer.set_rate(0.25)

    assert float(optimizer.inner.rate) == 0.25


@pytest.mark.parametrize("make", [lambda m: Adam(m, 0.1), lambda m: SGD(m, 0.1, nesterov=True)])
def test_momentum_of_exits_goes_with_plain_sgd_only(make: Callable[..., SGD]) -> None:
    with pytest.raises(BadValueError, match="plain SGD only"):
        PerExit(make(_net()), 2, Orthogonalised(momentum=0.9))


@pytest.mark.parametrize("momentum", [1.0, -0.1, math.nan])
def test_a_momentum_beyond_its_range_is_refused(momentum: float) -> None:
    with pytest.raises(BadValueError, match="momentum"):
        Orthogonalised(momentum=momentum)
    with pytest.raises(BadValueError, match="momentum"):
        PCGrad(momentum=momentum)


@pytest.mark.parametrize("weights", [(), (0.0, 0.0), (1.0, -1.0), (math.nan,), (math.inf, 1.0)])
def test_weights_that_train_nothing_are_refused(weights: tuple) -> None:
    with pytest.raises(BadValueError, match="loss weights"):
        Weighted(weights)


def test_weights_are_one_for_each_exit() -> None:
    assert Weighted((1.0, 0.3)).weights(2) == (1.0, 0.3)
    assert Sum().weights(3) == (1.0, 1.0, 1.0)
    with pytest.raises(BadValueError, match="2 loss weights for 3 exits"):
        Weighted((1.0, 0.3)).weights(3)


def test_cosines_are_those_of_the_flat_gradients() -> None:
    model = _net()
    table = cosines(_losses(model, 0), list(model.parameters()))

    rows = _flat_gradients(model, _losses(model, 0)).double().numpy()
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.allclose(table.numpy(), unit @ unit.T, atol=1e-12)
    assert np.allclose(np.diag(table.numpy()), 1.0)


def test_a_gradient_of_zeros_has_no_cosine() -> None:
    model = _net()
    first = _losses(model, 0)[0]
    table = cosines([first, first * 0], list(model.parameters()))

    assert table[0, 0] == pytest.approx(1.0)
    assert torch.isnan(table[0, 1])
