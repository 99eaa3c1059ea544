"""Deadlines, by a clock that the tests turn: which answer comes, and how late."""

from __future__ import annotations

import time
from typing import Sequence

import pytest
import torch
from exit_cases import Told, toy

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.deadline import StageTimes, deadline, measure_stages
from narrowgauge_lab.anytime.network import Answer, State


class Clocked(Told):
    """Takes so many milliseconds for each stage, of a clock of its own."""

    def __init__(self, stage_ms: Sequence[float], samples: int = 2) -> None:
        logits = torch.arange(len(stage_ms)).float().reshape(-1, 1, 1).expand(-1, samples, 3)
        super().__init__(logits.clone())
        self.stage_ms, self.ms = list(stage_ms), 0.0
        self.eval()

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        self.ms += self.stage_ms[exit]
        return super().advance(exit, state, head)

    def now(self) -> float:
        return self.ms / 1e3

    def times(self) -> StageTimes:
        seconds = tuple(ms / 1e3 for ms in self.stage_ms)
        return StageTimes(self.logits.shape[1], seconds, seconds)


@pytest.mark.parametrize(
    ("ms", "reached", "spent"),
    [(10.5, 0, 10), (29.9, 0, 10), (30.5, 1, 30), (59.9, 1, 30), (61, 2, 60), (1e9, 2, 60)],
)
def test_with_times_stages_run_while_the_next_one_fits(
    ms: float, reached: int, spent: float
) -> None:
    net = Clocked([10, 20, 30])
    got = deadline(net, net.images(), ms, net.times(), net.now)
    assert got.exit == reached
    assert got.logits[0, 0].item() == reached
    assert got.seconds == pytest.approx(spent / 1e3)
    assert not got.late
    assert got.overshoot_s == 0.0


def test_without_times_a_stage_that_ends_too_late_is_not_the_answer() -> None:
    net = Clocked([10, 20, 30])
    got = deadline(net, net.images(), 45, None, net.now)
    assert (got.exit, got.late) == (1, False)
    assert got.logits[0, 0].item() == 1
    assert got.overshoot_s == pytest.approx(0.015)
    assert got.overshoot_s <= max(net.stage_ms) / 1e3


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ms", [0, 3, 9.99])
def test_a_deadline_shorter_than_the_first_exit_gets_the_first_answer_late(
    ms: float, known: bool
) -> None:
    net = Clocked([10, 20, 30])
    got = deadline(net, net.images(), ms, net.times() if known else None, net.now)
    assert (got.exit, got.late) == (0, True)
    assert got.logits[0, 0].item() == 0
    assert got.seconds == pytest.approx(0.010)
    assert got.overshoot_s == pytest.approx((10 - ms) / 1e3)


def test_a_stage_that_takes_longer_than_ever_costs_one_stage_and_no_answer() -> None:
    net = Clocked([10, 20, 30])
    times = net.times()
    net.stage_ms[1] = 200
    got = deadline(net, net.images(), 50, times, net.now)
    assert (got.exit, got.late) == (0, False)
    assert got.overshoot_s == pytest.approx(0.160)


@pytest.mark.parametrize("ms", [float("nan"), -1.0])
def test_a_deadline_that_is_none_is_refused(ms: float) -> None:
    net = Clocked([1, 1])
    with pytest.raises(BadValueError, match="a deadline of"):
        deadline(net, net.images(), ms)


def test_times_of_another_batch_or_network_are_refused() -> None:
    net = Clocked([1, 1])
    for times in (StageTimes(5, (1, 1), (1, 1)), StageTimes(2, (1,), (1,))):
        with pytest.raises(BadValueError, match="not of this network and batch"):
            deadline(net, net.images(), 5, times, net.now)


def test_batches_of_one_and_none() -> None:
    net = Clocked([10, 20], samples=1)
    assert deadline(net, net.images(), 100, net.times(), net.now).logits.shape == (1, 3)
    ran = net.ms
    empty = deadline(net, net.images()[:0], 0, None, net.now)
    assert empty.logits.shape == (0, 3)
    assert not empty.late
    assert net.ms == ran


def test_a_network_in_training_mode_is_refused() -> None:
    with pytest.raises(BadValueError, match="training mode"):
        deadline(toy().train(), torch.zeros(1, 3, 4, 4), 5)


def test_stage_times_are_medians_and_a_high_quantile() -> None:
    net = Clocked([10, 20])
    once = measure_stages(net, net.images(), passes=5, now=net.now)
    assert once.batch == 2
    assert once.typical == pytest.approx((0.010, 0.020))
    assert once.until == pytest.approx((0.010, 0.030))
    assert once.longest == pytest.approx(0.020)

    class Slower(Clocked):
        def advance(self, exit: int, state: State, head: bool = True) -> Answer:
            self.stage_ms[exit] += 1
            return super().advance(exit, state, head)

    slower = Slower([10, 20])
    grown = measure_stages(slower, slower.images(), passes=10, quantile=0.9, now=slower.now)
    # Passes 4 to 13 count: 14 to 23 ms, of which the ninth is 22.
    assert grown.safe[0] == pytest.approx(0.022)
    assert grown.typical[0] == pytest.approx(0.019)


def test_what_a_network_begins_with_is_part_of_the_first_stage() -> None:
    class Begins(Clocked):
        def begin(self, images: torch.Tensor) -> State:
            self.ms += 7
            return super().begin(images)

    net = Begins([10, 20])
    times = measure_stages(net, net.images(), passes=3, now=net.now)
    assert times.typical == pytest.approx((0.017, 0.020))
    assert times.safe == pytest.approx((0.017, 0.020))
    # Planned with that, the first answer of a deadline is as late as was known.
    got = deadline(net, net.images(), 17.5, times, net.now)
    assert (got.exit, got.late) == (0, False)


def test_the_longest_stage_is_the_typical_one() -> None:
    assert StageTimes(1, (0.010, 0.020), (0.5, 0.6)).longest == 0.020


@pytest.mark.parametrize(("passes", "quantile"), [(0, 1.0), (1, 1.5), (1, -0.1)])
def test_times_that_cannot_be_measured_are_refused(passes: int, quantile: float) -> None:
    net = Clocked([1, 1])
    with pytest.raises(BadValueError, match="cannot be timed"):
        measure_stages(net, net.images(), passes, quantile)
    with pytest.raises(BadValueError, match="0 images"):
        measure_stages(net, net.images()[:0])


def test_by_the_real_clock_the_answer_is_that_of_the_exit() -> None:
    net, x = toy(), torch.randn(2, 3, 6, 6)
    times = measure_stages(net, x, passes=5)
    assert all(0 < typical <= safe for typical, safe in zip(times.typical, times.safe))
    began = time.perf_counter()
    got = deadline(net, x, 60_000, times)
    assert got.exit == 2
    assert got.seconds <= time.perf_counter() - began
    assert torch.allclose(got.logits, net(x)[2])
    # No stage fits into no time: the first answer, late.
    late = deadline(net, x, 0, times)
    assert late.late
    assert torch.allclose(late.logits, net(x)[0])
