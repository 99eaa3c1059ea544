"""What only a GPU can show: events, hidden launches, cold caches, and that all loops agree."""

from __future__ import annotations

import statistics
from typing import Any, Callable

import pytest
import torch

import narrowgauge_kernels
from narrowgauge_kernels.harness import Graph as CapturedGraph
from narrowgauge_kernels.harness import launch
from narrowgauge_lab.errors import HeldTooLongError
from narrowgauge_lab.measure import TimingPlan, interleave, measure_time
from narrowgauge_lab.measure.caches import gpu_cache_bytes
from narrowgauge_lab.measure.harness import Graph, Kernel, Operator, measure_compiled

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
QUICK = TimingPlan(limit_s=1.0, warm_up_limit_s=1.0)
HIDDEN = TimingPlan(limit_s=1.0, warm_up_limit_s=1.0, hide_launches=True)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    narrowgauge_kernels.load()


def tiny_launches(count: int) -> Callable[[], Any]:
    x = torch.zeros(1, device=CUDA)

    def call() -> None:
        for _ in range(count):
            x.add_(1.0)

    return call


def median(samples: Any) -> float:
    return statistics.median(samples.seconds)


def test_events_time_the_device() -> None:
    """A chain of dependent steps, twice as long where there are twice as many."""
    buffer = torch.zeros(1 << 20, device=CUDA)
    one, two = (
        measure_time(lambda n=n: launch("multiply-add", buffer, n), CUDA, QUICK)
        for n in (500_000, 1_000_000)
    )
    assert (one.source, one.steady, one.stopped) == ("cuda-event", True, "interval")
    assert median(two) / median(one) == pytest.approx(2.0, rel=0.02)
    assert statistics.median(one.host_seconds) < 0.2 * median(one), "queueing is not computing"


def test_hidden_launches_leave_the_device_alone() -> None:
    """50 launches of a microsecond each: the host is slower than they are."""
    call = tiny_launches(50)
    open_, hidden = measure_time(call, CUDA, QUICK), measure_time(call, CUDA, HIDDEN)

    assert median(hidden) < 0.9 * median(open_)
    assert hidden.conditions()["launches_hidden"] is True
    assert statistics.median(open_.host_seconds) > 0.5 * median(open_), "launches bind"


def test_work_that_waits_for_the_device_cannot_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge_lab.measure import samplers

    held = samplers.hold
    monkeypatch.setattr(samplers, "hold", lambda device: held(device, 0.2))
    x = torch.ones(1, device=CUDA)
    with pytest.raises(HeldTooLongError, match="waits for the device"):
        measure_time(lambda: x.add_(1.0).item(), CUDA, HIDDEN)
    assert x.add_(1.0).item() > 1.0, "the stream goes on"


def test_a_cold_cache_is_slower_than_a_hot_one() -> None:
    resident = torch.zeros(gpu_cache_bytes(CUDA) // 16, dtype=torch.float32, device=CUDA)
    other = torch.empty_like(resident)
    call = lambda: other.copy_(resident)  # noqa: E731
    hot = measure_time(call, CUDA, HIDDEN)
    cold = measure_time(
        call, CUDA, TimingPlan(cache="cold", limit_s=1.0, warm_up_limit_s=1.0, hide_launches=True)
    )

    assert median(cold) > 1.2 * median(hot)
    assert cold.calls == 1


def test_python_compiled_operator_and_graph_agree() -> None:
    """One product of some 300 us on a large card, three ways."""
    x = torch.randn(2048, 2048, device=CUDA)
    out = torch.empty_like(x)
    figures = {
        "python": measure_time(lambda: torch.mm(x, x, out=out), CUDA, HIDDEN),
        "operator": measure_compiled(Operator("aten::mm", (x, x)), CUDA, HIDDEN),
    }
    if hasattr(torch.cuda, "CUDAGraph") and hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        captured = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(captured):
            torch.mm(x, x, out=out)
        with CapturedGraph(captured, CUDA) as instance:
            figures["graph"] = measure_compiled(Graph(instance), CUDA, HIDDEN)
    seconds = {name: median(samples) for name, samples in figures.items()}

    assert max(seconds.values()) < 1.1 * min(seconds.values()), seconds


@pytest.mark.parametrize("cache", ["hot", "cold"])
def test_both_loops_agree_on_a_kernel(cache: str) -> None:
    buffer = torch.zeros(1 << 24, device=CUDA)
    plan = TimingPlan(cache=cache, limit_s=1.0, warm_up_limit_s=1.0, hide_launches=True)
    python = measure_time(lambda: launch("copy", buffer, 4), CUDA, plan)
    compiled = measure_compiled(Kernel("copy", buffer, 4), CUDA, plan)

    assert median(compiled) == pytest.approx(median(python), rel=0.1)


def test_a_planted_slowdown_shows_in_pairs() -> None:
    buffer = torch.zeros(1 << 20, device=CUDA)
    first, second = (
        lambda n=n: launch("multiply-add", buffer, n)  # type: ignore[misc]
        for n in (100_000, 105_000)
    )
    comparison = interleave(first, second, CUDA, HIDDEN, 20)

    assert statistics.median(comparison.ratios) == pytest.approx(1.05, abs=0.01)
