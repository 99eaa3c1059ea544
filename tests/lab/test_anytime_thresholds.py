"""Thresholds fitted on a validation split: what they reach, and what they must not see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from exit_cases import logits_of

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime import thresholds as module
from narrowgauge_lab.anytime.costs import ExitCosts
from narrowgauge_lab.anytime.policies import Entropy, MaxProbability, parse, simulate
from narrowgauge_lab.anytime.thresholds import (
    METHODS,
    LabelledLogits,
    OperatingPoint,
    ValidationLogits,
    choose,
    fit,
    for_shares,
    front,
    score,
)
from narrowgauge_scores.answers import entropies
from narrowgauge_scores.points import exits_taken, geometric_thresholds
from narrowgauge_scores.side_file import RunLogits, Split

COSTS = ExitCosts((10, 40, 100), (10, 35, 90), (8, 28, 58), (2, 2, 2))


def made(samples: int = 400, exits: int = 3, seed: int = 0, split: str = "validation"):
    """Logits that are the likelier right the surer they are, and better from exit to exit."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 5, samples)
    hard = generator.uniform(0, 1, samples)
    logits = generator.normal(0, 1, (exits, samples, 5))
    for number in range(exits):
        logits[number, np.arange(samples), labels] += 6 * (1 - hard) * (1 + number)
    kind = ValidationLogits if split == "validation" else LabelledLogits
    return kind(split, logits.astype(np.float32), labels)


def test_a_score_is_of_the_answers_that_samples_leave_with() -> None:
    told = logits_of([3.0, 0.0, -3.0, 0.1], [3.0, 3.0, -3.0, 3.0], [-3.0, 3.0, 3.0, 3.0])
    data = LabelledLogits("validation", told, torch.tensor([0, 0, 1, 1]))
    point = score(parse("max-probability:0.9"), data, COSTS)
    # Samples 0 and 2 leave at exit 0, both right; 1 (right) and 3 (wrong) at exit 1.
    assert point.shares == (0.5, 0.5, 0.0)
    assert point.accuracy == pytest.approx(75.0)
    assert point.macs == pytest.approx((10 + 10 + 40 + 40) / 4)
    assert parse(point.policy).thresholds == (0.9,)


def test_macs_that_depend_on_the_sample_are_taken_where_there_are_any() -> None:
    told = logits_of([3.0, 0.0], [3.0, 3.0])
    macs = np.array([[1.0, 2.0], [30.0, 40.0]])
    data = LabelledLogits("validation", told, torch.tensor([0, 0]), macs)
    point = score(parse("max-probability:0.9"), data, COSTS)
    assert point.macs == pytest.approx((1 + 40) / 2)


@pytest.mark.parametrize("kind", ["entropy", "entropy-normalised", "max-probability", "margin"])
@pytest.mark.parametrize("method", METHODS)
def test_points_rise_in_cost_and_accuracy_and_are_what_their_policy_comes_to(
    kind: str, method: str
) -> None:
    data = made()
    points = fit(data, COSTS, kind, method)
    assert len(points) >= 3
    for cheap, dear in zip(points, points[1:]):
        assert cheap.macs < dear.macs
        assert cheap.accuracy < dear.accuracy
    for point in points:
        assert score(parse(point.policy, 3), data, COSTS) == point
        assert sum(point.shares) == pytest.approx(1.0)


def test_thresholds_save_work_at_no_loss_and_beat_stopping_everybody() -> None:
    points = fit(made(), COSTS, "entropy", "knapsack")
    alone = [100.0 * float(right.double().mean()) for right in made().right]
    best = choose(points)
    assert best.accuracy >= alone[-1]
    assert best.macs < COSTS.cumulative[-1]


def test_one_threshold_of_the_knapsack_is_the_best_there_is_at_its_price() -> None:
    data = made(samples=60, exits=2)
    costs = ExitCosts((10, 40), (10, 40), (8, 28), (2, 2))
    found = fit(data, costs, "max-probability", "knapsack")
    rule = MaxProbability([0.0])
    places = [*rule.measure(data.logits[0]).tolist(), float("inf")]
    others = [score(MaxProbability([place]), data, costs) for place in places]
    for price in (1e-3, 1e-2, 0.1, 1.0):

        def worth(point: OperatingPoint, price: float = price) -> float:
            return point.accuracy / 100 - price * point.macs / 40

        assert max(map(worth, found)) == pytest.approx(max(map(worth, others)))


def test_moving_one_threshold_of_the_knapsack_alone_gains_nothing() -> None:
    data, price = made(samples=60), 0.1
    found = fit(data, COSTS, "max-probability", "knapsack")

    def worth(point: OperatingPoint) -> float:
        return point.accuracy / 100 - price * point.macs / 100

    best = max(found, key=worth)
    thresholds = parse(best.policy, 3).thresholds
    for place, value in itertools.product((0, 1), [0.0, 0.4, 0.6, 0.8, 0.9, 0.99, 2.0]):
        moved = [*thresholds]
        moved[place] = value
        assert worth(score(MaxProbability(moved), data, COSTS)) <= worth(best) + 1e-12


