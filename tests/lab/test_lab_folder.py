"""The folder of a run: one writer, and the last words of a run whose disk is full."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import Iterator

import pytest
from toys import METRIC, fold, request, run_toy, write_toy

from narrowgauge_contract.errors import ExitCode, UsageError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.outcome import Status, load_outcome
from narrowgauge_lab import cli, folder, session, supervisor
from narrowgauge_lab.errors import BusyError
from narrowgauge_lab.folder import hold, last_words, mend_events

pytestmark = pytest.mark.usefixtures("quick_facts")


def test_two_writers_of_one_folder_are_refused(tmp_path: Path) -> None:
    second = hold(tmp_path, resume=True)
    with hold(tmp_path, resume=False), pytest.raises(BusyError, match="another run is writing"):
        second.__enter__()
    with hold(tmp_path, resume=False):
        pass


def test_a_refused_writer_changes_nothing(tmp_path: Path) -> None:
    run_toy(tmp_path, METRIC)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.json*")}
    with open(tmp_path / "out" / ".lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(BusyError):
            run_toy(tmp_path, METRIC, resume=True)
    with pytest.raises(UsageError, match="already holds a run"):
        run_toy(tmp_path, METRIC)

    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.json*")}


def test_the_reserve_is_given_up_for_the_last_words_only(tmp_path: Path) -> None:
    tries = []

    def write() -> str:
        tries.append((tmp_path / ".reserve").exists())
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "full")
        return "said"

    with hold(tmp_path, resume=False):
        assert last_words(tmp_path, write) == "said"
    assert tries == [True, False]

    def denied() -> None:
        tries.append(True)
        raise PermissionError

    with pytest.raises(PermissionError):
        last_words(tmp_path, denied)
    assert len(tries) == 3, "only a full disk is tried again"


def test_a_torn_line_is_ended_and_a_whole_one_left_alone(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    mend_events(tmp_path)
    assert not path.exists()
    for before, after in ((b"", b""), (b"{}\n", b"{}\n"), (b'{}\n{"k', b'{}\n{"k\n')):
        path.write_bytes(before)
        mend_events(tmp_path)
        assert path.read_bytes() == after


def test_no_room_for_the_outcome_is_an_error_and_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_toy(tmp_path / "experiments", METRIC)

    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(supervisor, "write_json_atomic", full)
    monkeypatch.setattr(cli, "_request", lambda options: request(tmp_path))

    assert cli.main(["run", "toy", "--out", str(tmp_path / "out")]) == ExitCode.DISK_FULL
    err = capsys.readouterr().err
    assert "no room left" in err
    assert "--resume" in err
    assert fold(tmp_path / "out").rows()[0].metrics[0].values == (2.0,)


def test_a_row_whose_end_finds_no_room_at_all_is_not_taken_for_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row's process can say nothing more than its exit code; the parent has to say the rest."""
    real = EventLog.emit
    parent = os.getpid()

    def emit(self, kind, row=None, **data):  # type: ignore[no-untyped-def]
        if kind is EventKind.ROW_END and os.getpid() != parent:
            os.write(self._descriptor, b'{"kind": "row-e')
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, kind, row, **data)

    monkeypatch.setattr(EventLog, "emit", emit)
    outcome, out = run_toy(tmp_path, METRIC, "x=1,2")

    assert outcome.exit_code == ExitCode.DISK_FULL
    assert [row.status for row in outcome.rows] == [Status.FAILED]
    assert outcome.rows[0].error is not None
    assert outcome.rows[0].error.kind == "DiskFullError"
    assert load_outcome(out / "outcome.json") == outcome


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; only root can make one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    words = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if mount is None or subprocess.run(words, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("this user cannot mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


#: Ways to fill the disk: by a side file, by events, by a checkpoint.
_FILLERS = {
    "side file": 'ctx.side_file("big").write_bytes(bytes(4 << 20))',
    "events": "while True: ctx.log('x' * 1000)",
    "checkpoint": 'import torch\nctx.checkpoints.save({"w": torch.empty(1 << 20)})',
}


@pytest.mark.parametrize("filler", sorted(_FILLERS))
def test_a_full_disk_ends_the_run_with_everything_said(small_disk: Path, filler: str) -> None:
    body = f"{METRIC}\nif ctx.parameters['x'] == 2:\n" + "".join(
        f"    {line}\n" for line in _FILLERS[filler].splitlines()
    )
    outcome, out = run_toy(small_disk, body, "x=1,2,3")

    assert outcome.exit_code == ExitCode.DISK_FULL
    assert load_outcome(out / "outcome.json") == outcome
    first, second = outcome.rows
    assert first.validity.valid
    assert second.status is Status.FAILED
    assert second.error is not None
    assert (second.error.kind, second.metrics[0].values) == ("DiskFullError", (4.0,))
    assert [e.kind for e in read_events(out / EVENTS_FILE)][-1] is EventKind.RUN_END


def test_a_disk_that_is_full_before_the_run_is_named(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_toy(small_disk / "experiments", METRIC)
    try:
        (small_disk / "ballast").write_bytes(bytes(2 << 20))
    except OSError:
        pass
    monkeypatch.setattr(cli, "_request", lambda options: request(small_disk))

    assert cli.main(["run", "toy", "--out", str(small_disk / "out")]) == ExitCode.DISK_FULL
    assert f"no room left in {small_disk / 'out'}" in capsys.readouterr().err


def test_a_run_after_the_disk_was_full_goes_on(small_disk: Path) -> None:
    body = f"{METRIC}\nif not os.path.exists('{small_disk}/gate'): " + _FILLERS["side file"]
    run_toy(small_disk, body)
    (small_disk / "out" / "row-0" / "big").unlink()
    (small_disk / "gate").touch()
    outcome = session.run(request(small_disk, resume=True))

    assert outcome.exit_code == ExitCode.OK
    assert outcome.rows[0].validity.valid


def test_the_reserve_is_made_of_bytes_that_do_not_compress(tmp_path: Path) -> None:
    with hold(tmp_path, resume=False):
        kept = (tmp_path / ".reserve").read_bytes()
    assert len(kept) == folder._RESERVE_BYTES
    assert len(set(kept)) > 200
