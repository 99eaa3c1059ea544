"""`-p profile=cprofile|torch|nsys`, on any experiment: its `run(ctx)` under a profiler.

    cprofile  Python's own: profile.pstats, and the 30 dearest functions in profile.txt. Sees the
              Python of the row's main thread; has no bound, since it keeps sums, not events.
    torch     spans.json.gz (see `contract.traces`): operators, CUDA calls, kernels, copies, and the
              experiment's spans. Watches the first LIMIT_S seconds of the row, up to MOST_EVENTS
              events; the fact `trace` says how it was cut.
    nsys      marks the row for Nsight Systems (NVTX ranges, cudaProfilerApi), which must have
              started the lab: it cannot begin with a process that was forked already.

A profiled row has the fact `profiled`, and the parameter makes it a configuration of its own: its
timings include the profiler and never meet those of rows without.
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import pstats
import shlex
import shutil
import signal
import threading
import time
from types import FrameType
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional

import torch

from narrowgauge_contract.errors import NarrowgaugeError, NotApplicableError
from narrowgauge_contract.job import Job
from narrowgauge_contract.parameters import PROFILE_PARAMETER
from narrowgauge_contract.traces import TRACE_FILE, Trace, TraceEvent, write_trace
from narrowgauge_kernels import harness
from narrowgauge_lab import torch_compat
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.kineto import KinetoProfiler
from narrowgauge_lab.spans import MOST_SPANS, NvtxSpans, RecordedSpans

__all__ = ["LIMIT_S", "MOST_EVENTS", "profiler_of", "require_profiler", "watch"]

#: How long torch's profiler watches. A busy row makes 400,000 events a second, and writing them
#: down takes several times as long.
LIMIT_S = 2.0
MOST_EVENTS = 200_000
#: How long to wait where the profiler must not stop just now.
_AGAIN_S = 0.02
_TOP = 30
#: Nsight Systems sets it for what it started.
_NSYS_SESSION = "NSYS_PROFILING_SESSION_ID"
# unverified: nsys sees forked rows | no nsys was at hand | run what -p profile=nsys prints
_NSYS = (
    "nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
    "--trace-fork-before-exec=true", "--capture-range=cudaProfilerApi",
    "--capture-range-end=none", "--output=narrowgauge",
)  # fmt: skip


def profiler_of(parameters: Mapping[str, Any]) -> str:
    """`none`, `cprofile`, `torch` or `nsys`."""
    return str(parameters.get(PROFILE_PARAMETER.name, PROFILE_PARAMETER.default))


def require_profiler(job: Job, device: str, env: Mapping[str, str]) -> None:
    """Raises NotApplicableError, before any row, where the profiler cannot work here."""
    kind = profiler_of(job.parameters)
    if kind == "torch" and not torch_compat.profiler_available():
        raise NotApplicableError(
            "-p profile=torch: this torch has no profiler",
            why=f"torch {torch.__version__} was built without Kineto",
            next_step="-p profile=cprofile works everywhere",
        )
    if kind != "nsys":
        return
    if not device.startswith("cuda"):
        raise NotApplicableError(
            "-p profile=nsys needs a GPU, and this run is on the CPU",
            next_step="-p profile=torch, or -p profile=cprofile",
        )
    if _NSYS_SESSION not in env:
        raise _not_started_by_nsys(job)


def watch(context: RowContext, run: Callable[[RowContext], None]) -> None:
    """Call `run(context)` under the profiler that the row's parameters ask for, if they do."""
    kind = profiler_of(context.parameters)
    if kind != PROFILE_PARAMETER.default:
        context.fact("profiled", kind)
    kinds: Dict[str, Callable[[RowContext], ContextManager[None]]] = {
        "none": _unwatched,
        "cprofile": _cprofile,
        "torch": _torch,
        "nsys": _nsys,
    }
    with kinds[kind](context):
        run(context)


@contextlib.contextmanager
def _unwatched(context: RowContext) -> Iterator[None]:
    """No profiler; what an experiment keeps by itself (`ctx.record_spans`) is written."""
    with _written_after(context, lambda: _write_own(context)):
        yield


@contextlib.contextmanager
def _cprofile(context: RowContext) -> Iterator[None]:
    profiler = cProfile.Profile()
    with _unwatched(context):
        profiler.enable()
        try:
            yield
        finally:
            profiler.disable()
            profiler.dump_stats(str(context.side_file("profile.pstats")))
            text = io.StringIO()
            stats = pstats.Stats(profiler, stream=text)
            for order in ("tottime", "cumulative"):
                stats.sort_stats(order).print_stats(_TOP)
            context.side_file("profile.txt").write_text(text.getvalue(), encoding="utf-8")


@contextlib.contextmanager
def _torch(context: RowContext) -> Iterator[None]:
    context.spans = spans = RecordedSpans(context.device)
    window = _Window(context, spans)

    def end() -> None:
        window.end()
        _write(context, spans, window)

    window.begin()
    with _written_after(context, end):
        yield


@contextlib.contextmanager
def _written_after(context: RowContext, write: Callable[[], None]) -> Iterator[None]:
    """Write once the block has ended. Where it failed, what the profiler cannot do any more then
    (its GPU may be lost) must not hide why; where the row was told to stop, there is no time."""
    try:
        yield
    except Exception:
        try:
            write()
        except (NarrowgaugeError, RuntimeError, OSError) as problem:
            context.log(f"the failed row has no trace: {problem}")
        raise
    else:
        write()