def test_geometric_shares_fall_and_grow_with_the_factor() -> None:
    points = fit(made(), COSTS, "max-probability", "geometric")
    assert points[0].shares[0] == pytest.approx(0.95, abs=0.01)
    first, last = zip(*((point.shares[0], point.shares[-1]) for point in points))
    assert list(first) == sorted(first, reverse=True)
    assert list(last) == sorted(last)
    assert last[-1] > 2 * last[0]


@pytest.mark.parametrize("kind", ["entropy", "entropy-normalised", "max-probability", "margin"])
@pytest.mark.parametrize("method", ["grid", "knapsack"])
def test_no_sample_leaves_exits_that_are_sure_and_wrong(kind: str, method: str) -> None:
    """Of entropies of 0 and of probabilities of 1: nothing but a threshold that nobody meets helps,
    one for each exit or one for all."""
    for exits in (3, 5):
        data = made(exits=exits)
        told = data.logits.clone()
        told[:-1] = 0.0
        told[:-1, torch.arange(len(data.labels)), (data.labels + 1) % 5] = 200.0
        costs = ExitCosts(
            tuple(range(10, 10 * exits + 1, 10)), tuple(range(10, 10 * exits + 1, 10)), (), ()
        )
        point = choose(fit(ValidationLogits("validation", told, data.labels), costs, kind, method))
        assert point.shares == (*(0.0,) * (exits - 1), 1.0)
        assert point.accuracy == pytest.approx(100.0 * float(data.right[-1].double().mean()))


@pytest.mark.parametrize("kind", ["entropy", "entropy-normalised", "max-probability", "margin"])
def test_a_grid_tells_the_very_sure_from_the_all_but_sure(kind: str) -> None:
    """Half of the samples are surer by far than any threshold of the papers asks, and right; the
    others are as sure as those thresholds ask at most, and wrong."""
    labels = torch.arange(200) % 5
    told = torch.zeros(2, 200, 5)
    every, half = torch.arange(200), torch.arange(100)
    told[0, half, labels[:100]] = 30.0
    told[0, half + 100, (labels[100:] + 1) % 5] = 12.5
    told[1, every, labels] = 1.0
    costs = ExitCosts((10, 100), (10, 90), (8, 58), (2, 2))
    point = choose(fit(ValidationLogits("validation", told, labels), costs, kind, "grid"))
    assert point.shares == (0.5, 0.5)
    assert point.accuracy == 100.0


def test_patience_is_a_grid_of_counts() -> None:
    points = fit(made(exits=3), COSTS, "patience", "grid")
    assert {point.policy for point in points} <= {"patience:1", "patience:2"}
    with pytest.raises(BadValueError, match="patience has no thresholds"):
        fit(made(), COSTS, "patience", "knapsack")


@pytest.mark.parametrize("split", ["test", "Test", "held out"])
@pytest.mark.parametrize("method", METHODS)
def test_the_test_split_is_refused_and_may_be_scored(split: str, method: str) -> None:
    data = made(split=split)
    with pytest.raises(BadValueError, match="cannot be fitted on the split") as error:
        fit(data, COSTS, "entropy", method)
    assert "validation" in error.value.next_step
    assert score(parse("entropy:0.5"), data, COSTS).split == split


def run_of(validation: bool = True) -> RunLogits:
    def split(seed: int) -> Split:
        data = made(samples=200, seed=seed)
        return Split(data.logits.numpy(), data.labels.numpy(), np.arange(200))

    macs = np.array([10, 40, 100])
    return RunLogits(
        "toy", "toy", "made", 0, split(1), macs, macs, val=split(2) if validation else None
    )


def test_what_may_be_fitted_is_told_by_where_a_run_has_it_and_not_by_a_name() -> None:
    run = run_of()
    validation, test = module.validation_of(run), module.test_of(run)
    assert torch.equal(validation.logits, torch.as_tensor(run.val.logits))
    assert torch.equal(test.logits, torch.as_tensor(run.test.logits))
    assert {point.split for point in fit(validation, COSTS)} == {"validation"}
    named = LabelledLogits("validation", run.test.logits, run.test.labels)
    for leak in (test, named):
        with pytest.raises(BadValueError, match="cannot be fitted on the split"):
            fit(leak, COSTS)
    with pytest.raises(BadValueError, match="no validation split"):
        module.validation_of(run_of(validation=False))


