"""The figures and verdicts of benchmarks/energy: they need neither a GPU nor torch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "energy"
IDLE_W, BUSY_W = 100.0, 700.0


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("energy_bench", FOLDER / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "energy_bench", module)
    spec.loader.exec_module(module)
    return module


def test_a_target_is_held_against_the_worst_sample(bench: ModuleType) -> None:
    assert not bench.Figure("N against 2N", "%", 1.0, (0.1, 0.2, 1.1)).met
    assert bench.Figure("N against 2N", "%", 1.0, (0.1, 1.0)).met
    assert not bench.Figure("naive", "%", 20.0, (19.0, 40.0, 41.0), at_least=True).met
    assert bench.Figure("naive", "%", 20.0, (20.0, 40.0), at_least=True).met
    assert bench.Figure("told", "%", None, (1e9,)).met
    line = bench._table("card", [bench.Figure("x", "%", 1.0, (0.1, 3.0))]).splitlines()[1]
    assert line.split() == ["x", "1.550", "%", "0.100", "3.000", "2", "<=", "1", "%", "MISSED"]


@pytest.mark.parametrize(
    ("faults", "sample", "check", "code"),
    [
        ([], 0.5, True, 0),
        (["hw_slowdown"], 0.5, True, 1),
        ([], 1.5, True, 1),
        (["hw_slowdown"], 1.5, False, 0),
    ],
)
def test_a_card_that_was_held_back_does_not_pass(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, faults: list[str], sample: float,
    check: bool, code: int,
) -> None:  # fmt: skip
    figures = [bench.Figure("x", "%", 1.0, (sample,))]
    monkeypatch.setattr(bench, "_measure", lambda: ("card", figures, {"faults": faults}))
    monkeypatch.setattr(sys, "argv", ["bench.py", *(["--check"] if check else [])])

    assert bench.main() == code


class _Card:
    """A clock, and a card that draws power on it. A read of its power shows the mean of the last
    second, which is what the newer ones show."""

    def __init__(self) -> None:
        self.at = 0.0
        self.drawn = 0.0
        self.rests: list[float] = []

    def work(self) -> None:
        self.at += 0.01
        self.drawn += 0.01 * BUSY_W

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)

    def power(self, interval_s: float) -> _Card:
        assert interval_s == 0.1
        return self

    def __enter__(self) -> _Card:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self) -> None:
        self._began = self.drawn

    def end(self) -> Any:
        # It lags: a quarter of what was drawn is not seen yet.
        joules = 0.75 * (self.drawn - self._began)
        return type("Energy", (), {"joules": {"card": joules}})


def test_the_plain_sampler_is_tried_on_a_constant_load_too(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, waited = _Card(), []
    monkeypatch.setattr(bench, "_power", card.power)
    monkeypatch.setattr(bench, "_wait_for_card", lambda: waited.append(card.at))
    monkeypatch.setattr(bench.time, "sleep", card.sleep)
    raw: dict[str, Any] = {
        "gross_j": [69.0, 70.0, 71.0],
        "windows": [{"calls": 51, "seconds": 5.1}],
    }

    figure = bench._control(card.work, raw)

    assert "constant load" in figure.name
    assert (figure.target, len(figure.samples)) == (None, bench.NAIVE_REPEATS)
    assert figure.samples == pytest.approx([25.0] * bench.NAIVE_REPEATS)
    assert raw["control_j"]["reference"] == 70.0
    # Ten calls of ten products of 10 ms are the second that the sampler looks for.
    assert card.at == pytest.approx(bench.NAIVE_REPEATS * bench.NAIVE_S)
    assert card.rests == [bench.REST_S] * bench.NAIVE_REPEATS
    assert len(waited) == bench.NAIVE_REPEATS, "what is queued is waited for before it is counted"
