"""Timing on a CPU: when it stops, what warms up, what is refused; with clocks of our own."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, List

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timing_cases import FakeClock, forever, interval_width, noisy, one_thread

from narrowgauge_contract.errors import BadValueError, NotApplicableError, UsageError
from narrowgauge_lab.errors import ClockError
from narrowgauge_lab.measure import TimingPlan, caches, interleave, measure_time, samplers
from narrowgauge_lab.measure.stop_rule import StopRule

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=30)
@given(
    batches=st.lists(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=30), max_size=12),
    interval=st.floats(0.0, 0.5),
    least=st.integers(1, 60),
)
def test_the_interval_is_never_said_to_be_met_when_it_is_not(
    batches: List[List[float]], interval: float, least: int
) -> None:
    rule = StopRule(interval, least)
    seen: List[float] = []
    for batch in batches:
        rule.add(batch)
        seen += batch
        if rule.is_met():
            assert len(seen) >= least
            assert interval_width(seen) < interval


def test_the_interval_is_met_as_soon_as_a_look_falls_due() -> None:
    rule = StopRule(0.01, 30)
    met = []
    for count in range(1, 40):
        rule.add([1.0])
        if rule.is_met():
            met.append(count)

    assert met[0] == 30


@settings(deadline=None, max_examples=25)
@given(
    spread=st.floats(0.0, 0.5),
    seed=st.integers(0, 1000),
    interval=st.floats(0.001, 0.2),
    most=st.integers(30, 400),
    seconds=st.floats(1e-5, 0.2),
)
def test_why_it_stopped_is_true(
    spread: float, seed: int, interval: float, most: int, seconds: float
) -> None:
    clock = FakeClock()
    plan = TimingPlan(interval=interval, most_samples=most, limit_s=5.0)
    samples = measure_time(clock.call(noisy(seconds, spread, seed)), CPU, plan, clock)

    taken = len(samples.seconds)
    assert 1 <= taken <= most
    if samples.stopped == "interval":
        assert taken >= plan.least_samples
        assert interval_width(samples.seconds) < interval
    elif samples.stopped == "sample limit":
        assert taken == most
    else:
        assert samples.stopped == "time limit"
        assert sum(samples.seconds) * samples.calls >= 5.0 * 0.99


def test_samples_are_per_call_raw_and_in_order() -> None:
    clock = FakeClock()
    durations = itertools.chain([3.0, 0.1], itertools.cycle([0.1, 0.2]))
    plan = TimingPlan(interval=0.0, least_samples=4, most_samples=4, calls=1, warm_up_limit_s=4.0)
    samples = measure_time(clock.call(durations), CPU, plan, clock)

    assert len(samples.seconds) == 4
    assert {round(each, 6) for each in samples.seconds} == {0.1, 0.2}
    assert samples.host_seconds == samples.seconds
    assert (samples.source, samples.calls, samples.stopped) == ("monotonic", 1, "sample limit")


@pytest.mark.parametrize(("seconds", "calls"), [(1e-6, 100), (3e-5, 4), (1e-3, 1)])
def test_short_calls_are_timed_together(seconds: float, calls: int) -> None:
    """So that a sample lasts 100 us or more."""
    clock = FakeClock()
    samples = measure_time(clock.call(forever(seconds)), CPU, TimingPlan(), clock)

    assert abs(samples.calls - calls) <= 1
    assert samples.calls * seconds >= 99e-6
    assert statistics.median(samples.seconds) == pytest.approx(seconds, rel=1e-3)
    assert (samples.stopped, samples.steady) == ("interval", True)
    assert samples.conditions()["calls_per_sample"] == samples.calls


def test_the_warm_up_goes_on_until_windows_agree() -> None:
    """Calls that get faster for a while are none of the samples."""
    clock = FakeClock()
    slow = [0.01 * 0.95**i for i in range(60)]
    samples = measure_time(
        clock.call(itertools.chain(slow, forever(4e-4))), CPU, TimingPlan(), clock
    )

    assert samples.steady
    assert samples.warm_up_calls > 60
    assert {round(each, 7) for each in samples.seconds} == {4e-4}


@pytest.mark.parametrize("compared", [False, True])
def test_a_warm_up_among_other_work_does_not_leave_samples_too_short(compared: bool) -> None:
    """It ended at its limit with calls of 1 ms, one per sample, which then took 20 us each."""
    clock = FakeClock()
    growth = itertools.count()
    busy_until = clock() + 0.22
    durations = (
        1e-3 * 1.005 ** next(growth) if clock() < busy_until else 2e-5 for _ in itertools.count()
    )
    plan = TimingPlan(warm_up_limit_s=0.2)
    work = clock.call(durations)
    if compared:
        samples = interleave(work, clock.call(forever(2e-5)), CPU, plan, 9, clock).first
    else:
        samples = measure_time(work, CPU, plan, clock)

    assert samples.steady is False
    assert samples.calls == 5
    assert {round(each, 9) for each in samples.seconds} == {2e-5}


def test_calls_per_sample_that_were_asked_for_stay() -> None:
    clock = FakeClock()
    work = clock.call(itertools.chain([1e-3] * 30, forever(2e-6)))
    plan = TimingPlan(calls=2, warm_up_limit_s=0.01)
    assert measure_time(work, CPU, plan, clock).calls == 2


def test_a_call_that_never_settles_is_measured_and_said_to_be_unsteady() -> None:
    clock = FakeClock()
    growing = (1e-3 * 1.001**i for i in itertools.count())
    plan = TimingPlan(warm_up_limit_s=0.5, limit_s=0.5)
    samples = measure_time(clock.call(growing), CPU, plan, clock)

    assert not samples.steady
    assert samples.conditions()["steady"] is False


@pytest.mark.parametrize("step", [-10.0, 0.0, float("nan")])
def test_a_clock_that_steps_is_an_error(step: float) -> None:
    clock = FakeClock()
    durations = itertools.chain(itertools.repeat(1e-3, 400), forever(step))
    with pytest.raises(ClockError, match="monotonic") as caught:
        measure_time(clock.call(durations), CPU, TimingPlan(interval=0.0), clock)

    assert caught.value.next_step


def test_pairs_alternate_and_cancel_a_drift() -> None:
    """A B B A …: under a drift of 0.1 % per call, the mean log ratio is that of the work."""
    clock = FakeClock()
    drift, order = itertools.count(), []

    def work(name: str, seconds: float) -> Any:
        def call() -> None:
            order.append(name)
            clock.time += seconds * 1.001 ** next(drift)

        return call

    plan = TimingPlan(calls=1, warm_up_limit_s=0.2)
    comparison = interleave(work("A", 1e-3), work("B", 1.02e-3), CPU, plan, 10, clock)

    # Every sample has an untimed call of its own side before it.
    assert "".join(order[-40:]) == "AABBBBAA" * 5
    assert len(comparison.ratios) == 10
    assert statistics.geometric_mean(comparison.ratios) == pytest.approx(1.02, rel=1e-4)
    assert max(comparison.ratios) > 1.0215, "the drift is there, in every single ratio"
    assert comparison.first.conditions()["interleaved"] is True


def test_both_sides_of_a_pair_have_as_many_calls() -> None:
    clock = FakeClock()
    works = clock.call(forever(9.9e-6)), clock.call(forever(11e-6))
    comparison = interleave(*works, CPU, TimingPlan(), 3, clock)
    assert comparison.first.calls == comparison.second.calls

    works = clock.call(forever(1e-6)), clock.call(forever(1e-2))
    comparison = interleave(*works, CPU, TimingPlan(), 3, clock)
    assert (comparison.first.calls, comparison.second.calls) == (100, 1)


def test_a_time_limit_ends_a_comparison_with_whole_pairs() -> None:
    clock = FakeClock()
    works = clock.call(forever(1.0)), clock.call(forever(1.0))
    comparison = interleave(*works, CPU, TimingPlan(limit_s=7.0), 100, clock)

    assert len(comparison.first.seconds) == len(comparison.second.seconds) == 4
    assert comparison.first.stopped == "time limit"
    with pytest.raises(BadValueError):
        interleave(*works, CPU, TimingPlan(), 0, clock)


def test_a_cold_cache_is_emptied_before_every_sample_and_outside_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, order = FakeClock(), []

    def flush() -> None:
        order.append("flush")
        clock.time += 1.0

    def call() -> None:
        order.append("call")
        clock.time += 1e-3

    monkeypatch.setattr(caches, "flusher", lambda _: flush)
    plan = TimingPlan(cache="cold", limit_s=500.0, warm_up_limit_s=50.0)
    samples = measure_time(call, CPU, plan, clock)

    assert order[0] == "call", "the first call of all loads what there is to load"
    assert order[1:] == ["flush", "call"] * (len(order) // 2)
    assert samples.seconds == pytest.approx([1e-3] * 30, rel=1e-6)
    assert (samples.calls, samples.cache) == (1, "cold")


def test_a_cold_cache_is_slower_than_a_hot_one() -> None:
    """Reads that fit the last cache, by a real clock: other work only adds to the smallest sample,
    so there are rounds until both sides were left alone."""
    resident = torch.ones(caches.cpu_cache_bytes() // 64, dtype=torch.float32)
    plan = TimingPlan(limit_s=0.1, warm_up_limit_s=0.05, least_samples=5)
    hot, cold = [], []
    with one_thread():
        for _ in range(20):
            hot += measure_time(resident.sum, CPU, plan).seconds
            cold += measure_time(resident.sum, CPU, replace(plan, cache="cold")).seconds
            if min(cold) > 1.2 * min(hot):
                return
    pytest.fail(f"hot {min(hot)} s, cold {min(cold)} s")


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache": "warm"},
        {"cache": "cold", "calls": 2},
        {"calls": -1},
        {"least_samples": 5, "most_samples": 4},
        {"least_samples": 0},
        {"interval": -0.1},
        {"interval": float("nan")},
        {"limit_s": 0.0},
        {"warm_up_limit_s": -1.0},
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(BadValueError):
        TimingPlan(**wrong)


def test_other_devices_have_no_clock_here() -> None:
    with pytest.raises(UsageError, match="xla"):
        measure_time(lambda: None, torch.device("xla"))


def _cpus(sysfs: Path, *caches_of_each: List[str]) -> Path:
    """A tree of CPUs with caches `level type size shared_cpu_list`."""
    for cpu, described in enumerate(caches_of_each):
        for index, words in enumerate(described):
            folder = sysfs / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, word in zip(("level", "type", "size", "shared_cpu_list"), words.split()):
                (folder / name).write_text(word + "\n")
    (sysfs / "cpufreq").mkdir(parents=True)
    return sysfs


def test_all_last_caches_are_emptied_and_not_that_of_the_first_cpu(tmp_path: Path) -> None:
    """Four cores with an L2 each, and two of them at a time share an L3 of 32 MB."""
    cpus = [
        [
            f"1 Data 32K {cpu}", f"1 Instruction 32K {cpu}", f"2 Unified 512K {cpu}",
            f"3 Unified 32768K {'0-1' if cpu < 2 else '2-3'}",
        ]
        for cpu in range(4)
    ]  # fmt: skip
    sysfs = _cpus(tmp_path, *cpus)

    assert caches.cpu_cache_bytes(sysfs) == 64 << 20
    assert caches.cpu_flush_bytes(sysfs) == 2 * (64 << 20) + 4 * (512 << 10)


def test_an_l2_may_be_the_last_level_and_an_entry_may_lack_its_size(tmp_path: Path) -> None:
    cpus = [[f"1 Data 32K {cpu}", "2 Unified 2M 0-1", "3 Unified"] for cpu in range(2)]
    sysfs = _cpus(tmp_path, *cpus)

    assert caches.cpu_cache_bytes(sysfs) == 2 << 20
    assert caches.cpu_flush_bytes(sysfs) == 4 << 20


def test_the_buffer_of_a_cpu_is_what_has_to_be_written() -> None:
    buffer = caches.flush_buffer(CPU)

    assert buffer.numel() * 8 == caches.cpu_flush_bytes() >= 2 * caches.cpu_cache_bytes()


def test_without_sysfs_no_cache_can_be_emptied(tmp_path: Path) -> None:
    """Whatever the C library says: it tells of one cache, and not how many there are."""
    with pytest.raises(NotApplicableError, match="cold") as caught:
        caches.cpu_flush_bytes(tmp_path / "nothing")

    assert str(tmp_path) in caught.value.why


class FakeDriver:
    """libcuda with one device of 60 MB L2."""

    def __init__(self, status: int) -> None:
        self.status = status

    def cuInit(self, flags: int) -> int:  # noqa: N802 (libcuda's name)
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:  # noqa: N802
        handle._obj.value = 7 + index
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:  # noqa: N802
        assert (attribute, handle.value) == (38, 8)
        value._obj.value = 60 << 20
        return self.status


def test_the_driver_is_asked_for_the_l2() -> None:
    device = torch.device("cuda", 1)

    assert caches.gpu_cache_bytes(device, FakeDriver(0)) == 60 << 20
    with pytest.raises(RuntimeError, match="answers 3"):
        caches.gpu_cache_bytes(device, FakeDriver(3))


class FakeEvent:
    """An event whose device clock runs `rate` times as fast as the host's."""

    clock: Any = None
    rate = 1.0

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = self.clock() * self.rate

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.time - self.time) * 1e3


