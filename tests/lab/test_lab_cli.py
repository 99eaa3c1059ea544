"""The lab's command line, as a container and as a user on a GPU host call it."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import List, Optional

import pytest
from toys import INSIDE, METRIC, SOURCE, environment, fold, start_lab, toy_job, wait_for, write_toy

from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.events import EVENTS_FILE, EventKind, read_events
from narrowgauge_contract.outcome import Status, load_outcome
from narrowgauge_contract.record import compose, load_record
from narrowgauge_lab import cli, facts


@pytest.mark.usefixtures("quick_facts")
def test_without_a_job_it_writes_job_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiments = write_toy(tmp_path / "experiments", METRIC)
    out = tmp_path / "deep" / "out"
    words = ["run", "toy", "--experiments", str(experiments), "--out", str(out)]

    assert cli.main([*words, "-p", "x=4,5", "--profile", "smoke"]) == 0

    record = load_record(out / "record.json")
    assert record.host is None
    assert (record.target, record.profile, record.seed) == ("native", "smoke", 0)
    assert [row.parameters["x"] for row in record.rows] == [4, 5]
    assert record.hashes.experiment == facts.experiment_hash(experiments / "toy")
    assert record.hashes.source == facts.source_hash()
    assert "2 of 2 rows valid" in capsys.readouterr().out
    assert cli.main(words) == 2, "a run must never be appended to by accident"
    assert "already holds a run" in capsys.readouterr().err


def test_a_row_that_fails_says_what_why_and_what_next_and_says_it_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
from narrowgauge_contract.errors import BadValueError
raise BadValueError("a width of 3", why="two lines\\nof reasons", next_step="-p width=4")
"""
    experiments = write_toy(tmp_path / "experiments", body)
    words = ["run", "toy", "--experiments", str(experiments), "--out", str(tmp_path / "out")]

    assert cli.main([*words, "--profile", "smoke"]) == ExitCode.USAGE

    out, err = capfd.readouterr()
    said = "row 0: BadValueError: a width of 3\n  why:  two lines\n        of reasons\n"
    assert said + "  next: -p width=4\n" in err
    assert "a width of 3" not in out
    assert "0 of 1 rows valid" in out


