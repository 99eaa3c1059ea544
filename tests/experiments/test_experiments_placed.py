"""mnist and resnet by a placement plan and in several processes, as a command line asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.events import EVENTS_FILE, read_events
from narrowgauge_contract.outcome import Fold, Status

NAMES = ("mnist", "resnet")
_QUICK = ("data=synthetic", "train_limit=48", "batch_size=32")


@pytest.mark.parametrize("name", NAMES)
def test_a_row_by_a_plan_says_what_it_became(name: str, tmp_path: Path) -> None:
    row = Rows(name, _QUICK).run(tmp_path, "plan=hetero-fp32")

    assert row.validity.valid, row.validity.reasons
    facts = row.facts
    assert facts["world_size"] == 1
    assert facts["plan"]["plan"]["name"] == "hetero-fp32"
    weighted = {"mnist": 4, "resnet": 20}[name]
    assert facts["placed"]["placed"] == len(facts["plan_table"]) - 1 == weighted
    assert facts["placed"]["accelerator"] == "cpu (stand-in)"
    assert facts["bytes_per_step"]["images"] == 32
    assert facts["bytes_per_step"]["to_device"] > 4 * facts["parameter_count"]


def test_a_row_by_the_plan_cpu_is_the_row_without_one(tmp_path: Path) -> None:
    """All layers stay torch's own, so even the last bits are the same."""
    rows = [
        Rows("mnist", _QUICK).run(tmp_path / plan, f"plan={plan}", "epochs=2")
        for plan in ("none", "cpu")
    ]

    losses = [row.metric("train_loss").values for row in rows]
    assert losses[0] == losses[1]
    assert rows[1].facts["placed"]["native"] == 4
    assert rows[1].facts["bytes_per_step"]["to_device"] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("word", ["precision=bf16", "nproc=2"])
def test_a_plan_goes_with_no_other_word_for_the_same(name: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="and -p plan=hetero-fp32 do not go together"):
        Rows(name, _QUICK).run(tmp_path, "plan=hetero-fp32", word)


@pytest.mark.parametrize("name", NAMES)
def test_plan_and_processes_make_rows_of_their_own(name: str) -> None:
    job = Rows(name).job("plan=none,hetero-fp32", "nproc=1,2")

    asked = {(row.parameters["plan"], row.parameters["nproc"]) for row in job.rows}
    assert len(job.rows) == 4
    assert asked == {("none", 1), ("none", 2), ("hetero-fp32", 1), ("hetero-fp32", 2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_trains_in_two_processes(name: str, tmp_path: Path) -> None:
    words = [word for each in (*_QUICK, "nproc=1,2") for word in ("-p", each)]
    done = subprocess.run(
        [
            sys.executable, "-m", "narrowgauge_lab", "run", name, "--out", str(tmp_path / "out"),
            "--experiments", str(EXPERIMENTS), "--profile", "smoke", "--device", "cpu", *words,
        ],
        env={**os.environ, "PYTHONPATH": str(EXPERIMENTS.parent / "src")},
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    rows = Fold().add_all(read_events(tmp_path / "out" / EVENTS_FILE)).rows()
    assert [row.facts["world_size"] for row in rows] == [1, 2]
    assert all(row.status is Status.COMPLETE and row.validity.valid for row in rows)
    assert rows[1].facts["threads"] == max(1, torch.get_num_threads() // 2)
