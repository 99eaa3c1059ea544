"""What only several GPUs can show: NCCL, captured steps beside it, and their record."""

from __future__ import annotations

from pathlib import Path
from typing import Dict

import pytest
import torch
from toys import fold, start_lab

from narrowgauge_contract.outcome import Row, Status

pytestmark = pytest.mark.gpu


def _rows(out: Path, *words: str) -> Dict[int, Row]:
    """Rows of `mnist` by a lab of its own, by their number of processes: the process of the tests
    has used CUDA, and cannot fork one that does."""
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has fewer than two GPUs")
    given = [word for each in ("data=synthetic", "train_limit=0", *words) for word in ("-p", each)]
    process = start_lab(
        "run", "mnist", "--out", str(out), "--device", "cuda", "--profile", "smoke", *given
    )
    said, complained = process.communicate(timeout=500)
    assert process.returncode == 0, said + complained
    return {row.parameters["nproc"]: row for row in fold(out).rows()}


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_two_gpus_do_what_one_does_with_their_batches(tmp_path: Path, graphs: str) -> None:
    words = ("epochs=3", f"graphs={graphs}", "lr=0.1")
    one = _rows(tmp_path / "one", *words, "nproc=1", "batch_size=64")[1]
    two = _rows(tmp_path / "two", *words, "nproc=2", "batch_size=32")[2]

    assert two.status is Status.COMPLETE
    assert two.validity.valid, two.validity.reasons
    assert (two.facts["world_size"], two.facts["backend"]) == (2, "nccl")
    assert len(two.facts["rank_devices"]) == 2
    assert two.facts["cudnn_benchmark"] is True, "of the ranks, not of the process that waits"
    ran = two.facts["graphs_ran"]
    assert ran.startswith("cuda-graph of forward and backward" if graphs == "auto" else "off")
    # Not bitwise: algorithms differ with the batch, and some add atomically.
    expected = one.metric("train_loss").values
    assert two.metric("train_loss").values == pytest.approx(expected, rel=2e-2)


def test_the_loss_scale_of_two_gpus_is_one(tmp_path: Path) -> None:
    row = _rows(tmp_path, "nproc=2", "precision=fp16", "epochs=3")[2]

    assert row.validity.valid, row.validity.reasons
    assert row.facts["precision_ran"] == "fp16"
    losses = row.metric("train_loss").values
    assert losses[-1] < 0.7 * losses[0]


def test_more_processes_than_gpus_are_refused(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    words = ("-p", "data=synthetic", "-p", f"nproc={count + 1}")
    process = start_lab("run", "mnist", "--out", str(tmp_path / "out"), "--device", "cuda", *words)
    said, complained = process.communicate(timeout=300)

    assert process.returncode == 3, said + complained
    assert "needs a GPU for each process" in complained
