"""`-p profile=…` on any experiment: what each profiler leaves, and where it is cut."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pstats
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import pytest
import torch
from toys import run_toy, toy_job, write_toy

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError, NotApplicableError
from narrowgauge_contract.outcome import Outcome, Row, Status
from narrowgauge_contract.traces import TRACE_FILE, Trace, TraceEvent, read_trace
from narrowgauge_kernels import harness
from narrowgauge_lab import kineto, profiling, spans, torch_compat
from narrowgauge_lab.spans import RecordedSpans

pytestmark = pytest.mark.usefixtures("quick_facts")

#: Small enough that no thread pool is asked: the tests fork from a process that has used it.
WORK = """
import torch
a = torch.ones(4)
with ctx.span("add"):
    time.sleep(0.01)
    b = a + a
ctx.metric("y", float(b[0]), unit="1", source="computed")
"""
#: Goes on until the profiler has stopped, or for so many seconds where it does not; what is run
#: afterwards is seen only where it has not stopped.
LOOP = """
import torch
a, until = torch.ones(4), time.monotonic() + {seconds}
while ctx.spans.open and time.monotonic() < until:
    a = a * 1.0
    time.sleep(0.005)
    {word}
a.neg()
"""


@pytest.fixture(autouse=True, scope="module")
def _ready() -> None:
    """torch 2's profiler imports a second's worth of modules; rows are forked from here."""
    if importlib.util.find_spec("torch._inductor") is not None:
        importlib.import_module("torch._inductor.config")


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, a row is cut only where its test asks for that."""
    monkeypatch.setattr(profiling, "LIMIT_S", 600.0)


def _row(outcome: Outcome) -> Row:
    (row,) = outcome.rows
    return row


def _trace(out: Path) -> Trace:
    return read_trace(out / "row-0" / TRACE_FILE)


def _files(row: Row) -> List[str]:
    return [side.path for side in row.side_files]


def _named(trace: Trace, name: str) -> TraceEvent:
    """The first of that name: torch 1.8 calls an operator inside itself."""
    return next(event for event in trace.events if event.name == name)


def test_cprofile_leaves_its_sums_and_a_text(tmp_path: Path) -> None:
    body = "def slow_one():\n    time.sleep(0.02)\nslow_one()"

    outcome, out = run_toy(tmp_path, body, "profile=cprofile")

    row = _row(outcome)
    assert _files(row) == ["row-0/profile.pstats", "row-0/profile.txt"]
    assert row.facts["profiled"] == "cprofile"
    assert row.parameters["profile"] == "cprofile"
    assert row.validity.valid
    functions = {key[2] for key in pstats.Stats(str(out / "row-0/profile.pstats")).stats}  # type: ignore[attr-defined]
    assert {"slow_one", "run"} <= functions
    assert "slow_one" in (out / "row-0/profile.txt").read_text()


def test_torch_puts_operators_and_spans_on_one_clock(tmp_path: Path) -> None:
    began = time.perf_counter()
    outcome, out = run_toy(tmp_path, WORK, "profile=torch")
    passed = time.perf_counter() - began

    trace, row = _trace(out), _row(outcome)
    span, add = _named(trace, "add"), _named(trace, "aten::add")
    doubt = trace.clock["profiler_uncertainty_us"] / 1e6
    assert (span.lane, span.kind, add.lane, add.kind) == ("spans", "span", "CPU ops", "cpu-op")
    assert 0 < doubt < 1, "a wrong unit or another clock is off by far more"
    assert span.start + 0.01 - doubt <= add.start <= add.end <= span.end + doubt
    assert trace.cut == ""
    assert 0.01 < trace.seconds < passed
    assert all(-1e-9 <= event.start <= trace.seconds for event in trace.events)
    assert row.facts["profiled"] == "torch"
    assert row.facts["trace"]["events"] == len(trace.events)
    assert row.facts["trace"]["cut"] == ""
    assert _files(row) == [f"row-0/{TRACE_FILE}"]
    assert not list((out / "row-0").glob("kineto-*"))