class _Window:
    """The part of the row that torch's profiler watches: the first LIMIT_S seconds.

    It ends at the first moment after them at which stopping is safe: not while a CUDA graph is
    captured or a stream is held, and not inside a backward pass. Where torch cannot say whether it
    is in one (before 2.0), only the experiment's own calls of `ctx` are such moments.
    """

    def __init__(self, context: RowContext, spans: RecordedSpans) -> None:
        self.profiler = KinetoProfiler(context.device)
        self.cut = ""
        self._context = context
        self._spans = spans
        self._running = False

    def begin(self) -> None:
        self.profiler.start()
        self._running = True
        self._context.at_rest = self._rest
        if torch_compat.backward_is_visible():
            signal.signal(signal.SIGALRM, self._alarm)
            signal.siginterrupt(signal.SIGALRM, False)
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)

    def end(self) -> None:
        """Stop, unless that was done; the alarm is off afterwards."""
        if torch_compat.backward_is_visible():
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if self._running:
            self._running = False
            self._spans.open = False
            self.profiler.stop()
            self._context.at_rest = _nothing

    def _rest(self) -> None:
        """The experiment is between two things of its own, though perhaps in a thread of its own,
        from which the profiler cannot be stopped."""
        late = time.perf_counter() - self.profiler.began > LIMIT_S
        mine = threading.current_thread() is threading.main_thread()
        if late and mine and not self._may_not_synchronise():
            self._stop_early()

    def _alarm(self, _number: int, _frame: Optional[FrameType]) -> None:
        if self._may_not_synchronise() or torch_compat.in_backward():
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            self._stop_early()

    def _stop_early(self) -> None:
        if self._running:
            self.end()
            seconds = self.profiler.ended - self.profiler.began
            self.cut = f"only the first {seconds:.1f} s of the row are in it"

    def _may_not_synchronise(self) -> bool:
        on_cuda = self._context.device.type == "cuda"
        return on_cuda and (harness.is_holding() or torch_compat.capturing())


def _nothing() -> None:
    return


@contextlib.contextmanager
def _nsys(context: RowContext) -> Iterator[None]:
    context.spans = NvtxSpans()
    torch.cuda.synchronize(context.device)
    torch.cuda.profiler.start()
    with torch.autograd.profiler.emit_nvtx(), context.span(f"row in {context.folder.name}"):
        yield
        torch.cuda.synchronize(context.device)
    torch.cuda.profiler.stop()


def _write_own(context: RowContext) -> None:
    if isinstance(context.spans, RecordedSpans):
        _write(context, context.spans, None)


def _write(context: RowContext, spans: RecordedSpans, window: Optional[_Window]) -> None:
    """The row's trace file, and the fact that says how far it is to be trusted."""
    events, clock = spans.finish()
    began, ended, cut = spans.began, time.perf_counter(), []
    if window is not None:
        context.folder.mkdir(parents=True, exist_ok=True)
        events += window.profiler.events(context.folder)
        clock.update(window.profiler.clock)
        began, ended = window.profiler.began, window.profiler.ended
        cut += [window.cut] if window.cut else []
    if spans.left_out:
        cut.append(f"{spans.left_out} spans after the first {MOST_SPANS} are left out")
    kept = _earliest(events)
    if len(kept) < len(events):
        cut.append(f"only the first {len(kept)} of {len(events)} events are in it")
        ended = min(ended, kept[-1].start)
    seconds = ended - began
    trace = Trace(began, seconds, tuple(kept), clock, "; ".join(cut))
    write_trace(context.side_file(TRACE_FILE), trace)
    said = {"events": len(kept), "seconds": seconds, "cut": trace.cut, **clock}
    context.fact("trace", said)


def _earliest(events: List[TraceEvent]) -> List[TraceEvent]:
    return sorted(events, key=lambda event: event.start)[:MOST_EVENTS]


def _not_started_by_nsys(job: Job) -> NotApplicableError:
    line = " ".join(map(shlex.quote, [*_NSYS, *_lab_words(job)]))
    here = shutil.which("nsys")
    get = "Nsight Systems is not on PATH: NVIDIA's package nsight-systems-cli, or its download page"
    return NotApplicableError(
        "-p profile=nsys: Nsight Systems must start the lab itself",
        why="rows are forked from the lab, and nsys cannot take hold of a process that runs",
        next_step=(f"{get}; then\n" if here is None else "") + line,
    )


def _lab_words(job: Job) -> List[str]:
    """The command that runs this job anew, without what is as the profile has it anyway."""
    spec = job.experiment_spec()
    words = ["python3", "-m", "narrowgauge_lab", "run", job.experiment]
    words += ["--profile", job.profile, "--seed", str(job.seed)]
    for name, value in job.parameters.items():
        values = value if isinstance(value, list) else [value]
        usual = spec.profiles[job.profile].values.get(name, (spec.parameter(name).default,))
        if tuple(values) != tuple(usual):
            texts = (str(v).lower() if isinstance(v, bool) else str(v) for v in values)
            words += ["-p", f"{name}={','.join(texts)}"]
    return [*words, "--results", "results"]
