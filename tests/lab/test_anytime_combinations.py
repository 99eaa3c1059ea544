"""Every system by every way to combine its exits' losses: one update of the real training step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Callable, Dict, List

import numpy as np
import pytest
import torch
from training_cases import CPU

from narrowgauge_lab import precision
from narrowgauge_lab.anytime.feeds import make_splits
from narrowgauge_lab.anytime.gradients import (
    Combination,
    Orthogonalised,
    PCGrad,
    PerExit,
    Sum,
    Weighted,
    products,
)
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.objective import ExitLosses, Objective
from narrowgauge_lab.anytime.stepping import ExitStepper
from narrowgauge_lab.anytime.systems.branchynet import branchy_net
from narrowgauge_lab.anytime.systems.ddnn import DDNN, Design, DeviceLosses
from narrowgauge_lab.anytime.systems.iresnext import iresnext
from narrowgauge_lab.anytime.systems.nested import NestedNet
from narrowgauge_lab.anytime.systems.pondering import PonderLoss
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet
from narrowgauge_lab.anytime.views import CAMERAS, Packed, Tiles, cameras
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.data import synthetic_data
from narrowgauge_lab.distributed import ALONE
from narrowgauge_lab.optim import SGD, FlatOptimizer

RATE = 0.25


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclasses.dataclass(frozen=True)
class System:
    """A thin network of a system, the losses that it is trained by, and images for it."""

    make: Callable[[], AnytimeNetwork]
    objective: Callable[[AnytimeNetwork, Combination], Objective] = lambda net, way: ExitLosses(
        net.exits, way
    )
    channels: int = 3
    size: int = 32
    seen_by_cameras: bool = False

    def feed(self) -> Feed:
        data = synthetic_data(
            0, channels=self.channels, size=self.size, classes=10, train=16, test=4
        )
        data = cameras(data, 0) if self.seen_by_cameras else data
        return make_splits(data, CPU, validation=4).training


def _ddnn(device: str, local: str, seen_by_cameras: bool) -> System:
    source, shape = (
        (Packed(CAMERAS), (3, 32, 32)) if seen_by_cameras else (Tiles(3, 2), (3, 16, 10))
    )
    bits = 1 if device == "binary" else 32
    design = Design(device=device, local=local, width=0.05, filters=1, bits=bits)
    return System(
        lambda: DDNN(source, shape, 10, design),
        lambda net, way: DeviceLosses(way),
        seen_by_cameras=seen_by_cameras,
    )


SYSTEMS: Dict[str, System] = {
    "b-lenet": System(lambda: branchy_net("b-lenet", 0.4), channels=1, size=28),
    "b-alexnet": System(lambda: branchy_net("b-alexnet", 0.1)),
    "b-resnet-110": System(lambda: branchy_net("b-resnet-110", 0.1)),
    "nested": System(lambda: NestedNet(10, 3, 1, 2)),
    "iresnext-shared": System(lambda: iresnext("shared", 1, 0.25, 10)),
    "iresnext-incremental": System(lambda: iresnext("incremental", 1, 0.25, 10)),
    "ddnn-residual-tiles": _ddnn("residual", "mp", seen_by_cameras=False),
    "ddnn-binary-cameras": _ddnn("binary", "cc", seen_by_cameras=True),
}
ONE_EXIT = ("sact", "act", "plain")


class _Step:
    """One update without momentum: what it took of each exit, and what became of the weights."""

    def __init__(self, system: System, way: Combination) -> None:
        torch.manual_seed(0)
        net, feed = system.make(), system.feed()
        net.train()
        self.objective = system.objective(net, way)
        inner = SGD(net, RATE, momentum=0.0)
        self.optimizer: FlatOptimizer = way.optimizer(inner, self.objective.exits)
        before = inner.values.clone()
        stepper = ExitStepper(
            net, self.optimizer, feed, precision.enter("fp32", CPU), ALONE, 8, "off", self.objective
        )
        stepper(torch.arange(8))
        self.moved = ((before - inner.values) / RATE).double().numpy()
        self.loss = float(stepper.totals[0]) / 8
        self.sums = stepper.sums

    @property
    def rows(self) -> torch.Tensor:
        """The gradient of each exit; the last row is of what is never projected."""
        assert isinstance(self.optimizer, PerExit)
        return self.optimizer.gradient.double()


@functools.lru_cache(maxsize=None)
def _step(name: str, way: Combination) -> _Step:
    """Of one of SYSTEMS; several tests look at one step."""
    return _Step(SYSTEMS[name], way)


def _pcgrad(rows: np.ndarray) -> List[np.ndarray]:
    found = []
    for i, row in enumerate(rows):
        mine = row
        for j, other in enumerate(rows):
            if i != j and mine @ other < 0:
                mine = mine - (mine @ other) / (other @ other) * other
        found.append(mine)
    return found


@pytest.mark.parametrize(
    ("name", "last_first"),
    [*((name, False) for name in SYSTEMS), ("b-lenet", True), ("ddnn-binary-cameras", True)],
)
def test_by_osgd_no_exit_moves_weights_along_one_of_more_priority(
    name: str, last_first: bool
) -> None:
    way = Orthogonalised(last_first=last_first)
    step = _step(name, way)
    rows, rest = step.rows[:-1], step.rows[-1]
    projected = (way.coefficients(products(rows)) @ rows).numpy()

    assert np.isfinite(step.loss)
    norms = np.linalg.norm(projected, axis=1)
    assert norms.all(), "each exit has a direction of its own"
    cosines = (projected @ projected.T) / np.outer(norms, norms)
    assert np.abs(cosines - np.eye(len(cosines))).max() < 1e-4
    first = len(rows) - 1 if last_first else 0
    assert np.array_equal(projected[first], rows[first].numpy())
    raw = (rows @ rows.t()).numpy()
    assert np.abs(raw - np.diag(np.diag(raw))).max() > 0, "there was something to project"
    _same_direction(step.moved, projected.sum(0) + rest.numpy())


@pytest.mark.parametrize("name", SYSTEMS)
def test_by_pcgrad_no_exit_points_against_another(name: str) -> None:
    step = _step(name, PCGrad())
    rows, rest = step.rows[:-1].numpy(), step.rows[-1].numpy()
    projected = _pcgrad(rows)

    assert np.isfinite(step.loss)
    if len(rows) == 2:  # of more, a later projection may undo an earlier one: the paper's own
        scale = np.prod(np.linalg.norm(rows, axis=1))
        assert projected[0] @ rows[1] >= -1e-6 * scale
        assert projected[1] @ rows[0] >= -1e-6 * scale
    _same_direction(step.moved, sum(projected) + rest)


@pytest.mark.parametrize("name", SYSTEMS)
def test_by_weights_an_exit_counts_as_much_as_it_is_given(name: str) -> None:
    """Against the gradients of the exits one by one, which OSGD's step has before it projects."""
    exits = SYSTEMS[name].make().exits
    weights = tuple(1.0 / (number + 1) for number in range(exits))
    rows = _step(name, Orthogonalised()).rows.numpy()

    weighted, plain = _step(name, Weighted(weights)), _step(name, Sum())

    assert np.isfinite(weighted.loss)
    assert weighted.loss < plain.loss
    _same_direction(plain.moved, rows.sum(0))
    _same_direction(weighted.moved, np.asarray((*weights, 1.0)) @ rows)