@pytest.mark.parametrize("ratio", [0.3, 1.0, 1.7])
def test_geometric_shares_are_those_that_runs_are_scored_by(ratio: float) -> None:
    logits = made(samples=301).logits
    weights = ratio ** np.arange(3.0)
    rule = for_shares(Entropy([1.0]), logits, (weights / weights.sum()).tolist())
    limits = geometric_thresholds(logits.double().numpy(), ratio)
    assert rule.thresholds == pytest.approx(limits, rel=1e-5)
    wanted = exits_taken(entropies(logits.double().numpy()), limits)
    # In double precision no rounding is between both; whoever is at a limit leaves by both.
    double = for_shares(Entropy([1.0]), logits.double(), (weights / weights.sum()).tolist())
    assert simulate(double, logits.double()).tolist() == wanted.tolist()
    floors = np.floor(weights / weights.sum() * 301)[:2].astype(int).tolist()
    assert np.bincount(wanted, minlength=3)[:2].tolist() == floors


@pytest.mark.parametrize("kind", ["entropy", "max-probability", "margin"])
@pytest.mark.parametrize("share", [0.29, 0.5])
def test_shares_are_rounded_down_and_none_is_nobody(kind: str, share: float) -> None:
    logits, rule = made(samples=100).logits, parse(f"{kind}:0")
    assert torch.bincount(simulate(for_shares(rule, logits, [share, 0.0]), logits), minlength=3)[
        :2
    ].tolist() == [round(100 * share), 0]
    few = logits[:, :3]
    assert simulate(for_shares(rule, few, [0.3, 0.3]), few).tolist() == [2, 2, 2]


def test_who_is_not_finite_is_not_among_those_who_leave() -> None:
    logits = torch.zeros(2, 4, 2)
    logits[0, :, 0] = torch.tensor([float("nan"), 3.0, 2.0, 1.0])
    logits[0, 0, 1] = float("-inf")
    for kind in ("entropy", "max-probability", "margin"):
        rule = for_shares(parse(f"{kind}:0"), logits, [0.5])
        assert simulate(rule, logits).tolist() == [1, 0, 0, 1]
        every = for_shares(parse(f"{kind}:0"), logits, [1.0])
        assert simulate(every, logits).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(("kind", "method"), [("sureness", "grid"), ("entropy", "guess")])
def test_an_unknown_kind_or_method_is_refused_with_those_there_are(kind: str, method: str) -> None:
    with pytest.raises(BadValueError) as error:
        fit(made(), COSTS, kind, method)
    assert "knapsack" in error.value.next_step


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_of_a_network_that_diverged_are_refused(bad: float) -> None:
    logits = np.zeros((3, 4, 2), dtype=np.float32)
    logits[1, 2, 0] = bad
    with pytest.raises(BadValueError, match="not finite"):
        LabelledLogits("validation", logits, np.zeros(4))


@pytest.mark.parametrize(
    ("logits", "labels"), [((3, 4, 2), 5), ((4, 2), 4), ((3, 0, 2), 0), ((0, 4, 2), 3)]
)
def test_logits_and_labels_that_do_not_match_are_refused(logits: tuple, labels: int) -> None:
    with pytest.raises(BadValueError, match="do not belong together"):
        LabelledLogits("validation", np.zeros(logits, dtype=np.float32), np.zeros(labels))


def test_costs_of_another_network_are_refused() -> None:
    with pytest.raises(BadValueError, match="costs of 3 exits"):
        score(parse("entropy:1"), made(exits=2), COSTS)


def test_one_exit_and_one_sample_can_be_fitted() -> None:
    costs = ExitCosts((10,), (10,), (8,), (2,))
    for method in METHODS:
        points = fit(made(samples=1, exits=1), costs, "entropy", method)
        assert [point.shares for point in points] == [(1.0,)]


def test_samples_that_are_equally_sure_leave_together() -> None:
    told = logits_of([2.0, 2.0, 2.0, 2.0], [2.0, -2.0, 2.0, -2.0])
    data = ValidationLogits("validation", told, torch.tensor([0, 1, 0, 1]))
    costs = ExitCosts((10, 40), (10, 40), (8, 28), (2, 2))
    for kind, method in itertools.product(["entropy", "margin"], ["geometric", "knapsack"]):
        for point in fit(data, costs, kind, method):
            assert point.shares in ((1.0, 0.0), (0.0, 1.0))


def test_half_precision_logits_can_be_fitted() -> None:
    data = made()
    half = ValidationLogits("validation", data.logits.half().numpy(), data.labels.numpy())
    assert len(fit(half, COSTS, "entropy", "knapsack")) >= 3


def test_only_what_nobody_beats_stays_and_the_cheapest_good_one_is_chosen() -> None:
    def point(name: str, accuracy: float, macs: float) -> OperatingPoint:
        return OperatingPoint(name, "validation", accuracy, macs, (1.0,))

    kept = front([point("a", 90, 10), point("b", 89, 20), point("c", 95, 30), point("d", 95, 40)])
    assert [each.policy for each in kept] == ["a", "c"]
    assert choose(kept).policy == "c"
    assert choose(kept, lose=5).policy == "a"
    with pytest.raises(BadValueError, match="no operating point"):
        choose([])
