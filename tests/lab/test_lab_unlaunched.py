"""Runs that nobody's launcher started: where they lie, what they say of the host, and their end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import List

import pytest
from toys import METRIC, fold, start_lab, wait_for, write_toy

from narrowgauge_contract.events import EVENTS_FILE, EventKind
from narrowgauge_contract.outcome import OUTCOME_FILE, Status
from narrowgauge_contract.record import RECORD_FILE, Record, load_record
from narrowgauge_lab import cli

MACHINE = {
    "kernel": "5.10.104-tegra", "machine": "aarch64", "system": "Ubuntu 20.04.5 LTS",
    "cpu": "ARMv8", "cpu_count": 8, "memory_bytes": 1 << 35,
    "l4t": "# R35 (release), REVISION: 2.1",
    "power_mode": "NV Power Mode: MAXN 0", "clocks": {"governor": "schedutil"},
}  # fmt: skip
IMAGE = {"name": "narrowgauge/jetson:local", "digest": "sha256:1", "base": "b", "base_digest": None,
         "content_tag": "c"}  # fmt: skip


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """What a script wrote of its host."""
    path = tmp_path / "host.json"
    git = {"commit": "abc", "dirty": True}
    note = {"format": 1, "executor": "script", "machine": MACHINE, "image": IMAGE, "git": git}
    path.write_text(json.dumps(note))
    return path


@pytest.fixture
def toy(tmp_path: Path) -> List[str]:
    """The words that run a toy."""
    experiments = write_toy(tmp_path / "experiments", METRIC)
    return ["run", "toy", "--experiments", str(experiments), "--profile", "smoke"]


def only_run(results: Path) -> Path:
    (folder,) = results.glob("*/*")
    return folder


@pytest.mark.usefixtures("quick_facts")
def test_each_run_gets_a_folder_of_its_own(
    tmp_path: Path, toy: List[str], capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"

    assert cli.main([*toy, "--results", str(results)]) == 0
    folder = only_run(results)
    assert f"in {folder}" in capsys.readouterr().out
    assert cli.main([*toy, "--results", str(results)]) == 0

    record = load_record(folder / RECORD_FILE)
    assert folder == results / "toy" / record.run_id
    assert record.host is None
    assert record.status is Status.COMPLETE
    assert (folder / EVENTS_FILE).is_file()
    assert len(list(results.glob("toy/*"))) == 2


@pytest.mark.usefixtures("quick_facts")
@pytest.mark.parametrize(
    ("word", "variable", "target"),
    [
        ((), "desktop", "desktop"),
        (("--target", "cpu"), "desktop", "cpu"),
        ((), None, "native"),
        ((), "", "native"),
    ],
)
def test_the_image_says_which_target_it_is(
    tmp_path: Path, toy: List[str], monkeypatch: pytest.MonkeyPatch, word: List[str],
    variable: str, target: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("NARROWGAUGE_TARGET", raising=False)
    if variable is not None:
        monkeypatch.setenv("NARROWGAUGE_TARGET", variable)

    assert cli.main([*toy, *word, "--results", str(tmp_path / "r")]) == 0
    assert load_record(only_run(tmp_path / "r") / RECORD_FILE).target == target


@pytest.mark.usefixtures("quick_facts")
def test_what_a_script_knows_of_the_host_is_in_the_record(
    tmp_path: Path, toy: List[str], host: Path
) -> None:
    words = [*toy, "--results", str(tmp_path / "r"), "--host-facts", str(host)]

    assert cli.main(words) == 0
    _has_host(load_record(only_run(tmp_path / "r") / RECORD_FILE), 0, Status.COMPLETE)


@pytest.mark.usefixtures("quick_facts")
def test_the_hosts_facts_say_how_a_failed_run_ended(
    tmp_path: Path, toy: List[str], host: Path
) -> None:
    write_toy(tmp_path / "experiments", 'raise ValueError("no")')
    words = [*toy, "--results", str(tmp_path / "r"), "--host-facts", str(host)]

    assert cli.main(words) == 30
    _has_host(load_record(only_run(tmp_path / "r") / RECORD_FILE), 30, Status.FAILED)


def _has_host(record: Record, exit_code: int, status: Status) -> None:
    assert record.host is not None
    assert record.host.executor == "script"
    assert record.host.machine.power_mode == "NV Power Mode: MAXN 0"
    assert record.host.git is not None
    assert record.host.git.dirty
    assert (record.host.exit_code, record.host.status) == (exit_code, status)
    assert record.host.exceptions == ()
    assert record.hashes.image == "sha256:1"


@pytest.mark.usefixtures("quick_facts")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--results", "r", "--resume"], 2, "--resume and --results do not go together"),
        (["--results", "r", "--host-facts", "none.json"], 2, "cannot read the host's facts"),
        (["--results", "r", "--host-facts", "bad.json"], 24, "truncated or not JSON"),
        (["--results", "/proc/narrowgauge"], 23, "cannot write to /proc/narrowgauge"),
    ],
)
def test_bad_words_are_explained_before_anything_is_made(
    tmp_path: Path, toy: List[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], words: List[str], code: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")

    assert cli.main([*toy, *words]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("words", [[], ["--out", "a", "--results", "b"]])
def test_one_place_to_write_to_is_needed(
    toy: List[str], words: List[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*toy, *words])

    assert caught.value.code == 2
    assert "--results" in capsys.readouterr().err


def test_a_decided_job_is_recorded_by_who_wrote_it(
    tmp_path: Path, host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["run", "--job", str(tmp_path / "job.json")]

    assert cli.main([*job, "--results", str(tmp_path)]) == 2
    assert cli.main([*job, "--out", str(tmp_path / "o"), "--host-facts", str(host)]) == 2
    assert capsys.readouterr().err.count("whoever wrote it records it") == 2


@pytest.mark.parametrize("told", [True, False])
def test_a_killed_run_is_recorded_afterwards(
    tmp_path: Path, toy: List[str], host: Path, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    write_toy(tmp_path / "experiments", METRIC + 'ctx.log("ready")\ntime.sleep(600)')
    out = tmp_path / "out"
    record = ["record", "--out", str(out)] + (["--host-facts", str(host)] if told else [])
    process = start_lab(*toy, "--out", str(out))
    wait_for(out, EventKind.LOG)

    assert cli.main(record) == 25, "a run that goes on is not over"
    assert not (out / RECORD_FILE).exists()
    process.kill()
    process.communicate(timeout=120)
    measured = fold(out).rows()
    while cli.main(record) == 25:  # the row's process dies a moment after its parent
        pass

    found = load_record(out / RECORD_FILE)
    assert (found.status, found.exit_code) == (Status.UNFINISHED, 32)
    assert found.rows == measured
    assert found.rows[0].metrics[0].values == (2.0,)
    assert found.events_damaged == 0
    if told:
        _has_host(found, 32, Status.UNFINISHED)
    else:
        assert found.host is None
    before = (out / RECORD_FILE).read_bytes()
    assert cli.main(record) == 2
    assert "is recorded already" in capsys.readouterr().err
    assert (out / RECORD_FILE).read_bytes() == before


@pytest.mark.usefixtures("quick_facts")
@pytest.mark.parametrize("outcome", ["whole", "damaged", "another's"])
def test_a_run_that_ended_but_was_not_recorded(
    tmp_path: Path, toy: List[str], outcome: str
) -> None:
    out = tmp_path / "out"
    assert cli.main([*toy, "--out", str(out)]) == 0
    whole = load_record(out / RECORD_FILE)
    (out / RECORD_FILE).unlink()
    if outcome == "damaged":
        (out / OUTCOME_FILE).write_text("{")
    elif outcome == "another's":
        text = (out / OUTCOME_FILE).read_text()
        (out / OUTCOME_FILE).write_text(text.replace(whole.run_id, "another"))
    with open(out / EVENTS_FILE, "a") as stream:
        stream.write("torn")

    assert cli.main(["record", "--out", str(out)]) == 0

    found = load_record(out / RECORD_FILE)
    assert found.rows == whole.rows
    assert found.events_damaged == 1
    ended = (found.status, found.exit_code)
    assert ended == ((Status.COMPLETE, 0) if outcome == "whole" else (Status.UNFINISHED, 32))


def test_a_folder_without_a_run_has_nothing_to_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["record", "--out", str(tmp_path)]) == 2
    assert cli.main(["record", "--out", str(tmp_path / "none")]) == 2
    assert "narrowgauge attach" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick_facts")
def test_a_run_that_was_killed_for_memory_says_so(tmp_path: Path, toy: List[str]) -> None:
    out = tmp_path / "out"
    note = tmp_path / "host.json"
    body = {"format": 1, "executor": "script", "machine": MACHINE, "exceptions": ["groups 44"]}
    note.write_text(json.dumps(body))
    assert cli.main([*toy, "--out", str(out)]) == 0
    for name in (RECORD_FILE, OUTCOME_FILE):
        (out / name).unlink()

    words = ["record", "--out", str(out), "--host-facts", str(note), "--out-of-memory"]
    assert cli.main(words) == 0

    found = load_record(out / RECORD_FILE)
    assert (found.status, found.exit_code) == (Status.UNFINISHED, 31)
    assert found.host is not None
    assert found.host.error is not None
    assert "out of memory" in found.host.error.what
    assert found.host.exceptions == ("groups 44",)


def test_a_resumed_run_that_is_killed_is_recorded_anew(tmp_path: Path, toy: List[str]) -> None:
    """The record of the first attempt is kept, under another name."""
    toy_path = tmp_path / "experiments"
    write_toy(toy_path, METRIC + 'ctx.log("ready")\ntime.sleep(600)')
    out = tmp_path / "out"
    first = start_lab(*toy, "--out", str(out))
    wait_for(out, EventKind.LOG)
    first.terminate()
    first.communicate(timeout=120)
    assert load_record(out / RECORD_FILE).status is Status.INTERRUPTED
    begun = (out / EVENTS_FILE).stat().st_size

    second = start_lab(*toy, "--out", str(out), "--resume")
    deadline = time.monotonic() + 300
    while (out / RECORD_FILE).exists() or (out / EVENTS_FILE).stat().st_size <= begun:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second.kill()
    second.communicate(timeout=120)
    while cli.main(["record", "--out", str(out)]) == 25:
        pass

    assert load_record(out / RECORD_FILE).status is Status.UNFINISHED
    assert load_record(out / "record.1.json").status is Status.INTERRUPTED