def _same_direction(moved: np.ndarray, expected: np.ndarray) -> None:
    """Weights in float32 keep six digits of what they moved by."""
    assert np.linalg.norm(moved) > 0
    assert np.linalg.norm(moved - expected) < 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", ONE_EXIT)
@pytest.mark.parametrize("way", [Sum(), Weighted((0.5,)), PCGrad(), Orthogonalised()], ids=str)
def test_one_exit_is_trained_by_its_loss_and_its_price(kind: str, way: Combination) -> None:
    """There is nothing to project it on, and the price of thinking is never projected: by each way
    but a weight of its own the update is that of the sum."""

    def objective(net: AnytimeNetwork, way: Combination) -> Objective:
        if kind == "plain":
            return ExitLosses(1, way)
        found = PonderLoss(0.01, 0, CPU)
        found.combination = way
        return found

    step = _Step(System(lambda: AdaptiveResNet(kind, 2, 4, 10), objective), way)

    task, price = float(step.sums[0]) / 8, float(step.sums[-1]) / 8
    assert (price > 0) == (kind != "plain")
    assert step.loss == pytest.approx(way.weights(1)[0] * task + price)
    assert np.linalg.norm(step.moved) > 0
    if way.weights(1) == (1.0,):
        plain = _Step(System(lambda: AdaptiveResNet(kind, 2, 4, 10), objective), Sum())
        _same_direction(step.moved, plain.moved)
