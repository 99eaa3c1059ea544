"""The trace of a row on a GPU: kernels, copies, launches and spans really on one clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import List

import pytest
import torch
from toys import environment, write_toy

from narrowgauge_contract.record import load_record
from narrowgauge_contract.traces import TRACE_FILE, Trace, TraceEvent, read_trace
from narrowgauge_lab import torch_compat

pytestmark = pytest.mark.gpu

#: Products that take about a millisecond each on a server's GPU, between two copies; and one span
#: on a stream of its own.
WORK = """
import torch
torch.backends.cuda.matmul.allow_tf32 = False
host = torch.ones(1 << 22).pin_memory()
a = torch.ones(4096, 4096, device=ctx.device)
side = torch.cuda.Stream()
a @ a
torch.cuda.synchronize()
with ctx.span("upload"):
    given = host.to(ctx.device)
with ctx.span("products"):
    for _ in range(20):
        b = a @ a
with ctx.span("queued"):
    pass
with torch.cuda.stream(side), ctx.span("aside"):
    c = a + 1
torch.cuda.synchronize()
with ctx.span("download"):
    back = given.cpu()
time.sleep(0.2)
"""
GRAPH = """
import torch
a = torch.ones(1024, 1024, device=ctx.device)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    b = a @ a
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph), ctx.span("capture"):
    b = a @ a
until = time.monotonic() + 3.0
while time.monotonic() < until:
    with ctx.span("replay"):
        graph.replay()
    torch.cuda.synchronize()
    time.sleep(0.01)
ctx.fact("sum", float(b[0, 0]))
"""


def _run(tmp_path: Path, body: str, *words: str) -> Path:
    """The toy as users start it: this process may have used the GPU, so it must not fork rows."""
    experiments, out = write_toy(tmp_path / "experiments", body), tmp_path / "out"
    command = [sys.executable, "-m", "narrowgauge_lab", "run", "toy", "--profile", "smoke"]
    command += ["--experiments", str(experiments), "--out", str(out), "--device", "cuda", *words]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return out


def _trace(out: Path) -> Trace:
    return read_trace(out / "row-0" / TRACE_FILE)


def _of(trace: Trace, kind: str, name: str = "") -> List[TraceEvent]:
    return [each for each in trace.events if each.kind == kind and name in each.name]


def _doubt(trace: Trace) -> float:
    """How far the two mappings to the host's clock may be apart, in seconds."""
    clock = trace.clock
    drift = abs(clock["gpu_drift_ppm"]) * trace.seconds
    known = clock["gpu_uncertainty_us"] + clock.get("profiler_uncertainty_us", 0.0) + drift
    return (known + 30.0) / 1e6


def test_kernels_lie_inside_the_spans_that_launched_them(tmp_path: Path) -> None:
    """The spans' GPU side comes from CUDA events, the kernels from CUPTI: two clocks, made one."""
    trace = _trace(_run(tmp_path, WORK, "-p", "profile=torch"))

    (span,) = _of(trace, "gpu-span", "products")
    kernels = [k for k in _of(trace, "kernel") if span.start < (k.start + k.end) / 2 < span.end]
    doubt = _doubt(trace)
    assert len(kernels) >= 20
    assert doubt < 1e-3
    assert min(k.start for k in kernels) >= span.start - doubt
    assert max(k.end for k in kernels) <= span.end + doubt
    assert sum(k.seconds for k in kernels) == pytest.approx(span.seconds, rel=0.05, abs=doubt)


def test_the_host_runs_ahead_of_the_gpu_and_the_trace_shows_it(tmp_path: Path) -> None:
    trace = _trace(_run(tmp_path, WORK, "-p", "profile=torch"))

    host, gpu = (_of(trace, kind, "queued")[0] for kind in ("span", "gpu-span"))
    (products,) = _of(trace, "gpu-span", "products")
    assert gpu.start >= products.end - _doubt(trace)
    assert gpu.start - host.start > 0.5 * products.seconds
    assert {e.lane for e in _of(trace, "gpu-span", "aside")} == {"spans, GPU stream 1"}


def test_copies_and_launches_have_lanes_of_their_own(tmp_path: Path) -> None:
    trace = _trace(_run(tmp_path, WORK, "-p", "profile=torch"))

    copies = {each.lane: each for each in _of(trace, "copy") if each.args.get("bytes") == 1 << 24}
    assert set(copies) == {"copies H2D", "copies D2H"}
    assert copies["copies H2D"].end < copies["copies D2H"].start
    launches = [each for each in trace.events if each.lane.startswith("host launch")]
    assert sum("Launch" in each.name for each in launches) >= 20
    streams = {each.lane for each in _of(trace, "kernel")}
    assert len(streams) == 2
    assert all(lane.startswith("GPU stream ") for lane in streams)


def test_spans_alone_need_no_profiler(tmp_path: Path) -> None:
    out = _run(tmp_path, f"ctx.record_spans()\n{WORK}")
    trace, record = _trace(out), load_record(out / "record.json")

    assert {each.kind for each in trace.events} == {"span", "gpu-span"}
    assert "profiled" not in record.rows[0].facts
    assert abs(trace.clock["gpu_drift_ppm"]) < 500.0
    assert trace.clock["gpu_uncertainty_us"] < 200.0
    for name in ("upload", "products", "download"):
        host, gpu = (_of(trace, kind, name)[0] for kind in ("span", "gpu-span"))
        assert gpu.start >= host.start - _doubt(trace)


@pytest.mark.skipif(not torch_compat.graphs_available(torch.device("cuda")), reason="no graphs")
def test_graphs_are_captured_and_replayed_under_the_profiler_and_after_it(tmp_path: Path) -> None:
    """The window ends while the graph is still replayed; that used to crash in CUPTI."""
    out = _run(tmp_path, GRAPH, "-p", "profile=torch")
    trace, record = _trace(out), load_record(out / "record.json")

    assert record.rows[0].facts["sum"] == 1024.0
    assert trace.cut.startswith("only the first 2.")
    assert _of(trace, "span", "capture")
    assert not _of(trace, "gpu-span", "capture")
    assert len(_of(trace, "gpu-span", "replay")) > 10
    assert _of(trace, "kernel")