@pytest.mark.parametrize("rate", [0.5, 1.01, 1.05, -1.0])
def test_events_that_claim_more_than_passed_are_an_error(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    clock = FakeClock()
    monkeypatch.setattr(FakeEvent, "clock", clock)
    monkeypatch.setattr(FakeEvent, "rate", rate)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    call = clock.call(forever(1e-3))
    device = torch.device("cuda", 0)
    if rate in (1.05, -1.0):
        with pytest.raises(ClockError):
            measure_time(call, device, TimingPlan(), clock)
        return
    samples = measure_time(call, device, TimingPlan(), clock)

    assert samples.source == "cuda-event"
    assert statistics.median(samples.seconds) == pytest.approx(rate * 1e-3)
    assert statistics.median(samples.host_seconds) == pytest.approx(1e-3)


def test_blocks_end_before_a_stream_pushes_back() -> None:
    """512 launches of 3 us each are fewer than a stream takes; a held one is given fewer yet."""
    by = samplers.CudaSampler(torch.device("cuda", 0), None, False, FakeClock())
    held = samplers.CudaSampler(torch.device("cuda", 0), None, True, FakeClock())
    sample = (2e-6, 3e-6)

    assert by.calls_for(sample) == 100
    assert by.block_size(sample, 100) * 100 * 3e-6 <= 1.5e-3
    assert held.block_size(sample, 100) * 100 * 3e-6 <= 0.6e-3
    # Calls of 30 us to queue and 2 us to run: as many as may be queued while the stream is held.
    assert held.calls_for((2e-6, 3e-5)) == 20
    assert by.block_size((1.0, 1.0), 1) == 1
