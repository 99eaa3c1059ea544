"""The same kernels by NVIDIA's nvbench, through its Python package `cuda-bench`.

nvbench runs all its benchmarks in one call and once per process, so our own harness takes each
kernel right after nvbench has, from within its benchmark: clocks and heat are then the same.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from workloads import Workload

import narrowgauge_kernels
from narrowgauge_kernels.sources import Library, library_name

#: nvbench gives up on its criterion (0.5 s of kernels, noise below 0.5 %) after this; its own limit
#: of 15 s would make minutes of the shortest kernels.
TIMEOUT_S = 2.0
_KINDS = {"nothing": 0, "copy": 1, "add": 2, "multiply-add": 3}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What nvbench found of one kernel: seconds of every cold sample, the mean of its batches, and
    the seconds that all of it took."""

    cold: tuple[float, ...]
    batch: float
    wall: float


def importable(wheels: str | None) -> None:
    """Put the wheels of a folder on the path. Raises SystemExit where there is no cuda-bench."""
    if wheels:
        folder = tempfile.mkdtemp(prefix="narrowgauge-nvbench-")
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        sys.path.insert(0, folder)
        # `cuda` is shared by several packages, and may have been imported without these.
        loaded = sys.modules.get("cuda")
        if loaded is not None:
            loaded.__path__.insert(0, str(Path(folder) / "cuda"))
    try:
        import cuda.bench  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"nvbench cannot be imported: {error}\n"
            "pip install cuda-bench[cu13] (or cu12), or give --wheels DIR with its wheels"
        ) from error


def run(
    workloads: list[Workload], buffer: torch.Tensor, between: Callable[[Workload], None]
) -> list[Measured]:
    """Each by nvbench, cold and in batches; `between` is called after each, in the same order."""
    import cuda.bench as nvbench
    from cuda.bench.results import BenchmarkResult

    launch = _launcher()
    walls = []

    def calibration(state: Any) -> None:
        workload = workloads[state.get_int64("kernel")]
        part = workload.part(buffer)
        stream = state.get_stream().addressof()
        arguments = (_KINDS[workload.kind], part.data_ptr(), workload.bytes, workload.repeats)

        def call(_: Any) -> None:
            error = launch(*arguments, stream)
            if error:
                raise RuntimeError(f"a calibration kernel was not launched: cudaError {error}")

        torch.cuda.synchronize()
        began = time.perf_counter()
        state.exec(call)
        walls.append(time.perf_counter() - began)
        between(workload)

    made = nvbench.register(calibration)
    made.add_int64_axis("kernel", list(range(len(workloads))))
    with tempfile.TemporaryDirectory(prefix="narrowgauge-nvbench-") as folder:
        path = str(Path(folder) / "result.json")
        words = ["bench.py", "--quiet", "--devices", "0", "--timeout", str(TIMEOUT_S)]
        nvbench.run_all_benchmarks([*words, "--jsonbin", path])
        (found,) = BenchmarkResult.from_json(path).values()
    if len(found.states) != len(walls) or len(walls) != len(workloads):
        raise RuntimeError(f"nvbench has {len(found.states)} results of {len(workloads)} kernels")
    return [_measured(state, wall) for state, wall in zip(found.states, walls, strict=True)]


def _launcher() -> Callable[..., int]:
    """The kernels' own C entry: nvbench is given as little Python per launch as can be."""
    directory = narrowgauge_kernels.load()
    entry = ctypes.CDLL(str(directory / library_name(Library.CUDA))).narrowgauge_launch_calibration
    word, size, address = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
    entry.argtypes, entry.restype = (word, address, size, size, address), word
    return entry


def _measured(state: Any, wall: float) -> Measured:
    """Raises RuntimeError where nvbench skipped a kernel."""
    if state.is_skipped or not state.samples:
        raise RuntimeError(f"nvbench skipped a kernel: {state.skip_reason}")
    batch = state.summaries["nv/batch/time/gpu/mean"].value
    return Measured(tuple(map(float, state.samples)), float(batch), wall)
