"""A run whose every row is skipped, from the command line to its record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_row import EXPERIMENTS

from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import RECORD_FILE, load_record

LACKING = "this host has no tensorrt: TensorRT runs on NVIDIA GPUs, not on cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
@pytest.mark.parametrize("name", ["engines", "throughput"])
def test_a_run_of_an_engine_that_is_not_here_says_so_in_one_sentence(
    tmp_path: Path, name: str
) -> None:
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "narrowgauge_lab", "run", name, "--profile", "smoke",
         "-p", "engine=tensorrt", "--out", str(out), "--experiments", str(EXPERIMENTS)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == ExitCode.NOT_APPLICABLE, done.stderr
    record = load_record(out / RECORD_FILE)
    said = f"{record.run_id}: nothing could be measured here: {LACKING}"
    assert (done.stdout + done.stderr).splitlines().count(said) == 1
    assert {row.status for row in record.rows} == {Status.SKIPPED}
    assert record.exit_code == ExitCode.NOT_APPLICABLE
    assert record.error is not None
    assert (record.error.what, record.error.why) == ("nothing could be measured here", LACKING)
