"""How rows are started, how they end, and what is left when they end badly."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any, List

import pytest
from toys import METRIC, fold, request, run_toy, write_toy

from narrowgauge_contract.errors import ExitCode, UsageError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.outcome import InsideFacts, Status, load_outcome
from narrowgauge_lab import facts, session, stopping, supervisor

pytestmark = pytest.mark.usefixtures("quick_facts")


def test_lists_make_rows_and_repeats_are_interleaved(tmp_path: Path) -> None:
    outcome, out = run_toy(tmp_path, METRIC, "x=3,5", profile="short")

    assert [(row.parameters["x"], row.repeat, row.seed) for row in outcome.rows] == [
        (3, 0, 7), (5, 0, 7), (3, 1, 8), (5, 1, 8),
    ]  # fmt: skip
    assert [row.metrics[0].values for row in outcome.rows] == [(6.0,), (10.0,), (6.0,), (10.0,)]
    assert (outcome.status, outcome.exit_code) == (Status.COMPLETE, ExitCode.OK)
    assert load_outcome(out / "outcome.json") == outcome
    assert not (out / ".reserve").exists()


def test_every_row_is_a_process_of_its_own_and_seeded(tmp_path: Path) -> None:
    body = """
import random, numpy, torch
ctx.fact("pid", os.getpid())
ctx.fact("oom", int(open("/proc/self/oom_score_adj").read()))
ctx.fact("cuda", torch.cuda.is_initialized())
ctx.fact("clean", not hasattr(math, "spoilt"))
math.spoilt = True
ctx.fact("drawn", [random.random(), float(numpy.random.rand()), float(torch.rand(1))])
"""
    outcome, _ = run_toy(tmp_path, body, "x=1,2", profile="short")

    facts_of = [row.facts for row in outcome.rows]
    assert len({f["pid"] for f in facts_of} | {os.getpid()}) == 5
    assert all(f["clean"] for f in facts_of)
    assert not any(f["cuda"] for f in facts_of)
    assert {f["oom"] for f in facts_of} == {500}, "memory running out must not kill the parent"
    assert facts_of[0]["drawn"] == facts_of[1]["drawn"], "one seed, one stream"
    for one, other in zip(facts_of[0]["drawn"], facts_of[2]["drawn"]):
        assert one != other, "repeats have seeds of their own"
    assert facts_of[0]["device"] == "cpu"
    assert facts_of[0]["threads"] >= 1
    assert facts_of[0]["deterministic_algorithms"] is False


def test_all_that_a_row_says_is_in_the_outcome(tmp_path: Path) -> None:
    body = """
ctx.metric("loss", [1.0, math.nan, math.inf], unit="nat", source="computed", index="epoch")
ctx.fact("precision_ran", "bf16")
ctx.side_file("a/b.txt").write_text("hello")
ctx.log("half way")
ctx.progress(1, 2, unit="image", phase="epoch 1/1")
"""
    _, out = run_toy(tmp_path, body)

    (row,) = load_outcome(out / "outcome.json").rows
    (metric,) = row.metrics
    assert (metric.name, metric.unit, metric.source, metric.index) == (
        "loss", "nat", "computed", "epoch",
    )  # fmt: skip
    assert metric.values[0] == 1.0
    assert math.isnan(metric.values[1])
    assert metric.values[2] == math.inf
    assert row.facts["precision_ran"] == "bf16"
    (side_file,) = row.side_files
    assert (side_file.path, side_file.bytes) == ("row-0/a/b.txt", 5)
    assert side_file.sha256.startswith("2cf24dba5fb0a30e")
    assert row.validity.valid
    assert row.seconds is not None
    kinds = {event.kind for event in read_events(out / EVENTS_FILE)}
    assert {EventKind.LOG, EventKind.PROGRESS, EventKind.RUN_START, EventKind.RUN_END} <= kinds


def test_an_exception_fails_its_row_and_the_next_one_runs(tmp_path: Path) -> None:
    body = (
        METRIC
        + """