@pytest.mark.parametrize("word", ["pass", "ctx.progress(1, 2)"])
def test_a_long_row_is_cut_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """Before torch 2.0 the experiment's own calls are the only moments at which it may stop."""
    monkeypatch.setattr(profiling, "LIMIT_S", 0.1)
    stops = torch_compat.backward_is_visible() or word != "pass"

    body = LOOP.format(word=word, seconds=60 if stops else 0.3)
    outcome, out = run_toy(tmp_path, body, "profile=torch")

    trace = _trace(out)
    assert _row(outcome).status is Status.COMPLETE
    assert trace.seconds < 30 if stops else trace.seconds > 0.3
    assert ("aten::neg" in {event.name for event in trace.events}) != stops
    assert (trace.cut == f"only the first {trace.seconds:.1f} s of the row are in it") == stops
    assert _row(outcome).facts["trace"]["cut"] == trace.cut


def test_more_events_than_a_reader_can_use_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "MOST_EVENTS", 10)

    run_toy(
        tmp_path, "import torch\na = torch.ones(4)\nfor _ in range(20): a = a + a", "profile=torch"
    )

    trace = _trace(tmp_path / "out")
    assert len(trace.events) == 10
    assert trace.cut.startswith("only the first 10 of ")
    # Events are written to the nanosecond.
    assert trace.seconds == pytest.approx(max(event.start for event in trace.events), abs=1e-9)


@pytest.mark.skipif(not torch_compat.backward_is_visible(), reason="torch cannot tell")
def test_the_profiler_does_not_stop_inside_a_backward_pass(tmp_path: Path) -> None:
    """The row itself asks it to, in the middle of the pass, and ends once it has stopped."""
    body = """
import torch
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2
    @staticmethod
    def backward(context, gradient):
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.1)
        ctx.fact("open", ctx.spans.open)
        return gradient * 3
x = torch.ones(2, requires_grad=True)
Slow.apply(x).sum().backward()
ctx.fact("gradient", x.grad.tolist())
until = time.monotonic() + 60
while ctx.spans.open and time.monotonic() < until:
    time.sleep(0.01)
x.neg()
"""
    outcome, out = run_toy(tmp_path, body, "profile=torch")

    facts = _row(outcome).facts
    assert (facts["gradient"], facts["open"]) == ([3.0, 3.0], True)
    trace = _trace(out)
    assert 0.1 < trace.seconds < 30
    assert trace.cut
    names = {event.name for event in trace.events}
    assert any("SlowBackward" in name for name in names)
    assert "aten::neg" not in names


class _Profiler:
    """In place of the one that would synchronise a GPU to stop."""

    def __init__(self, device: torch.device) -> None:
        self.began = self.ended = 0.0
        self.stopped = False

    def start(self) -> None:
        self.began = time.perf_counter() - 2 * profiling.LIMIT_S

    def stop(self) -> None:
        self.stopped = True


