"""The lab's face of the compiled loop, on a CPU; its kernels must be built (scripts/test.sh does).

The loop itself is tested with the kernels.
"""

from __future__ import annotations

from typing import Any, List

import pytest
import torch
from timing_cases import one_thread

import narrowgauge_kernels
from narrowgauge_contract.errors import BadValueError, UsageError
from narrowgauge_lab.errors import ClockError, HeldTooLongError
from narrowgauge_lab.measure import TimingPlan, harness, interleave, measure_time
from narrowgauge_lab.measure.harness import (
    CompiledSampler,
    Kernel,
    Operator,
    interleave_compiled,
    measure_compiled,
)
from narrowgauge_lab.measure.timing import measure_by

CPU = torch.device("cpu")
QUICK = TimingPlan(limit_s=0.1, warm_up_limit_s=0.05)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    narrowgauge_kernels.load()


def test_an_operator_is_measured_to_the_plan() -> None:
    x = torch.randn(32, 32)
    samples = measure_compiled(Operator("aten::mm", (x, x)), CPU, QUICK)

    assert samples.source == "monotonic"
    assert len(samples.seconds) >= 1
    assert samples.stopped in ("interval", "time limit")


def test_both_loops_agree() -> None:
    """By the smallest sample of several rounds: other work on the machine only adds.

    Seconds per sample in place of per call would be four times as many.
    """
    x = torch.randn(160, 160)
    work = Operator("aten::mm", (x, x))
    plan = TimingPlan(calls=4, interval=0.0, limit_s=0.05, warm_up_limit_s=0.0)
    compiled, python = [], []
    with one_thread():
        for _ in range(20):
            compiled += measure_compiled(work, CPU, plan).seconds
            python += measure_time(lambda: torch.mm(x, x), CPU, plan).seconds
            if 0.5 < min(compiled) / min(python) < 1.5:
                return
    pytest.fail(f"compiled {min(compiled)} s, Python {min(python)} s")


def test_a_cold_cache_is_one_call_per_sample() -> None:
    x = torch.randn(32, 32)
    plan = TimingPlan(cache="cold", limit_s=0.05, warm_up_limit_s=0.02)
    samples = measure_compiled(Operator("aten::mm", (x, x)), CPU, plan)

    assert samples.calls == 1
    assert samples.conditions()["cache"] == "cold"


def test_operators_are_compared_in_turns() -> None:
    x = torch.randn(64, 64)
    work = Operator("aten::mm", (x, x))
    comparison = interleave_compiled(work, work, CPU, TimingPlan(warm_up_limit_s=0.05), 5)

    assert len(comparison.ratios) == 5
    assert comparison.first.interleaved


def test_cuda_work_is_refused_on_a_cpu() -> None:
    with pytest.raises(UsageError, match="cpu"):
        measure_compiled(Kernel("copy", torch.zeros(8), 1), CPU, QUICK)


class Fixed(CompiledSampler):
    """Answers of the loop that a test chooses."""

    def __init__(self, answer: Any) -> None:
        super().__init__(CPU, cold=False, hide=False, now=iter(range(1000)).__next__)  # type: ignore[arg-type]
        self.answer = answer

    def _time(self, *_: Any) -> torch.Tensor:
        if isinstance(self.answer, Exception):
            raise self.answer
        return torch.tensor(self.answer, dtype=torch.float64)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([[1e-3, -1e-3], [1e-3, 1e-3]], ClockError),
        ([[1e-3, float("nan")], [1e-3, 1e-3]], ClockError),
        ([[0.6, 0.6], [1e-3, 1e-3]], ClockError),  # 1.2 s of the one second that passed
        (RuntimeError("held for 5 s, and its work was still not queued"), HeldTooLongError),
        (RuntimeError("something else"), RuntimeError),
    ],
    ids=["back", "nan", "claim", "held", "other"],
)
def test_the_loops_answers_are_checked(answer: Any, error: Any) -> None:
    with pytest.raises(error) as caught:
        Fixed(answer).block(Operator("aten::relu", ()), 1, 2, 1e-3)
    assert type(caught.value) is error


def test_a_hold_takes_no_more_than_a_stream_does() -> None:
    held = Fixed([])
    held._hide = True
    held.shortest_s = 2e-3

    calls: List[int] = [held.calls_for(sample) for sample in ((2e-6, 2e-6), (2e-6, 3e-5), (1, 1))]
    assert calls == [128, 20, 1]


def test_more_calls_than_a_hold_covers_are_refused() -> None:
    """The rest of them would show their launches, in samples that say that none are shown."""
    now = iter(range(1000)).__next__
    work = Operator("aten::relu", ())
    held = Fixed([[1e-3], [1e-3]])
    held._hide = True
    plan = TimingPlan(calls=1000, hide_launches=True, limit_s=3.0, warm_up_limit_s=0.0)
    with pytest.raises(BadValueError, match="1000 calls per sample cannot be hidden"):
        measure_by(held, work, plan, now)  # type: ignore[arg-type]

    assert held.block(work, harness.compiled.HELD_CALLS, 1, 1e-3) == [(1e-3, 1e-3)]
    held._hide = False
    assert held.block(work, 129, 1, 1e-3), "nothing was to be hidden"


def test_the_python_loop_needs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only holding a stream does."""

    def absent(*_: Any) -> None:
        raise AssertionError("asked for the kernels")

    monkeypatch.setattr(harness.compiled, "require", absent)
    assert interleave(lambda: None, lambda: None, CPU, QUICK, 2).first.seconds