ctx.side_file("kept.txt").write_text("x")
ctx.side_file("never.txt")
if ctx.parameters["x"] == 1: raise RuntimeError("broken gear")
os.mkdir(ctx.folder / "sub"); ctx.side_file("never.txt").write_text("y")
"""
    )
    outcome, _ = run_toy(tmp_path, body, "x=1,2")

    first, second = outcome.rows
    assert first.error is not None
    assert (first.status, first.error.kind, first.error.what) == (
        Status.FAILED, "RuntimeError", "broken gear",
    )  # fmt: skip
    assert "run.py" in first.error.trace
    assert first.metrics[0].values == (2.0,)
    assert [f.path for f in first.side_files] == ["row-0/kept.txt"]
    assert first.facts["device"] == "cpu"
    assert not first.validity.valid
    assert second.validity.valid
    assert (outcome.status, outcome.exit_code) == (Status.FAILED, ExitCode.RUN_FAILED)
    assert outcome.error == first.error


#: What a row does, the run's exit code, and the recorded error.
_FAILURES = [
    ("raise MemoryError()", ExitCode.OUT_OF_MEMORY, "OutOfMemoryError"),
    ('raise RuntimeError("CUDA out of memory. Tried")', ExitCode.OUT_OF_MEMORY, "OutOfMemoryError"),
    (
        "raise type('OutOfMemoryError', (RuntimeError,), {})('Tried to allocate')",
        ExitCode.OUT_OF_MEMORY,
        "OutOfMemoryError",
    ),
    (
        'raise RuntimeError("[enforce fail] DefaultCPUAllocator: can\'t allocate memory")',
        ExitCode.OUT_OF_MEMORY,
        "OutOfMemoryError",
    ),
    (
        'raise RuntimeError("CUDA error: device 0 was lost")',
        ExitCode.RUN_FAILED,
        "DeviceLostError",
    ),
    ("os.kill(os.getpid(), signal.SIGSEGV)", ExitCode.RUN_FAILED, "RowCrashedError"),
    ("sys.exit(0)", ExitCode.RUN_FAILED, "SystemExit"),
    ("os._exit(0)", ExitCode.RUN_FAILED, "RowCrashedError"),
    ("os._exit(77)", ExitCode.RUN_FAILED, "RowCrashedError"),
    ('ctx.fact("x", object())', ExitCode.RUN_FAILED, "TypeError"),
    ('ctx.side_file("never.txt")', ExitCode.USAGE, "UsageError"),
    ('ctx.data("mnist")', ExitCode.USAGE, "ExperimentFileError"),
    ('raise OSError(28, "No space left on device")', ExitCode.DISK_FULL, "DiskFullError"),
]


@pytest.mark.parametrize(
    ("counts", "code", "kind"),
    [
        ([2, 3], ExitCode.OUT_OF_MEMORY, "OutOfMemoryError"),
        ([2, 2], ExitCode.RUN_FAILED, "RowCrashedError"),
        ([None, None], ExitCode.OUT_OF_MEMORY, "OutOfMemoryError"),
    ],
)
def test_a_killed_row_ran_out_of_memory_unless_the_kernels_count_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: List[Any], code: int, kind: str
) -> None:
    monkeypatch.setattr(supervisor, "oom_kills", lambda: counts.pop(0))
    outcome, _ = run_toy(tmp_path, METRIC + "os.kill(os.getpid(), signal.SIGKILL)")

    assert outcome.exit_code == code
    assert outcome.rows[0].error is not None
    assert outcome.rows[0].error.kind == kind
    assert outcome.rows[0].metrics[0].values == (2.0,)


@pytest.mark.parametrize(("body", "code", "kind"), _FAILURES)
def test_each_way_to_fail_has_its_code_and_keeps_what_was_measured(
    tmp_path: Path, body: str, code: int, kind: str
) -> None:
    outcome, _ = run_toy(tmp_path, METRIC + body)

    (row,) = outcome.rows
    assert (outcome.exit_code, outcome.status) == (code, Status.FAILED)
    assert row.error is not None
    assert (row.status, row.error.kind) == (Status.FAILED, kind)
    assert row.metrics[0].values == (2.0,)


def test_a_crash_and_a_kill_name_their_signal_and_the_reason(tmp_path: Path) -> None:
    body = "os.kill(os.getpid(), signal.SIGSEGV if ctx.parameters['x'] else signal.SIGKILL)"
    outcome, _ = run_toy(tmp_path, body, "x=0,1")

    killed, crashed = (row.error for row in outcome.rows)
    assert killed is not None
    assert crashed is not None
    assert "SIGKILL" in killed.what
    assert "memory" in killed.why, "whether it was memory, or that nobody can tell"
    assert "SIGSEGV" in crashed.what
    assert "run.py" in crashed.trace, "the Python line that led there"
    assert killed.trace == ""


def test_memory_decides_over_another_failure_and_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    body = """
x = ctx.parameters["x"]
if x == 1: raise ValueError("one")
if x == 2: raise MemoryError()
if x == 3: raise OSError(28, "No space left on device")
"""
    outcome, _ = run_toy(tmp_path / "memory", body, "x=0,1,2")
    assert outcome.exit_code == ExitCode.OUT_OF_MEMORY
    outcome, _ = run_toy(tmp_path / "disk", body, "x=1,3,0")
    assert outcome.exit_code == ExitCode.DISK_FULL
    assert [row.status for row in outcome.rows] == [Status.FAILED, Status.FAILED]


def test_a_reason_that_all_rows_share_is_the_runs_reason(tmp_path: Path) -> None:
    body = """
