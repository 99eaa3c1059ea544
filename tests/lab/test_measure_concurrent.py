"""Workers at the same time: threads, and processes that are started for it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List, Sequence

import pytest

from narrowgauge_contract.errors import ExitCode
from narrowgauge_lab.measure.concurrent import (
    Program,
    ThreadWorker,
    WorkerFailedError,
    run_processes,
    run_threads,
)
from narrowgauge_lab.measure.steady import Worked
from narrowgauge_lab.worker import repeat

JOBS = "worker_jobs"


def _overlap(worked: Sequence[Worked]) -> bool:
    """Whether the first calls of all have a moment in common."""
    return max(each.spans[0][0] for each in worked) < min(each.spans[0][1] for each in worked)


class TestRepeat:
    def test_it_calls_until_the_time_is_over(self) -> None:
        clock = iter([0.0, 0.0, 2.0, 2.0, 4.0, 4.0, 6.0])

        assert repeat(lambda: None, 5.0, lambda: next(clock)) == [(0, 2), (2, 4), (4, 6)]

    def test_it_calls_once_at_least(self) -> None:
        clock = iter([0.0, 0.0, 9.0])

        assert repeat(lambda: None, 1.0, lambda: next(clock)) == [(0, 9)]


class TestThreads:
    def test_all_begin_together_and_work_at_once(self) -> None:
        """A call ends once all three are in one; no time has to be long enough for that."""
        together = threading.Barrier(3)
        workers = [ThreadWorker(f"w{n}", n + 1, lambda: together.wait(120)) for n in range(3)]

        worked = run_threads(workers, 0.0)

        assert [(each.name, each.batch) for each in worked] == [("w0", 1), ("w1", 2), ("w2", 3)]
        assert [len(each.spans) for each in worked] == [1, 1, 1]
        assert _overlap(worked)

    def test_each_works_for_its_time(self) -> None:
        (worked,) = run_threads([ThreadWorker("w", 1, lambda: time.sleep(0.01))], 0.1)

        assert worked.spans[-1][1] - worked.spans[0][0] >= 0.1
        assert worked.spans[-1][0] - worked.spans[0][0] < 0.1

    def test_each_works_in_its_own_context(self) -> None:
        local = threading.local()
        seen: List[str] = []

        def entered(name: str) -> Callable[[], Any]:
            @contextlib.contextmanager
            def enter() -> Iterator[None]:
                local.name = name
                yield
                del local.name

            return enter

        workers = [
            ThreadWorker(name, 1, lambda: seen.append(local.name), entered(name)) for name in "ab"
        ]
        run_threads(workers, 0.01)

        assert set(seen) == {"a", "b"}

    def test_what_a_first_call_makes_for_its_thread_does_not_count(self) -> None:
        made: List[int] = []

        def call() -> None:
            if threading.get_ident() not in made:
                made.append(threading.get_ident())
                time.sleep(0.2)

        (worked,) = run_threads([ThreadWorker("w", 1, call)], 0.01)

        assert len(made) == 1
        assert worked.spans[0][1] - worked.spans[0][0] < 0.2

    @pytest.mark.parametrize("calls", [0, 1])
    def test_one_that_raises_says_why_and_the_others_end(self, calls: int) -> None:
        good_calls = itertools.repeat(None, calls)

        def fail() -> None:
            if next(good_calls, 0) == 0:
                raise ValueError("no more")

        good, bad = run_threads(
            [ThreadWorker("good", 1, lambda: time.sleep(0.01)), ThreadWorker("bad", 1, fail)], 0.05
        )

        assert good.error == ""
        assert bool(good.spans) == bool(calls)
        assert "no more" in bad.error
        assert not bad.spans

    def test_a_broken_barrier_of_its_own_is_a_workers_error(self) -> None:
        def fail() -> None:
            raise threading.BrokenBarrierError

        (worked,) = run_threads([ThreadWorker("bad", 1, fail)], 0.01)

        assert "BrokenBarrierError" in worked.error

    def test_nobody_waits_for_one_that_cannot_begin(self) -> None:
        def entered() -> Any:
            raise RuntimeError("no stream")

        good, bad = run_threads(
            [ThreadWorker("good", 1, time.time), ThreadWorker("bad", 1, time.time, entered)], 0.01
        )

        assert (good.spans, good.error) == ((), "")
        assert "no stream" in bad.error


@pytest.fixture
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


@pytest.mark.usefixtures("_importable")
class TestProcesses:
    def test_all_work_at_once_each_in_a_process_of_its_own(self, tmp_path: Path) -> None:
        """A call ends once both are in one; no time has to be long enough for that."""
        programs = [Program(f"w{n}", 4, f"{JOBS}:meets", str(tmp_path)) for n in range(2)]

        worked, reports = run_processes(programs, 0.0)

        assert [(each.name, each.batch, each.error) for each in worked] == [
            ("w0", 4, ""), ("w1", 4, ""),
        ]  # fmt: skip
        assert _overlap(worked)
        numbers = {each["process"] for each in reports}
        assert len(numbers) == 2
        assert os.getpid() not in numbers

    def test_each_works_for_its_time(self) -> None:
        ((worked,), _) = run_processes([Program("w", 1, f"{JOBS}:sleeper", 0.01)], 0.1)

        assert worked.spans[-1][1] - worked.spans[0][0] >= 0.1
        assert worked.spans[-1][0] - worked.spans[0][0] < 0.1

    def test_one_that_dies_while_it_works_has_its_error(self) -> None:
        programs = [
            Program("good", 1, f"{JOBS}:sleeper", 0.02),
            Program("killed", 1, f"{JOBS}:dies", int(signal.SIGKILL)),
            Program("raising", 1, f"{JOBS}:raises", "no more"),
        ]

        worked, reports = run_processes(programs, 0.1)

        assert [each.error for each in worked] == ["", "it was killed by signal 9", "no more"]
        assert worked[0].spans
        assert reports[1:] == (None, None)

    def test_one_that_cannot_begin_ends_it_all_with_its_own_exit_code(self) -> None:
        programs = [
            Program("good", 1, f"{JOBS}:sleeper", 0.02),
            Program("bad", 1, f"{JOBS}:cannot_begin", "out of memory"),
        ]
        began = time.monotonic()

        with pytest.raises(WorkerFailedError, match="the worker bad could not be made") as caught:
            run_processes(programs, 600.0)

        assert caught.value.exit_code == ExitCode.OUT_OF_MEMORY
        assert "ran out of memory" in caught.value.why
        assert time.monotonic() - began < 300

    def test_one_that_is_not_there_is_said(self) -> None:
        with pytest.raises(WorkerFailedError) as caught:
            run_processes([Program("bad", 1, "no_such_module:name", 1)], 1.0)

        assert "no_such_module" in caught.value.why
