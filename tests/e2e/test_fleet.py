"""Runs on boards: real sshd, real engines, and everything that can go wrong between them."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from board_lab import PATIENCE, begin, die, left_on, on_board, wait_until_empty, write_lab
from boards import TOOLS, LabBoard, boards, make_image
from harness import wait_until
from line import Line
from tiny_image import archive

from narrowgauge.errors import Busy, DiskFull, NarrowgaugeError
from narrowgauge.executors.base import load_handle
from narrowgauge.executors.ssh import SshExecutor
from narrowgauge.fleet.errors import BoardUnfit, BoardUnreachable, HostKeyRefused, WrongImage
from narrowgauge.fleet.facts import ask_board
from narrowgauge.runner import attach, run_job
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.outcome import Status

RUN = "20261121T101500Z-tiny-"


@pytest.fixture(scope="module")
def lab() -> Iterator[list[LabBoard]]:
    """Two boards, both with the image."""
    root = Path(tempfile.mkdtemp(prefix="ng-", dir="/tmp"))
    with boards(root, ("a", "b")) as made:
        for board in made:
            make_image(board, archive(TOOLS))
        yield made
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def board(lab: list[LabBoard]) -> Iterator[LabBoard]:
    """The first; a test leaves nothing on it."""
    yield lab[0]
    try:
        wait_until_empty(lab[0])
    finally:
        lab[0].docker("rm", "--force", *left_on(lab[0])["containers"], check=False)
        shutil.rmtree(lab[0].data, ignore_errors=True)


def test_a_run_leaves_a_record_here_and_nothing_there(board: LabBoard, tmp_path: Path) -> None:
    middle = "mkdir -p /out/sub; head -c 300000 /dev/zero >/out/sub/file; echo x >'/out/a b'"
    there = on_board(board, tmp_path, middle=middle)

    folder, record = run_job(there.job(RUN + "aaaaaa"), there.session)

    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)
    assert (folder.out / "sub/file").read_bytes() == bytes(300000)
    assert (folder.out / "a b").read_text() == "x\n"
    assert there.reporter.events == 10
    assert record.host is not None
    assert record.host.executor == "ssh"
    assert record.host.cache_cold is True
    assert f"the lab speaks as {os.getuid()}" in record.host.log_tail
    told = record.host.board
    assert told is not None
    assert (told.name, told.device) == ("a", "all")
    # One machine, so one clock; both are read on it.
    assert abs(told.clock_skew_s) <= told.clock_bound_s
    assert not (folder.path / "arriving").exists()
    assert (board.folder / "narrowgauge.lock").read_text() == ""


def test_two_boards_give_records_that_name_them(lab: list[LabBoard], tmp_path: Path) -> None:
    names = []
    for number, each in enumerate(lab):
        there = on_board(each, tmp_path / each.name)
        _, record = run_job(there.job(f"{RUN}bbbbb{number}"), there.session)
        assert record.host is not None
        assert record.host.board is not None
        names.append((record.host.board.name, record.hashes.image))

    # Imported twice, so the same layers under two ids.
    assert [name for name, _ in names] == ["a", "b"]


def test_a_link_cut_in_a_run_costs_nothing(board: LabBoard, tmp_path: Path) -> None:
    with Line(board.port) as line:
        there = on_board(board, tmp_path, port=line.port, middle="echo '{}' >/out/seen; sleep 1.5")
        seen = board.data / "runs" / (RUN + "cccccc") / "out/seen"
        threading.Thread(target=lambda: (wait_until(seen.exists, "the run"), line.cut())).start()

        folder, record = run_job(there.job(RUN + "cccccc"), there.session)
        wait_until_empty(board)

    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)
    assert record.events_damaged == 0
    assert line.connections >= 2
    assert any("cut" in note for note in there.reporter.notes)
    assert (folder.out / "seen").exists()


def test_a_link_cut_in_the_copy_goes_on_where_it_was(board: LabBoard, tmp_path: Path) -> None:
    size = 24_000_000
    with Line(board.port) as line:
        middle = f"head -c {size} /dev/urandom >/out/big"
        there = on_board(board, tmp_path, port=line.port, middle=middle)
        line.cut_after = size // 2
        come: list[int] = []
        opened = there.executor._open

        def remember(*words: object) -> object:
            come.extend(p.stat().st_size for p in tmp_path.rglob("arriving/big"))
            return opened(*words)  # type: ignore[arg-type]

        there.executor._open = remember  # type: ignore[assignment, method-assign]
        folder, record = run_job(there.job(RUN + "dddddd"), there.session)
        wait_until_empty(board)

    assert record.exit_code == 0
    assert (folder.out / "big").stat().st_size == size
    assert come, "the copy was not taken up again"
    assert 1_000_000 < come[0] < size


def test_an_engine_that_restarts_ends_the_run_and_loses_nothing(
    lab: list[LabBoard], tmp_path: Path
) -> None:
    board = lab[1]
    there = on_board(board, tmp_path, middle="echo kept >/out/kept; sleep 60")
    kept = board.data / "runs" / (RUN + "eeeeee") / "out/kept"

    def restart() -> None:
        wait_until(kept.exists, "the run")
        board.stop_engine()
        board.start_engine()

    worker = threading.Thread(target=restart)
    worker.start()
    folder, record = run_job(there.job(RUN + "eeeeee"), there.session)
    worker.join()

    assert record.exit_code in (ExitCode.KILLED, ExitCode.INTERRUPTED)
    assert record.rows[0].index == 0
    assert (folder.out / "kept").read_text() == "kept\n"
    wait_until_empty(board)


def test_a_launcher_that_died_leaves_the_run_for_attach(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path, middle="sleep 1")
    folder = begin(there, RUN + "ffffff")
    die(there, RUN + "ffffff")
    other = SshExecutor(there.link.env, patience=PATIENCE)

    assert other.alive(load_handle(folder.handle_path))
    record = attach(folder, dataclasses.replace(there.session, executor=other))

    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)


def test_two_launchers_race_and_one_is_told_who_runs(board: LabBoard, tmp_path: Path) -> None:
    outcomes: dict[str, object] = {}
    sites = [on_board(board, tmp_path / name, middle="sleep 1.5") for name in ("one", "two")]
    together = threading.Barrier(2)

    def race(number: int) -> None:
        together.wait()
        try:
            _, record = run_job(sites[number].job(f"{RUN}11111{number}"), sites[number].session)
            outcomes[f"{RUN}11111{number}"] = record
        except NarrowgaugeError as error:
            outcomes[f"{RUN}11111{number}"] = error

    racers = [threading.Thread(target=race, args=(number,)) for number in (0, 1)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()

    lost = [each for each in outcomes.values() if isinstance(each, Busy)]
    won = [run for run, each in outcomes.items() if not isinstance(each, Exception)]
    assert (len(lost), len(won)) == (1, 1)
    assert f"is measuring {won[0]}" in lost[0].what
    assert "--wait" in lost[0].next_step


def test_one_that_waits_gets_its_turn(board: LabBoard, tmp_path: Path) -> None:
    first = on_board(board, tmp_path / "one", middle="sleep 1.5")
    second = on_board(board, tmp_path / "two", wait=True)
    worker = threading.Thread(target=run_job, args=(first.job(RUN + "222220"), first.session))
    worker.start()
    lock = board.folder / "narrowgauge.lock"
    wait_until(lambda: lock.exists() and "222220" in lock.read_text(), "the first run")

    _, record = run_job(second.job(RUN + "222221"), second.session)
    worker.join()

    assert record.exit_code == 0
    assert any("is measuring" in note for note in second.reporter.notes)


def test_a_lease_of_a_dead_launcher_is_named(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path / "one", middle="until [ -e /out/go ]; do sleep 0.1; done")
    folder = begin(there, RUN + "333330")
    die(there, RUN + "333330")
    gone = board.data / "runs" / folder.name / "launcher-gone"
    wait_until(gone.exists, "word that the launcher is gone")
    other = on_board(board, tmp_path / "two")

    with pytest.raises(Busy, match="whose launcher is gone") as raised:
        run_job(other.job(RUN + "333331"), other.session)
    (board.data / "runs" / folder.name / "out/go").touch()
    record = attach(folder, there.session)

    assert f"narrowgauge attach {folder.name}" in raised.value.next_step
    assert raised.value.exit_code == ExitCode.BUSY
    assert record.exit_code == 0


def test_a_lease_that_nobody_holds_any_more_is_taken(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path)
    lock = board.folder / "narrowgauge.lock"
    lock.write_text('{"run_id": "20260101T000000Z-tiny-dead00", "folder": "/x", "pid": 1}')

    _, record = run_job(there.job(RUN + "444444"), there.session)

    assert record.exit_code == 0
    assert any("was left by a launcher that is gone" in note for note in there.reporter.notes)


def test_a_wrong_image_is_refused_before_anything_starts(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path, image="sha256:" + "0" * 64)

    with pytest.raises(WrongImage, match="another image") as raised:
        run_job(there.job(RUN + "555555"), there.session)

    assert raised.value.exit_code == ExitCode.CONTAINER_REFUSED
    assert not list(there.session.store.all())


def test_a_full_disk_there_is_said_and_the_rest_is_kept(board: LabBoard, tmp_path: Path) -> None:
    small = board.folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(small)], check=True)
    try:
        there = on_board(board, tmp_path)
        state = there.executor._seat
        assert state is not None
        moved = dataclasses.replace(state.board, data=str(small / "ng"))
        there.executor._seat = dataclasses.replace(state, board=moved)
        (tmp_path / "experiments/tiny/big.py").write_bytes(os.urandom(400_000))
        with pytest.raises(DiskFull) as raised:
            run_job(there.job(RUN + "666660"), there.session)
        (tmp_path / "experiments/tiny/big.py").unlink()

        # The lab fills it: that is its own failure, and all that it wrote arrives.
        middle = "head -c 9000 /dev/zero >/out/early; cat /dev/zero >/out/fills || exit 22"
        write_lab(tmp_path / "experiments", middle)
        folder, record = run_job(there.job(RUN + "666661"), there.session)
        assert record.exit_code == ExitCode.DISK_FULL
        assert (folder.out / "early").stat().st_size == 9000
        wait_until(lambda: not os.listdir(small / "ng/runs"), "an empty board", 20)
    finally:
        subprocess.run(["umount", str(small)], check=True)

    assert raised.value.exit_code == ExitCode.DISK_FULL
    assert "hosts doctor a" in raised.value.next_step


def test_a_changed_host_key_stops_everything(lab: list[LabBoard], tmp_path: Path) -> None:
    board = lab[1]
    there = on_board(board, tmp_path)
    known = board.known_hosts.read_text()
    other = (board.folder / "key.pub").read_text().split()[1]
    board.known_hosts.write_text(f"[127.0.0.1]:{board.port} ssh-ed25519 {other}\n")
    there.link.drop()
    try:
        with pytest.raises(HostKeyRefused, match="another host key") as raised:
            ask_board(there.link)
        board.known_hosts.write_text("")
        with pytest.raises(HostKeyRefused, match="not known here"):
            ask_board(there.link)
    finally:
        board.known_hosts.write_text(known)

    assert raised.value.exit_code == ExitCode.HOST_KEY_REFUSED
    assert "ssh-keygen -R" in raised.value.next_step


def test_a_board_that_is_off_is_said_to_be(lab: list[LabBoard], tmp_path: Path) -> None:
    there = on_board(lab[1], tmp_path)
    there.link.drop()
    lab[1].stop_sshd()
    try:
        with pytest.raises(BoardUnreachable, match="does not answer") as raised:
            ask_board(there.link)
    finally:
        lab[1].start_sshd()

    assert raised.value.exit_code == ExitCode.BOARD_UNREACHABLE
    assert "is sshd running there" in raised.value.next_step


def test_a_clock_ten_minutes_off_is_refused(lab: list[LabBoard], tmp_path: Path) -> None:
    """Injected where it is read: the board's own `date`."""
    board = lab[1]
    fake = board.folder / "bin"
    fake.mkdir()
    (fake / "date").write_text('#!/bin/sh\nexec /usr/bin/date --date="600 seconds" "$@"\n')
    (fake / "date").chmod(0o755)
    board.stop_sshd()
    board.start_sshd(path=str(fake))
    try:
        there = on_board(board, tmp_path)
        with pytest.raises(BoardUnfit, match="ahead of this host's") as raised:
            run_job(there.job(RUN + "777777"), there.session)
    finally:
        there.link.drop()
        board.stop_sshd()
        board.start_sshd()

    assert raised.value.exit_code == ExitCode.HOST_UNFIT
    assert 599 < there.link.clock.skew_s < 601  # type: ignore[union-attr]
    wait_until_empty(board)


def test_a_stopped_run_is_recorded_as_interrupted(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path, middle="trap 'exit 130' TERM; sleep 60 & wait")

    def stop() -> None:
        running = board.data / "runs" / (RUN + "888888") / "out/events.jsonl"
        wait_until(running.exists, "the run")
        time.sleep(0.2)
        there.session.stop.requested = True

    threading.Thread(target=stop).start()
    _, record = run_job(there.job(RUN + "888888"), there.session)

    assert record.exit_code == ExitCode.INTERRUPTED
