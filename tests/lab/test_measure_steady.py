"""Which calls of concurrent workers count, and when nothing does."""

from __future__ import annotations

from typing import List, Tuple

import pytest

from narrowgauge_lab.measure.steady import NotSteadyError, Span, Worked, steady_window


def _worked(name: str, begin: float, end: float, each: float, batch: int = 1) -> Worked:
    """Calls of `each` seconds back to back from `begin` until past `end`."""
    spans: List[Span] = []
    while begin < end - 1e-9:
        spans.append((begin, begin + each))
        begin += each
    return Worked(name, batch, tuple(spans))


def test_the_window_is_from_the_latest_start_and_warm_up_to_the_earliest_end() -> None:
    workers = [_worked("gpu", 0.0, 10.0, 0.5), _worked("dla", 2.0, 9.0, 1.0)]

    steady = steady_window(workers, 1.0)

    assert (steady.begin, steady.end, steady.seconds) == (3.0, 9.0, 6.0)
    assert [len(each.seconds) for each in steady.workers] == [12, 6]


def test_the_rate_is_the_sum_of_batch_by_latency() -> None:
    """The suite's arithmetic: 16 · 1000 / 20 ms + 2 · (4 · 1000 / 40 ms)."""
    workers = [
        _worked("gpu-0", 0.0, 10.0, 0.020, batch=16),
        _worked("dla-0", 0.0, 10.0, 0.040, batch=4),
        _worked("dla-1", 0.0, 10.0, 0.040, batch=4),
    ]

    steady = steady_window(workers, 0.0)

    assert steady.images_per_second == pytest.approx(16 / 0.02 + 2 * 4 / 0.04)
    assert steady.images_counted_per_second == pytest.approx(1000, rel=0.01)


def test_what_a_worker_does_alone_counts_for_nothing() -> None:
    """Alone it takes half as long for a call as together with the other."""
    alone = [(0.1 * number, 0.1 * (number + 1)) for number in range(100)]
    together = [(10.0 + 0.2 * number, 10.2 + 0.2 * number) for number in range(50)]
    first = Worked("first", 1, tuple(alone + together))

    steady = steady_window([first, _worked("second", 10.0, 20.0, 0.2)], 0.0)

    assert steady.images_per_second == pytest.approx(2 / 0.2)


def test_idling_between_calls_shows_in_the_count_alone() -> None:
    spans = tuple((float(number), number + 0.5) for number in range(10))

    steady = steady_window([Worked("idle", 1, spans)], 0.0)

    assert steady.images_per_second == pytest.approx(2.0)
    assert steady.images_counted_per_second == pytest.approx(10 / 9.5)


def test_calls_across_the_ends_of_the_window_are_not_timed() -> None:
    slow = Worked("slow", 8, ((0.0, 3.0), (3.0, 6.0), (6.0, 9.0), (9.0, 12.0)))
    other = _worked("other", 0.0, 10.0, 1.0)

    steady = steady_window([slow, other], 2.0)

    assert (steady.begin, steady.end) == (2.0, 10.0)
    counted = steady.workers[0]
    assert counted.seconds == (3.0, 3.0)
    # Three batches came out in the window, as three begin or end in it: it cuts one at either end.
    assert counted.images == 3 * 8


def test_workers_that_never_ran_together_have_no_rate() -> None:
    workers = [_worked("early", 0.0, 5.0, 0.1), _worked("late", 6.0, 9.0, 0.1)]

    with pytest.raises(NotSteadyError, match="no moment in which all workers ran") as caught:
        steady_window(workers, 0.5)

    assert "early ended 1.5 s before late" in caught.value.why


def test_a_warm_up_longer_than_the_run_leaves_nothing() -> None:
    with pytest.raises(NotSteadyError, match="no moment"):
        steady_window([_worked("only", 0.0, 1.0, 0.1)], 2.0)


def test_a_call_longer_than_the_window_is_no_measurement() -> None:
    workers = [_worked("quick", 0.0, 4.0, 0.1), Worked("slow", 1, ((0.0, 3.9), (3.9, 9.0)))]

    with pytest.raises(NotSteadyError, match="no call of slow lies within the 3 s"):
        steady_window(workers, 1.0)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (Worked("dla-1", 1, (), "out of memory"), "the worker dla-1 died"),
        (Worked("dla-1", 1, ((0.0, 5.0),), "device lost"), "the worker dla-1 died"),
        (Worked("dla-1", 1, ()), "ended without a call: dla-1"),
    ],
)
def test_a_worker_that_died_or_did_nothing_is_named(worker: Worked, reason: str) -> None:
    with pytest.raises(NotSteadyError, match=reason):
        steady_window([_worked("gpu", 0.0, 5.0, 0.1), worker], 0.0)


def test_who_died_is_named_before_those_that_only_waited_for_it() -> None:
    waiting: Tuple[Worked, ...] = (Worked("gpu", 1, ()), Worked("dla", 1, (), "broken"))

    with pytest.raises(NotSteadyError, match="dla died"):
        steady_window(waiting, 0.0)


def test_nobody_is_no_measurement() -> None:
    with pytest.raises(NotSteadyError, match="nobody worked"):
        steady_window([], 0.0)
