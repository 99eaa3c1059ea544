"""One measuring run per host, whoever starts the second."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from narrowgauge.errors import Busy, ExitCode, ResultsUnwritable
from narrowgauge.lock import Holder, default_lock_file, hold

FIRST = Holder("run-1", "/results/run-1", 1)
SECOND = Holder("run-2", "/results/run-2", 2)


def take(path: Path, holder: Holder, **options: object) -> None:
    settings: dict[str, object] = {
        "still_running": lambda other: False,
        "wait": False,
        "note": lambda text: None,
        **options,
    }
    with hold(path, holder, **settings):  # type: ignore[arg-type]
        pass


def test_the_second_run_is_told_which_is_the_first(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        hold(path, FIRST, still_running=lambda other: False, wait=False, note=print),
        pytest.raises(Busy, match="run-1") as busy,
    ):
        take(path, SECOND)

    assert busy.value.exit_code == ExitCode.BUSY
    assert "--wait" in busy.value.next_step
    assert "attach" not in busy.value.next_step  # its own launcher watches it
    take(path, SECOND)  # the first has ended


def test_the_name_follows_the_job_of_a_list(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold(path, FIRST, still_running=lambda other: False, wait=False, note=print) as rename:
        rename(SECOND)
        assert json.loads(path.read_text())["run_id"] == "run-2"
    assert path.read_text() == ""


def test_a_run_whose_launcher_was_killed_counts_while_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def killed() -> None:
        with hold(path, FIRST, still_running=lambda other: False, wait=False, note=print):
            os._exit(9)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join()

    with pytest.raises(Busy, match="run-1") as busy:
        take(path, SECOND, still_running=lambda other: other.run_id == "run-1")
    assert "narrowgauge attach run-1" in busy.value.next_step
    take(path, FIRST, still_running=lambda other: True)  # attach is that run


def test_waiting_says_for_whom_and_goes_on_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"run_id": "run-1", "folder": "/r", "pid": 1}))
    notes: list[str] = []
    answers = [True, True, False]

    take(
        path,
        SECOND,
        still_running=lambda other: answers.pop(0),
        wait=True,
        note=notes.append,
        sleep=lambda seconds: None,
    )
    assert notes == ["waiting for run-1 to end"]
    assert answers == []


def test_every_user_may_take_the_lock(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        take(tmp_path / "lock", FIRST)
    finally:
        os.umask(before)

    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o666


def test_garbage_in_the_file_is_nobody(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("{half")

    take(tmp_path / "lock", FIRST, still_running=lambda other: True)


def test_a_lock_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsUnwritable, match="lock"):
        take(tmp_path / "missing" / "lock", FIRST)


def test_where_the_lock_lies(tmp_path: Path) -> None:
    assert default_lock_file({"NARROWGAUGE_LOCK": str(tmp_path / "l")}) == tmp_path / "l"
    assert default_lock_file({}).name == "narrowgauge.lock"