def test_the_profiler_does_not_stop_while_a_stream_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopping synchronises, which would wait for a release that only comes afterwards."""
    held = SimpleNamespace(harness_hold=lambda *_: None, harness_release=lambda _: True)
    monkeypatch.setattr(harness, "require", lambda _: None)
    monkeypatch.setattr(harness, "torch", SimpleNamespace(ops=SimpleNamespace(narrowgauge=held)))
    monkeypatch.setattr(profiling, "KinetoProfiler", _Profiler)
    monkeypatch.setattr(torch_compat, "capturing", lambda: False)
    monkeypatch.setattr(torch_compat, "in_backward", lambda: False)
    context: Any = SimpleNamespace(device=torch.device("cuda"), at_rest=None)
    window = profiling._Window(context, RecordedSpans(torch.device("cpu")))
    again = []
    monkeypatch.setattr(profiling.signal, "setitimer", lambda _, seconds: again.append(seconds))
    window.begin()
    profiler: Any = window.profiler

    harness.hold(0, 5.0)
    window._alarm(0, None)
    window._rest()
    assert (profiler.stopped, again[-1]) == (False, profiling._AGAIN_S)
    harness.release(0)
    window._rest()

    assert profiler.stopped
    assert not harness.is_holding()
    window.end()


def test_stopping_makes_no_python_objects_of_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 20 s after 2 s of small operators, in the middle of the row."""
    if not hasattr(torch.autograd.profiler.profile, "_ensure_function_events"):
        pytest.skip("this torch has no choice")
    for name in ("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):
        monkeypatch.setenv(name, "")  # so that what `start` sets does not outlive the test
    made = []
    monkeypatch.setattr(
        torch.autograd.profiler.profile, "_ensure_function_events", lambda self: made.append(1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profiler = kineto.KinetoProfiler(torch.device("cpu"))
        profiler.start()
        profiler.stop()

    assert made == []


@pytest.mark.parametrize("profiler", ["torch", "cprofile"])
def test_a_failed_row_keeps_its_error_and_what_was_seen(tmp_path: Path, profiler: str) -> None:
    outcome, _ = run_toy(tmp_path, f"{WORK}\nraise ValueError('no')", f"profile={profiler}")

    row = _row(outcome)
    assert row.error is not None
    assert (row.error.kind, row.error.what) == ("ValueError", "no")
    assert row.facts["profiled"] == profiler
    assert row.side_files


def test_an_experiment_may_keep_its_spans_without_a_profiler(tmp_path: Path) -> None:
    body = """
import threading
ctx.record_spans()
def load():
    with ctx.span("load"):
        time.sleep(0.02)
other = threading.Thread(target=load)
with ctx.span("step"):
    with ctx.span("inner"):
        other.start()
        other.join()
"""
    outcome, out = run_toy(tmp_path, body)

    trace, row = _trace(out), _row(outcome)
    assert {event.name: event.lane for event in trace.events} == {
        "step": "spans", "inner": "spans", "load": "spans, thread 2",
    }  # fmt: skip
    step, inner, load = (_named(trace, name) for name in ("step", "inner", "load"))
    assert step.start <= inner.start <= load.start < load.end <= inner.end <= step.end
    assert load.seconds > 0.019  # it slept for 0.02; how much longer is the machine's matter
    assert "profiled" not in row.facts
    assert "profile" not in row.parameters
    assert "aten" not in str(trace.events)


def test_spans_that_nobody_asked_for_cost_nothing_and_leave_nothing(tmp_path: Path) -> None:
    outcome, _ = run_toy(tmp_path, WORK)

    assert _files(_row(outcome)) == []
    assert "trace" not in _row(outcome).facts


def test_there_is_an_end_to_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MOST_SPANS", 3)
    kept = RecordedSpans(torch.device("cpu"))
    for number in range(5):
        with kept.span(str(number)):
            pass

    events, clock = kept.finish()

    assert [event.name for event in events] == ["0", "1", "2"]
    assert (kept.left_out, clock) == (2, {})


def test_a_span_ends_with_an_exception_and_lets_it_through() -> None:
    kept = RecordedSpans(torch.device("cpu"))
    with pytest.raises(KeyError), kept.span("fails"):
        raise KeyError

    ((event,), _) = kept.finish()
    assert event.name == "fails"


def test_nsys_needs_a_gpu_and_says_so_before_any_row(tmp_path: Path) -> None:
    with pytest.raises(NotApplicableError, match="needs a GPU"):
        run_toy(tmp_path, "raise ValueError", "profile=nsys")

    outcome = json.loads((tmp_path / "out/outcome.json").read_text())
    assert (outcome["rows"], outcome["exit_code"]) == ([], ExitCode.NOT_APPLICABLE)


def test_nsys_must_have_started_the_lab_and_the_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiments = write_toy(tmp_path, "pass")
    job = toy_job(experiments, "profile=nsys", "x=3,5", "gear=high", profile="short")
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(NotApplicableError) as raised:
        profiling.require_profiler(job, "cuda", {})

    get, command = raised.value.next_step.splitlines()
    assert "nsight-systems-cli" in get
    assert command.startswith("nsys profile --trace=cuda,nvtx ")
    assert "--trace-fork-before-exec=true" in command
    assert command.endswith(
        " python3 -m narrowgauge_lab run toy --profile short --seed 7 -p x=3,5 -p gear=high"
        " -p profile=nsys --results results"
    )
    profiling.require_profiler(job, "cuda", {"NSYS_PROFILING_SESSION_ID": "1"})

    nsys = tmp_path / "nsys"
    nsys.write_text("#!/bin/sh\n")
    nsys.chmod(0o755)
    with pytest.raises(NotApplicableError) as raised:
        profiling.require_profiler(job, "cuda", {})
    assert raised.value.next_step == command, "it is here, so nobody need be told where to get it"


def test_a_torch_without_kineto_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = toy_job(write_toy(tmp_path, "pass"), "profile=torch")
    monkeypatch.setattr(torch_compat, "profiler_available", lambda: False)

    with pytest.raises(NotApplicableError, match="no profiler"):
        profiling.require_profiler(job, "cpu", {})


# Kineto's export of a GPU, as torch 1.8 (integers, capitals, a thread's handle as text) and as
# torch 2 write it.
_OLD: List[Dict[str, Any]] = [
    {"cat": "Operator", "name": "aten::conv2d", "tid": "777", "ts": 1000100, "dur": 50},
    {"cat": "Runtime", "name": "cudaLaunchKernel", "tid": 31, "ts": 1000110, "dur": 5},
    {"cat": "Kernel", "name": "sgemm", "pid": 0, "tid": "stream 7", "ts": 1000120, "dur": 40,
     "args": {"device": 0, "stream": 7, "grid": [1, 1, 1]}},
    {"cat": "Memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": "stream 7",
     "ts": 1000130, "dur": 9, "args": {"device": 0, "stream": 7, "bytes": 64}},
]  # fmt: skip
_NEW: List[Dict[str, Any]] = [
    {"cat": "cpu_op", "name": "aten::conv2d", "tid": "777", "ts": 1000100.0, "dur": 50.0},
    {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": "777", "ts": 1000110.0, "dur": 5.5},
    {"cat": "kernel", "name": "sgemm", "pid": 0, "tid": 7, "ts": 1000120.0, "dur": 40.0,
     "args": {"device": 0, "stream": 7, "grid": [1, 1, 1], "registers per thread": 32}},
    {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7,
     "ts": 1000130.0, "dur": 9.25, "args": {"device": 0, "stream": 7, "bytes": 64}},
    {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "pid": 1, "tid": 8,
     "ts": 1000140.0, "dur": 1.0, "args": {"device": 1, "stream": 8}},
    {"cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 20, "ts": 1000150.0,
     "dur": 1.0, "args": {"device": 0, "stream": 20}},
    {"cat": "gpu_user_annotation", "name": "x", "pid": 0, "tid": 7, "ts": 1000100.0, "dur": 9.0},
    {"cat": "python_function", "name": "y", "tid": "777", "ts": 1000100.0, "dur": 9.0},
]  # fmt: skip


class _Export:
    """In place of torch's profiler: writes an export of events between two sets of marks."""

    def __init__(self, events: List[Dict[str, Any]], marks: int = 20) -> None:
        self.events = events
        self.marks = marks

    def export_chrome_trace(self, path: str) -> None:
        ends = [(1000000 + n, n) for n in range(10)] + [(2000000 + n, n + 10) for n in range(10)]
        marks = [
            {"cat": "user_annotation", "name": f"narrowgauge.clock.{n}", "tid": "777", "ts": ts,
             "dur": 1}
            for ts, n in ends[: self.marks]
        ]  # fmt: skip
        whole = [{"ph": "X", "args": {}, **e} for e in (*marks, *self.events)]
        whole.insert(3, {"ph": "i", "name": "Iteration Start", "s": "g", "ts": 1})
        Path(path).write_text(json.dumps({"schemaVersion": 1, "traceEvents": whole}, indent=1))


def _read(tmp_path: Path, export: _Export, drift: float = 0.0) -> kineto.KinetoProfiler:
    """A profiler whose host clock is 40 s ahead of the export's at the start, and `drift` more
    at its end; the marks are bracketed by 2 us, one of each ten tighter."""
    profiler = kineto.KinetoProfiler(torch.device("cpu"))
    profiler._profile = export  # type: ignore[assignment]
    for half, base in ((0, 41.0), (1, 42.0 + drift)):
        for n in range(10):
            doubt = 1e-6 if n == 4 else 5e-6
            middle = base + n * 1e-6
            assert len(profiler._marks) == half * 10 + n
            profiler._marks.append((middle - doubt, middle + doubt))
    profiler.began, profiler.ended = 41.0, 42.0
    return profiler


@pytest.mark.parametrize(("export", "launches"), [(_OLD, "host launch"), (_NEW, "host launch")])
def test_the_export_of_a_gpu_becomes_lanes(
    tmp_path: Path, export: List[Dict[str, Any]], launches: str
) -> None:
    events = {event.name: event for event in _read(tmp_path, _Export(export)).events(tmp_path)}

    kernel, copy = events["sgemm"], events["Memcpy HtoD (Pageable -> Device)"]
    assert (events["aten::conv2d"].lane, events["aten::conv2d"].kind) == ("CPU ops", "cpu-op")
    assert (events["cudaLaunchKernel"].lane, events["cudaLaunchKernel"].kind) == (
        launches,
        "launch",
    )
    assert (kernel.lane, kernel.kind, kernel.args) == (
        "GPU stream 7", "kernel", {"grid": [1, 1, 1]},
    )  # fmt: skip
    assert (copy.lane, copy.kind, copy.args) == ("copies H2D", "copy", {"bytes": 64})
    assert kernel.start == pytest.approx(41.00012, abs=1e-8)
    assert kernel.seconds == pytest.approx(40e-6)
    if export is _NEW:
        assert events["Memcpy DtoH (Device -> Pinned)"].lane == "GPU 1 copies D2H"
        assert events["Memset (Device)"].lane == "GPU stream 20"
        assert not {"x", "y"} & set(events)


def test_a_drifting_clock_is_taken_straight_and_said(tmp_path: Path) -> None:
    late = {"cat": "cpu_op", "name": "late", "tid": "777", "ts": 1900000.0, "dur": 1.0}
    profiler = _read(tmp_path, _Export([late]), drift=1e-3)

    (event,) = profiler.events(tmp_path)

    assert event.start == pytest.approx(41.9 + 0.9e-3, abs=1e-7)
    assert profiler.clock["profiler_drift_us"] == pytest.approx(1000.0, abs=0.01)
    assert profiler.clock["profiler_uncertainty_us"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("marks", [0, 9, 10])
def test_an_export_without_its_marks_is_refused(tmp_path: Path, marks: int) -> None:
    with pytest.raises(NarrowgaugeError, match="did not see the marks"):
        _read(tmp_path, _Export(_NEW, marks)).events(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": [{"ph": "X"', '{"traceEvents": [{}'])
def test_a_torn_export_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "export.json").write_text(text)

    with pytest.raises(NarrowgaugeError):
        list(kineto.read_export(tmp_path / "export.json"))


class _FakeTime:
    """In place of the module `time`: each look at the clock takes a microsecond."""

    def __init__(self) -> None:
        self.at = 1000.0

    def perf_counter(self) -> float:
        self.at += 1e-6
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class _FakeEvent:
    """A CUDA event on a GPU whose clock runs 100 ppm fast and began elsewhere."""

    time = _FakeTime()

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        self.at = (self.time.perf_counter() - 7.0) * (1.0 + 1e-4)

    def synchronize(self) -> None:
        return

    def elapsed_time(self, other: _FakeEvent) -> float:
        return (other.at - self.at) * 1e3


def _fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a clock on which nothing takes time but looking at it, and sleeping."""
    streams = {threading.get_ident(): 0}

    class Stream:
        def __init__(self) -> None:
            self.cuda_stream = streams.setdefault(threading.get_ident(), 4242)

    monkeypatch.setattr(spans, "time", _FakeEvent.time)
    monkeypatch.setattr(torch.cuda, "Event", _FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch_compat, "capturing", lambda: False)


def _spans_on_a_fake_gpu() -> Tuple[List[TraceEvent], Dict[str, float]]:
    kept = RecordedSpans(torch.device("cuda"))

    def copy() -> None:
        with kept.span("copy"):
            _FakeEvent.time.sleep(0.01)

    other = threading.Thread(target=copy)
    with kept.span("step"):
        other.start()
        other.join()
    _FakeEvent.time.sleep(0.1)
    with kept.span("late"):
        _FakeEvent.time.sleep(0.01)
    return kept.finish()


def test_spans_of_a_gpu_are_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_cuda(monkeypatch)

    events, clock = _spans_on_a_fake_gpu()

    assert clock["gpu_drift_ppm"] == pytest.approx(100.0, abs=0.1)
    assert clock["gpu_uncertainty_us"] == pytest.approx(1.0, abs=0.01)  # two looks later, halved
    host = {event.name: event for event in events if event.kind == "span"}
    gpu = {event.name: event for event in events if event.kind == "gpu-span"}
    assert {name: event.lane for name, event in gpu.items()} == {
        "step": "spans, GPU stream 0", "late": "spans, GPU stream 0",
        "copy": "spans, GPU stream 1",
    }  # fmt: skip
    for name, event in gpu.items():
        # This GPU takes no time for anything, so both sides of a span are the same.
        assert event.start == pytest.approx(host[name].start, abs=5e-6)
        assert event.seconds == pytest.approx(host[name].seconds, abs=5e-6)


def test_while_a_graph_is_captured_only_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_cuda(monkeypatch)
    monkeypatch.setattr(torch_compat, "capturing", lambda: True)

    events, _ = _spans_on_a_fake_gpu()

    assert {event.kind for event in events} == {"span"}
