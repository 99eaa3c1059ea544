"""How one of several is chosen by measuring in turns, on a clock that the test winds."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence

import pytest
import torch
from torch import nn

from narrowgauge_lab.engines.own.cpu import trial
from narrowgauge_lab.engines.own.cpu.choice import (
    Candidate,
    Choice,
    choose,
    disturbed,
    measure,
    ranked,
)

EAGER, FUSED, SLOW = Candidate("eager"), Candidate("fused", 2), Candidate("slow")


class Machine:
    """Calls that take the seconds they are given, one after the other; the last one for ever."""

    def __init__(self, **seconds: Sequence[float]) -> None:
        self.time = 0.0
        self.order: List[str] = []
        self.calls: Dict[Candidate, Callable[[], Any]] = {}
        for name, each in seconds.items():
            self.calls[{"eager": EAGER, "fused": FUSED, "slow": SLOW}[name]] = self._call(
                name, list(each)
            )

    def _call(self, name: str, seconds: List[float]) -> Callable[[], None]:
        def call() -> None:
            self.order.append(name)
            self.time += seconds.pop(0) if len(seconds) > 1 else seconds[0]

        return call

    def now(self) -> float:
        return self.time


def test_rounds_go_forwards_and_backwards() -> None:
    machine = Machine(eager=[1.0], fused=[1.0])

    measure(machine.calls, EAGER, 3, 1e9, machine.now)

    assert machine.order[4:] == ["eager", "fused", "fused", "eager", "eager", "fused"]


def test_short_calls_are_repeated_within_a_sample() -> None:
    machine = Machine(eager=[1e-4])

    taken = measure(machine.calls, EAGER, 1, 1e9, machine.now)

    assert machine.order.count("eager") >= 2 + 20
    assert taken[EAGER] == [pytest.approx(1e-4)]


def test_the_hopeless_leave_and_the_baseline_stays() -> None:
    machine = Machine(eager=[2.0], fused=[1.0], slow=[1.9])

    taken = measure(machine.calls, EAGER, 10, 1e9, machine.now)

    assert len(taken[EAGER]) == len(taken[FUSED]) == 10
    assert 0 < len(taken[SLOW]) < 10
    assert ranked(taken, EAGER) == [FUSED, EAGER]


def test_it_ends_when_only_the_baseline_is_left() -> None:
    machine = Machine(eager=[1.0], slow=[3.0])

    taken = measure(machine.calls, EAGER, 100, 1e9, machine.now)

    assert len(taken[EAGER]) < 10


def test_the_budget_ends_it_but_not_before_the_least_rounds() -> None:
    machine = Machine(eager=[1.0], fused=[0.9])

    taken = measure(machine.calls, EAGER, 100, 4.0, machine.now, least_rounds=7)

    assert len(taken[EAGER]) == len(taken[FUSED]) == 7


def test_a_faster_one_is_taken() -> None:
    rounds = {EAGER: [1.0] * 9, FUSED: [0.7, 0.7, 0.8, 0.6, 0.7, 0.7, 0.9, 0.7, 0.7]}

    taken, reason = choose(rounds, EAGER)

    assert taken == FUSED
    assert "0.700" in reason
    assert "9 rounds" in reason


def test_one_that_may_be_faster_by_noise_is_not_taken() -> None:
    rounds = {EAGER: [1.0] * 9, FUSED: [0.8, 1.2, 0.9, 1.1, 0.9, 0.9, 1.3, 0.9, 0.9]}

    taken, reason = choose(rounds, EAGER)

    assert taken == EAGER
    assert "noise" in reason


def test_drift_that_meets_both_alike_does_not_matter() -> None:
    """Ratios are of one round: a machine that becomes slower and slower hides nothing."""
    pace = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    rounds = {EAGER: pace, FUSED: [0.95 * each for each in pace]}

    assert choose(rounds, EAGER)[0] == FUSED


def test_too_few_rounds_prove_nothing() -> None:
    assert choose({EAGER: [1.0] * 5, FUSED: [0.5] * 5}, EAGER)[0] == EAGER


def test_a_slower_one_is_not_taken() -> None:
    taken, reason = choose({EAGER: [1.0] * 9, FUSED: [1.01] * 9}, EAGER)

    assert taken == EAGER
    assert reason == "nothing was faster than eager"


def test_what_waits_less_on_a_busy_host_is_not_faster() -> None:
    """As it was measured: two threads wait for a processor that is taken, and one does not."""
    eager = [0.064, 0.168, 0.22, 0.163, 0.187, 5.18, 2.14, 5.16, 5.12]
    single = [0.079, 0.079, 0.085, 0.083, 0.082, 0.082, 0.112, 0.082, 0.081]

    taken, reason = choose({EAGER: eager, FUSED: single}, EAGER)

    assert taken == EAGER
    assert "the host was busy" in reason
    assert disturbed({EAGER: eager, FUSED: single}, EAGER)
    assert not disturbed({EAGER: [1.0, 1.4, 1.1, 2.9], FUSED: eager}, EAGER)


@pytest.mark.parametrize(("busy", "tries"), [([False], 1), ([True, False], 2), ([True, True], 2)])
def test_a_busy_host_is_measured_once_more(
    busy: List[bool], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: List[int] = []

    def busily(calls: Any, baseline: Candidate, rounds: int, *_: Any, **__: Any) -> Any:
        last = rounds == trial._ROUNDS
        late = 5.0 if last and busy[len(asked)] else 1.0
        asked.extend([1] if last else [])
        return {each: [1.0] * 8 + [late if each == baseline else 1.0] for each in calls}

    monkeypatch.setattr(trial, "measure", busily)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    choice = trial.chosen(model, torch.randn(1, 3, 8, 8), {}, 1, 1.0)

    assert len(asked) == tries
    assert choice.taken.form == "eager"
    assert choice.reason.endswith("the host was busy in each of 2 tries") == all(busy)


def test_a_choice_survives_its_record() -> None:
    choice = Choice(FUSED, "because", {EAGER: (1.0, 2.0), FUSED: (0.1,)}, {"slow": "not there"})

    assert Choice.from_dict(choice.to_dict()) == choice