from narrowgauge_contract.errors import NotApplicableError
if ctx.parameters["x"]: raise NotApplicableError("no bf16 here")
"""
    outcome, _ = run_toy(tmp_path / "all", body, "x=1,2")
    assert outcome.exit_code == ExitCode.NOT_APPLICABLE
    outcome, _ = run_toy(tmp_path / "some", body, "x=0,1")
    assert outcome.exit_code == ExitCode.RUN_FAILED


_SKIPS = """
from narrowgauge_contract.errors import SkippedError
if ctx.parameters["x"]: raise SkippedError("no such engine here", why="it is not installed")
"""


def test_a_skipped_row_is_no_failure_and_says_why(tmp_path: Path) -> None:
    outcome, _ = run_toy(tmp_path, _SKIPS + METRIC, "x=0,1")

    assert (outcome.status, outcome.exit_code) == (Status.COMPLETE, ExitCode.OK)
    done, skipped = outcome.rows
    assert done.validity.valid
    assert skipped.status is Status.SKIPPED
    assert skipped.validity.reasons == ("skipped: no such engine here: it is not installed",)
    assert skipped.error is not None
    assert skipped.error.kind == "SkippedError"


def test_a_run_of_skipped_rows_alone_is_not_applicable(tmp_path: Path) -> None:
    outcome, _ = run_toy(tmp_path, _SKIPS, "x=1,2")

    assert (outcome.status, outcome.exit_code) == (Status.FAILED, ExitCode.NOT_APPLICABLE)
    assert outcome.error is not None
    assert outcome.error.what == "nothing could be measured here"
    assert outcome.error.why == "no such engine here: it is not installed"


def test_what_failed_is_told_before_what_was_skipped(tmp_path: Path) -> None:
    body = (
        _SKIPS.replace('["x"]:', '["x"] == 1:') + 'if ctx.parameters["x"]: raise ValueError("two")'
    )
    outcome, _ = run_toy(tmp_path, body, "x=1,2")

    assert (outcome.status, outcome.exit_code) == (Status.FAILED, ExitCode.RUN_FAILED)
    assert outcome.error is not None
    assert outcome.error.what == "two"


def test_an_error_of_the_kernels_keeps_its_code_and_name(tmp_path: Path) -> None:
    body = """
from narrowgauge_kernels.errors import KernelsNotBuiltError
raise KernelsNotBuiltError("not built", why="nobody did", next_step="build them")
"""
    outcome, _ = run_toy(tmp_path, body)

    assert outcome.exit_code == ExitCode.BUILD_FAILED
    assert outcome.error is not None
    assert (outcome.error.kind, outcome.error.next_step) == ("KernelsNotBuiltError", "build them")


def test_an_experiment_that_does_not_import_fails_as_a_row(tmp_path: Path) -> None:
    write_toy(tmp_path / "experiments", "pass")
    (tmp_path / "experiments" / "toy" / "run.py").write_text("import no_such_module\n")
    outcome = session.run(request(tmp_path))

    assert outcome.exit_code == ExitCode.RUN_FAILED
    assert outcome.error is not None
    assert outcome.error.kind == "ModuleNotFoundError"


def test_a_run_without_a_valid_row_says_so(tmp_path: Path) -> None:
    outcome, _ = run_toy(tmp_path, 'ctx.invalid("throttled")\nctx.invalid("throttled")')

    assert (outcome.status, outcome.exit_code) == (Status.COMPLETE, ExitCode.NO_VALID_ROW)
    assert outcome.rows[0].validity.reasons == ("throttled",)


def test_one_odd_event_costs_itself_only(tmp_path: Path) -> None:
    """An experiment can write to the file behind our back; the fold has to get over it."""
    body = f"""
with open(ctx.out / "events.jsonl", "a") as stream:
    stream.write('{{"kind": "metric", "t": 1, "utc": 1, "row": 0, "data": {{}}}}\\n' + 'torn\\n')
{METRIC}
"""
    outcome, out = run_toy(tmp_path, body)

    assert outcome.rows[0].metrics[0].values == (2.0,)
    assert load_outcome(out / "outcome.json") == outcome


def test_resume_skips_complete_rows_and_begins_the_others_anew(tmp_path: Path) -> None:
    marker = tmp_path / "fixed"
    gate = f'if ctx.parameters["x"] == 2 and not os.path.exists("{marker}")'
    body = f'{METRIC}\n{gate}: raise ValueError("no")'
    first, _ = run_toy(tmp_path, body, "x=1,2,3")
    marker.touch()
    second, out = run_toy(tmp_path, body, "x=1,2,3", resume=True)

    assert [row.status for row in first.rows] == [Status.COMPLETE, Status.FAILED, Status.COMPLETE]
    assert [row.status for row in second.rows] == [Status.COMPLETE] * 3
    assert [row.metrics[0].values for row in second.rows] == [(2.0,), (4.0,), (6.0,)]
    assert (second.exit_code, second.error) == (ExitCode.OK, None)
    starts = [e.row for e in read_events(out / EVENTS_FILE) if e.kind is EventKind.ROW_START]
    assert starts == [0, 1, 2, 1]


def test_resume_gives_the_checkpoint_and_a_complete_row_leaves_none(tmp_path: Path) -> None:
    body = """