@pytest.mark.usefixtures("quick_facts")
def test_with_a_job_it_leaves_the_record_to_who_wrote_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiments = write_toy(tmp_path / "experiments", METRIC)
    write_json_atomic(tmp_path / "job.json", toy_job(experiments))
    out = tmp_path / "out"
    words = ["run", "--job", str(tmp_path / "job.json"), "--experiments", str(experiments)]

    assert cli.main([*words, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [".lock", "events.jsonl", "outcome.json"]
    assert load_outcome(out / "outcome.json").run_id == toy_job(experiments).run_id
    for extra in (["toy"], ["-p", "x=1"], ["--profile", "smoke"], ["--seed", "1"]):
        assert cli.main([*words, *extra, "--out", str(tmp_path / "other")]) == 2
        assert "do not go together" in capsys.readouterr().err


def test_a_gpu_that_the_run_may_not_use_is_not_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are aggregated by their accelerator; a run on the CPU must not pass for a GPU's."""
    gpu = dataclasses.replace(INSIDE, accelerator="a GPU", capability="9.0")
    monkeypatch.setattr(facts, "gather", lambda env: gpu)
    experiments = write_toy(tmp_path / "experiments", METRIC)
    out = tmp_path / "out"
    words = ["run", "toy", "--experiments", str(experiments), "--out", str(out)]
    words += ["--profile", "smoke"]

    assert cli.main([*words, "--device", "cpu"]) == 0
    record = load_record(out / "record.json")
    assert record.inside is not None
    assert (record.inside.accelerator, record.inside.capability) == (None, None)
    assert record.rows[0].facts["device"] == "cpu"
    assert cli.main([*words, "--resume"]) == 2, "rows of two devices are no one record"


@pytest.mark.usefixtures("quick_facts")
def test_shards_together_are_the_whole(tmp_path: Path) -> None:
    experiments = write_toy(tmp_path / "experiments", METRIC)
    words = ["run", "toy", "--experiments", str(experiments), "--profile", "short"]
    words += ["-p", "x=0,1,2"]
    rows = []
    for shard in ("1/4", "2/4", "3/4", "4/4", "1/1"):
        out = tmp_path / shard.replace("/", "-")
        assert cli.main([*words, "--out", str(out), "--shard", shard]) == 0
        rows.append(load_outcome(out / "outcome.json").rows)

    *parts, whole = rows
    joined = sorted((row for part in parts for row in part), key=lambda row: row.index)
    assert all(parts)
    assert [(r.index, r.repeat, r.seed, r.parameters) for r in joined] == [
        (r.index, r.repeat, r.seed, r.parameters) for r in whole
    ]


@pytest.mark.usefixtures("quick_facts")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run", "toyy"], 2, "did you mean 'toy'"),
        (["run", "toy", "-p", "xx=1"], 2, "did you mean 'x'"),
        (["run", "toy", "-p", "x=one"], 2, "x: int >= 0, default 1, axis row"),
        (["run", "toy", "-p", "x=-1"], 2, "below 0"),
        (["run", "toy", "-p", "x"], 2, "not name=value"),
        (["run", "toy", "-p", "gear=low,high"], 2, 'axis = "run" makes one run per value'),
        (["run", "toy", "--shard", "3"], 2, "not I/N"),
        (["run", "toy", "--shard", "3/2"], 2, "1 <= i <= n"),
        (["run", "toy", "--shard", "3/3"], 2, "has no row"),
        (["run", "toy", "--device", "cuda"], 3, "torch sees no GPU"),
        (["run", "new"], 3, "needs torch >=99.0"),
        (["run", "odd"], 2, "is not understood"),
        (["run", "fast"], 3, "needs a GPU"),
        (["run", "hollow"], 2, "has no run.py"),
        (["run", "reader"], 20, "narrowgauge data fetch mnist"),
        (["run"], 2, "name an experiment"),
        (["run", "--job", "/nonexistent/job.json"], 2, "there is no job file"),
    ],
)
def test_bad_input_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: List[str], code: int, said: str
) -> None:
    experiments = write_toy(tmp_path / "experiments", METRIC)
    write_toy(experiments, METRIC, "new", '[requires]\ntorch = ">=99.0"')
    write_toy(experiments, METRIC, "odd", '[requires]\ntorch = "~=2"')
    write_toy(experiments, METRIC, "fast", "[requires]\naccelerator = true")
    write_toy(experiments, METRIC, "reader", '[data]\nsets = ["mnist"]')
    write_toy(experiments, METRIC, "hollow")
    (experiments / "hollow" / "run.py").unlink()
    words = [*words, "--experiments", str(experiments), "--out", str(tmp_path / "out")]

    assert cli.main([*words, "--profile", "smoke"] if "--job" not in words else words) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("error: ")
    if code != 2:
        # The record says why, too: the run had begun.
        record = load_record(tmp_path / "out" / "record.json")
        assert (record.status, record.exit_code, record.rows) == (Status.FAILED, code, ())
        assert record.error is not None
        assert record.error.what in err


@pytest.mark.usefixtures("quick_facts")
def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiments = write_toy(tmp_path / "experiments", METRIC)
    (tmp_path / "file").write_text("in the way")
    words = ["run", "toy", "--experiments", str(experiments), "--out"]

    assert cli.main([*words, str(tmp_path / "file" / "out")]) == 23
    assert cli.main([*words, "/proc/narrowgauge"]) == 23
    assert "give an --out folder" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_facts")
def test_resume_refuses_another_configuration_and_keeps_the_old_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    body = METRIC + f'if not os.path.exists("{gate}"): raise ValueError("closed")'
    experiments = write_toy(tmp_path / "experiments", body)
    out = tmp_path / "out"
    words = ["run", "toy", "--experiments", str(experiments), "--out", str(out)]
    words += ["--profile", "smoke"]
    assert cli.main(words) == 30
    first = load_record(out / "record.json")

    assert cli.main([*words, "--resume", "-p", "x=9"]) == 2
    assert "its parameters is" in capsys.readouterr().err
    gate.touch()
    assert cli.main([*words, "--resume"]) == 0

    assert load_record(out / "record.1.json") == first
    second = load_record(out / "record.json")
    assert second.run_id == first.run_id
    assert second.rows[0].validity.valid


def test_a_live_run_is_not_joined_and_an_interrupt_still_gives_an_outcome(tmp_path: Path) -> None:
    body = METRIC + 'ctx.side_file("half.txt").write_text("x")\nctx.log("ready")\ntime.sleep(600)'
    experiments = write_toy(tmp_path / "experiments", body)
    out = tmp_path / "out"
    words = ["run", "toy", "--experiments", str(experiments), "--out", str(out)]
    process = start_lab(*words)
    wait_for(out, EventKind.LOG)

    assert cli.main(words) == 25
    assert cli.main([*words, "--resume", "--seed", "0"]) == 25
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)

    assert process.returncode == 130, stderr
    record = load_record(out / "record.json")
    assert (record.status, record.exit_code) == (Status.INTERRUPTED, 130)
    assert [row.status for row in record.rows] == [Status.INTERRUPTED]
    assert record.rows[0].metrics[0].values == (2.0,)
    assert [file.path for file in record.rows[0].side_files] == ["row-0/half.txt"]
    assert not record.rows[0].validity.valid


