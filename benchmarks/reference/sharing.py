"""Several lanes on one GPU: which jobs share it, and NVIDIA's MPS, by which they run at once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs import Job

__all__ = ["TURNS", "is_shared", "mps", "sharing", "turns_of"]

#: As `narrowgauge_lab.turns` reads it: what is timed is timed while the others stand aside.
TURNS = "NARROWGAUGE_TURNS"
_CONTROL = "nvidia-cuda-mps-control"
#: For the daemon to begin, and to end with what is still connected to it.
_PATIENCE_S = 20.0


def is_shared(gpus: Sequence[str]) -> bool:
    """Whether two lanes are of one GPU."""
    return len(set(gpus)) < len(gpus)


def sharing(jobs: Sequence[Job]) -> list[Job]:
    """The jobs as they may run where a GPU has several lanes: what does not share is alone."""
    return [dataclasses.replace(job, alone=job.alone or not job.shares) for job in jobs]


def turns_of(out: Path, gpu: str) -> dict[str, str]:
    """What a run that shares `gpu` is given."""
    return {TURNS: str(out / f".turns-{gpu}")}


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """What clients of a daemon of ours are given, which ends with the block. Nothing, and said,
    where there is no such daemon: the driver then gives each process slices of time."""
    control = shutil.which(_CONTROL)
    if control is None:
        print(f"{_CONTROL} is not here: runs that share a GPU get slices of time", flush=True)
        yield {}
        return
    # A socket's path has to be short.
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        given = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        env = {**os.environ, **given}
        # Not piped: the daemon keeps what it is given, and nobody would see an end of it.
        began = subprocess.run([control, "-d"], env=env, timeout=_PATIENCE_S, check=False)
        if began.returncode != 0:
            print(f"{control} -d ended with {began.returncode}: no MPS", flush=True)
            yield {}
            return
        try:
            yield given
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [control], input=b"quit -t 10\n", env=env, timeout=_PATIENCE_S, check=False
                )