state = ctx.checkpoints.load()
ctx.fact("loaded", state is not None)
if state is None:
    ctx.checkpoints.save({"epoch": 3})
    raise ValueError("fell over")
"""
    first, out = run_toy(tmp_path, body)
    assert first.rows[0].facts["loaded"] is False
    assert len(list((out / "checkpoints" / "row-0").iterdir())) == 1
    second, _ = run_toy(tmp_path, body, resume=True)

    assert second.rows[0].facts["loaded"] is True
    assert list((out / "checkpoints" / "row-0").iterdir()) == []


def test_resume_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record has one set of facts, so rows of two torches cannot stand in it."""
    run_toy(tmp_path, METRIC)
    elsewhere = InsideFacts(python="3", platform="test", torch="2.13.0")
    monkeypatch.setattr(facts, "gather", lambda env: elsewhere)

    with pytest.raises(UsageError, match="other circumstances") as caught:
        session.run(request(tmp_path, resume=True))
    assert "torch: 1.8.0, now 2.13.0" in str(caught.value)
    assert fold(tmp_path / "out").rows()[0].status is Status.COMPLETE
    assert load_outcome(tmp_path / "out" / "outcome.json").status is Status.COMPLETE


def test_a_row_that_does_not_heed_the_stop_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row asks its parent to stop, and then holds on; the next row never starts."""
    monkeypatch.setattr(session, "StopRequest", lambda: stopping.StopRequest(grace_s=0.3))
    body = (
        METRIC
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getppid(), signal.SIGINT)
time.sleep(120)
"""
    )
    started = time.monotonic()
    outcome, _ = run_toy(tmp_path, body, "x=1,2")

    assert time.monotonic() - started < 60
    assert (outcome.exit_code, outcome.status) == (ExitCode.INTERRUPTED, Status.INTERRUPTED)
    assert [row.status for row in outcome.rows] == [Status.INTERRUPTED]
    assert outcome.rows[0].metrics[0].values == (2.0,)


def test_a_second_interrupt_kills_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the first one was heard: two that wait to be heard are one."""
    monkeypatch.setattr(session, "StopRequest", lambda: stopping.StopRequest(grace_s=120.0))
    body = """
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
os.kill(os.getppid(), signal.SIGINT)
until = time.monotonic() + 120
while not heard and time.monotonic() < until:
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGINT)
while time.monotonic() < until:
    time.sleep(0.01)
"""
    started = time.monotonic()
    outcome, _ = run_toy(tmp_path, body)

    assert time.monotonic() - started < 60
    assert outcome.rows[0].status is Status.INTERRUPTED


def test_an_interrupt_after_the_last_row_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "StopRequest", lambda: stopping.StopRequest(grace_s=120.0))
    body = METRIC + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getppid(), 2)"
    outcome, _ = run_toy(tmp_path, body)

    assert (outcome.exit_code, outcome.status) == (ExitCode.OK, Status.COMPLETE)


def test_the_signal_handlers_are_put_back(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    run_toy(tmp_path, METRIC)

    assert [signal.getsignal(number) for number in numbers] == before


def test_siblings_import_relatively_and_reload_from_another_folder(tmp_path: Path) -> None:
    for number in (1, 2):
        home = tmp_path / str(number)
        body = 'from .gear import TEETH\nctx.fact("teeth", TEETH)'
        write_toy(home / "experiments", body)
        (home / "experiments" / "toy" / "gear.py").write_text(f"TEETH = {number}\n")
        outcome = session.run(request(home))

        assert outcome.error is None, outcome.error
        assert outcome.rows[0].facts["teeth"] == number


def test_a_line_torn_by_a_kill_is_ended_before_the_run_goes_on(tmp_path: Path) -> None:
    run_toy(tmp_path, METRIC + "raise ValueError()")
    events = tmp_path / "out" / EVENTS_FILE
    with EventLog(events) as log:
        os.write(log._descriptor, b'{"kind": "metr')
    outcome, _ = run_toy(tmp_path, METRIC + "raise ValueError()", resume=True)

    assert len(outcome.rows) == 1
    assert load_outcome(tmp_path / "out" / "outcome.json") == outcome
    assert sum(e.kind is EventKind.RUN_START for e in read_events(events)) == 2