def test_a_killed_parent_takes_its_row_along_and_the_run_can_go_on(tmp_path: Path) -> None:
    body = (
        METRIC
        + f"""
ctx.fact("pid", os.getpid())
ctx.log("ready")
if ctx.repeat and not os.path.exists("{tmp_path}/gate"): time.sleep(600)
"""
    )
    experiments = write_toy(tmp_path / "experiments", body)
    out = tmp_path / "out"
    words = ["run", "toy", "--experiments", str(experiments), "--out", str(out)]
    process = start_lab(*words)
    wait_for(out, EventKind.LOG, count=2)
    process.kill()
    process.communicate(timeout=120)

    rows = fold(out).rows()
    assert [row.status for row in rows] == [Status.COMPLETE, Status.UNFINISHED]
    assert _gone(rows[1].facts["pid"]), "the row outlived its parent"
    record = compose(toy_job(experiments), None, read_events(out / EVENTS_FILE), None)
    assert record.rows[1].metrics[0].values == (2.0,)
    assert record.inside is not None
    assert record.inside.torch

    (tmp_path / "gate").touch()
    process = start_lab(*words, "--resume")
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "2 of 2 rows valid" in stdout
    again = load_record(out / "record.json").rows
    assert again[0] == rows[0], "a complete row is not measured again"
    assert again[1].status is Status.COMPLETE


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if _state(pid) in (None, "Z"):  # a zombie nobody has waited for is dead all the same
            return True
        time.sleep(0.05)
    return False


def _state(pid: int) -> Optional[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_an_interrupt_while_torch_is_imported_is_kept(tmp_path: Path) -> None:
    """A container's stop may come before the first row; the run says that it was interrupted."""
    # The row is there for a stop that comes late, on a machine that holds this test up.
    experiments = write_toy(tmp_path / "experiments", METRIC + "time.sleep(600)")
    out = tmp_path / "out"
    process = start_lab("run", "toy", "--experiments", str(experiments), "--out", str(out))
    deadline = time.monotonic() + 120
    while not (out / "job.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    _, stderr = process.communicate(timeout=300)

    assert process.returncode == 130, stderr
    assert load_outcome(out / "outcome.json").status is Status.INTERRUPTED


def test_facts_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    process = start_lab("facts")
    stdout, stderr = process.communicate(timeout=300)

    assert process.returncode == 0, stderr
    seen = json.loads(stdout)
    assert seen["torch"]
    assert seen["cpu_count"] >= 1
    assert seen["threads"] >= 1
    assert seen["environment"]["OMP_WAIT_POLICY"]


def test_asking_for_a_compiler_leaves_forked_processes_their_gpus() -> None:
    """As the ranks of a row are; what inductor does as it is loaded would take them away."""
    code = """
import os, sys, torch
from narrowgauge_lab import torch_compat
torch_compat.compiler_available()
print("inductor:", "torch._inductor.compile_fx" in sys.modules, flush=True)
if os.fork() == 0:
    print("bad fork:", torch.cuda._is_in_bad_fork(), flush=True)
    os._exit(0)
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "inductor: False\nbad fork: False\n"


def test_help_needs_no_torch_and_no_import_touches_a_device() -> None:
    names = [f"narrowgauge_lab.{p.stem}" for p in sorted((SOURCE / "narrowgauge_lab").glob("*.py"))
             if p.stem not in ("__init__", "__main__")]  # fmt: skip
    code = f"""
import sys
import narrowgauge_lab, narrowgauge_lab.cli as cli
try: cli.main(["run", "--help"])
except SystemExit: pass
early = "torch" in sys.modules
import {", ".join(names)}, torch
print("torch early:", early, "device touched:", torch.cuda.is_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "torch early: False device touched: False"


def test_a_python_without_torch_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    experiments = write_toy(tmp_path / "experiments", METRIC)
    monkeypatch.setitem(sys.modules, "torch", None)
    words = ["run", "toy", "--experiments", str(experiments), "--out", str(tmp_path / "out")]

    assert cli.main(words) == 14
    assert "pip install torch numpy" in capsys.readouterr().err
