"""What goes wrong on a board at the worst moment: cuts as a run begins, silence, odd files."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from board_lab import PATIENCE, ROOT, begin, die, left_on, on_board, wait_until_empty
from boards import TOOLS, LabBoard, boards, make_image
from harness import wait_until
from line import Line
from rich.console import Console
from tiny_image import archive

import narrowgauge.executors.ssh as ssh_module
from narrowgauge.checkout import find_checkout
from narrowgauge.errors import (
    BuildFailed,
    Busy,
    DataCorrupt,
    DiskFull,
    DockerUnavailable,
    Interrupted,
)
from narrowgauge.executors.base import load_handle
from narrowgauge.executors.ssh import SshExecutor
from narrowgauge.fleet.doctor import examine
from narrowgauge.fleet.errors import BoardUnreachable
from narrowgauge.fleet.facts import Questions, ask_board
from narrowgauge.fleet.link import Channel, control_folder
from narrowgauge.fleet.show import print_findings
from narrowgauge.fleet.watching import Watching
from narrowgauge.launch import World, forget_leftovers
from narrowgauge.machine import probe_host
from narrowgauge.plan import Places
from narrowgauge.runner import attach, run_job
from narrowgauge.targets import TARGETS_FILE, load_targets
from narrowgauge_contract.outcome import Status

NOTHING = {"containers": [], "folders": []}
RUN = "20261121T101500Z-tiny-"


@pytest.fixture(scope="module")
def made() -> Iterator[LabBoard]:
    root = Path(tempfile.mkdtemp(prefix="ng-", dir="/tmp"))
    with boards(root, ("c",)) as (board,):
        make_image(board, archive((*TOOLS, "ln")))
        yield board
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def board(made: LabBoard) -> Iterator[LabBoard]:
    """A test leaves nothing on it."""
    yield made
    try:
        wait_until_empty(made)
    finally:
        made.docker("rm", "--force", *left_on(made)["containers"], check=False)
        shutil.rmtree(made.data, ignore_errors=True)


@pytest.fixture
def slow_docker(made: LabBoard) -> Iterator[Path]:
    """The board's `docker run` takes four seconds; the file tells that one has begun."""
    fake = made.folder / "slow"
    fake.mkdir(exist_ok=True)
    begun = fake / "begun"
    begun.unlink(missing_ok=True)
    docker = shutil.which("docker")
    (fake / "docker").write_text(
        f'#!/bin/sh\n[ "$1" != run ] || {{ : >{begun}; sleep 4; }}\nexec {docker} "$@"\n',
        encoding="utf-8",
    )
    (fake / "docker").chmod(0o755)
    made.stop_sshd()
    made.start_sshd(path=str(fake))
    end_kept(made)
    yield begun
    made.stop_sshd()
    made.start_sshd()
    end_kept(made)


def end_kept(board: LabBoard) -> None:
    """End the connections kept so far: they outlive the sshd that took them, and its PATH with
    them."""
    for socket in control_folder({"XDG_RUNTIME_DIR": str(board.folder)}).iterdir():
        words = ["ssh", "-O", "exit", "-o", f"ControlPath={socket}", "any"]
        subprocess.run(words, capture_output=True, check=False)


def test_a_line_that_goes_as_a_run_begins_leaves_it_for_attach(
    board: LabBoard, tmp_path: Path
) -> None:
    run = RUN + "aaaaaa"
    patience = dataclasses.replace(PATIENCE, away=0.5)
    with Line(board.port) as line:
        there = on_board(board, tmp_path, port=line.port, middle="sleep 1", patience=patience)
        # What the board says now arrives a second later: too late.
        line.round_trip_s = 2.0

        def go() -> None:
            wait_until((board.data / "runs" / run / "pid").exists, "the run")
            line.refusing = True
            line.cut()

        threading.Thread(target=go).start()
        with pytest.raises(BoardUnreachable, match=r"cut|answer") as raised:
            run_job(there.job(run), there.session)
        (folder,) = there.session.store.all()
        line.round_trip_s, line.refusing = 0.0, False

        record = attach(folder, there.session)
        wait_until_empty(board)

    assert f"narrowgauge attach {run}" in raised.value.next_step
    assert any("perhaps it goes on" in note for note in there.reporter.notes)
    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)


def test_a_connection_that_was_cut_since_the_board_was_asked_is_made_anew(
    board: LabBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on the connection that asked the board what it is; here that ends under it."""
    with Line(board.port) as line:
        there = on_board(board, tmp_path, port=line.port)
        ask_board(there.link, Questions())
        follow, followed = Channel.follow, []

        def cut(channel: Channel, verb: str, words: list[str]) -> bool:
            followed.append(follow(channel, verb, words))
            line.cut()
            return followed[-1]

        monkeypatch.setattr(Channel, "follow", cut)
        _, record = run_job(there.job(RUN + "bbbbb0"), there.session)
        wait_until_empty(board)

    assert followed == [True]
    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)


def test_a_run_needs_no_connection_of_its_own_after_the_board_was_asked(
    board: LabBoard, tmp_path: Path
) -> None:
    """Two round trips less (benchmarks/fleet/bench.py counts them); the next run has one again."""
    there = on_board(board, tmp_path)
    before = there.link.calls
    ask_board(there.link, Questions())
    _, first = run_job(there.job(RUN + "bbbbb1"), there.session)
    used = there.link.calls - before
    _, second = run_job(there.job(RUN + "bbbbb2"), there.session)

    assert used == 1
    assert there.link.calls - before == 2
    assert (first.exit_code, second.exit_code) == (0, 0)


def test_a_cut_before_the_container_is_there_waits_for_it(
    board: LabBoard, tmp_path: Path, slow_docker: Path
) -> None:
    run = RUN + "bbbbbb"
    with Line(board.port) as line:
        there = on_board(board, tmp_path, port=line.port)

        def go() -> None:
            wait_until((board.data / "runs" / run / "job.json").exists, "the inputs")
            line.cut()

        threading.Thread(target=go).start()
        _, record = run_job(there.job(run), there.session)
        # The last word to the board may still be on the line.
        wait_until_empty(board)

    assert slow_docker.exists()
    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)
    assert any("cut as it began; it goes on" in note for note in there.reporter.notes)


def test_a_command_that_died_before_the_container_leaves_nothing(
    board: LabBoard, tmp_path: Path, slow_docker: Path
) -> None:
    run = RUN + "cccccc"
    there = on_board(board, tmp_path)
    home = board.data / "runs" / run

    def go() -> None:
        wait_until(slow_docker.exists, "the slow `docker run`", 30)
        os.kill(int((home / "beginning").read_text().split()[0]), signal.SIGKILL)

    threading.Thread(target=go).start()
    with pytest.raises(BoardUnreachable):
        run_job(there.job(run), there.session)

    assert not list(there.session.store.all())
    assert not home.exists()
    # The `docker run` it had begun comes a moment later, finds its folder gone, and is refused.
    time.sleep(4.5)
    assert left_on(board) == NOTHING


def test_many_events_arrive_after_the_end(board: LabBoard, tmp_path: Path) -> None:
    size = 20_000_000
    middle = f"head -c {size} /dev/zero >>/out/events.jsonl; echo >>/out/events.jsonl"
    there = on_board(board, tmp_path, middle=middle)
    folder = begin(there, RUN + "dddddd")
    die(there, RUN + "dddddd")
    wait_until(lambda: not board.docker("ps", "--quiet"), "the end of the run", 20)
    here = folder.events_path.stat().st_size if folder.events_path.exists() else 0

    record = attach(folder, there.session)

    assert here < size
    assert folder.events_path.stat().st_size > size
    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)


def test_a_connection_that_is_silent_keeps_no_lease(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path / "one", middle="head -c 60000000 /dev/zero >/out/big")
    other = on_board(board, tmp_path / "two")
    wake = threading.Event()
    stuck = threading.Event()
    take = ssh_module.Watching._part

    def part(watching: ssh_module.Watching, answer: object) -> None:
        stuck.set()
        wake.wait(60)
        take(watching, answer)  # type: ignore[arg-type]

    ssh_module.Watching._part = part  # type: ignore[assignment, method-assign]
    try:
        folder = begin(there, RUN + "eeeeee")
        assert stuck.wait(20)
    finally:
        ssh_module.Watching._part = take  # type: ignore[method-assign]
    silent = there.executor._watching.pop(RUN + "eeeeee")
    there.executor._guards.release(RUN + "eeeeee")
    with pytest.raises(Busy):
        run_job(other.job(RUN + "eeeee1"), other.session)
    try:
        record = attach(folder, on_board(board, tmp_path / "one").session)
        _, after = run_job(other.job(RUN + "eeeee2"), other.session)
    finally:
        wake.set()
        silent._channel._process.kill()
        silent.close()

    assert (record.exit_code, after.exit_code) == (0, 0)
    assert (folder.out / "big").stat().st_size == 60_000_000


def test_one_run_has_one_watcher(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path, middle="sleep 1")
    folder = begin(there, RUN + "ffffff")
    second = SshExecutor(there.link.env, patience=PATIENCE)

    with pytest.raises(Busy, match="watched by another launcher"):
        attach(folder, dataclasses.replace(there.session, executor=second))
    record = attach(folder, there.session)

    assert record.exit_code == 0
    assert not (folder.path / ".watched").exists()


def test_what_fails_after_the_start_leaves_no_container(
    board: LabBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = on_board(board, tmp_path, middle="sleep 60")
    save, saved = ssh_module.save, []

    def full(path: Path, value: object) -> None:
        saved.append(path)
        if len(saved) > 1:
            raise DiskFull("no room left here")
        save(path, value)

    monkeypatch.setattr(ssh_module, "save", full)
    with pytest.raises(DiskFull, match="no room left here"):
        run_job(there.job(RUN + "111111"), there.session)

    assert len(saved) == 2
    assert left_on(board) == NOTHING


def test_a_board_that_stops_taking_says_why(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path)
    small = board.folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(small)], check=True)
    content = [bytes(1 << 20)] * 30
    try:
        words = [str(small / "data"), "0", str(30 << 20), "0" * 64]
        with pytest.raises(DiskFull, match="has no room left"):
            there.link.call("put", words, content)
    finally:
        subprocess.run(["umount", str(small)], check=True)
    with pytest.raises(BuildFailed, match="did not take the image"):
        there.link.call("load", (), [b"no archive", *content])


def test_inputs_that_arrived_changed_are_not_a_full_disk(
    board: LabBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = on_board(board, tmp_path)
    monkeypatch.setattr(ssh_module, "sha256_bytes", lambda content: "0" * 64)

    with pytest.raises(DataCorrupt, match="arrived changed"):
        run_job(there.job(RUN + "222222"), there.session)

    assert (board.folder / "narrowgauge.lock").read_text() == ""


def test_odd_names_arrive_and_what_cannot_is_said(board: LabBoard, tmp_path: Path) -> None:
    names = ["back\\slash", " blank ", "a\\nb", "car\rriage", "-n", "*", "sub dir/x "]
    middle = "mkdir '/out/sub dir'\n"
    middle += "".join(f"echo '{name}' >'/out/{name}'\n" for name in names)
    middle += "echo x >'/out/two\nlines'; ln -s /etc/passwd /out/link"
    there = on_board(board, tmp_path, middle=middle)

    folder, record = run_job(there.job(RUN + "333333"), there.session)

    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)
    assert all((folder.out / name).is_file() for name in names)
    assert record.host is not None
    said = [each for each in record.host.exceptions if each.startswith("not brought")]
    assert sorted(said) == [
        "not brought from the board: link",
        "not brought from the board: two?lines",
    ]


def test_a_list_of_files_longer_than_a_command_line(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path, middle="sleep 0.5; head -c 5000 /dev/zero >/out/file")
    folder = begin(there, RUN + "444444")
    die(there, RUN + "444444")
    arriving = folder.path / "arriving"
    arriving.mkdir(exist_ok=True)
    for number in range(2000):
        (arriving / f"{number:0100d}").touch()
    (arriving / "file").write_bytes(bytes(4000))

    record = attach(folder, there.session)

    assert record.exit_code == 0
    assert (folder.out / "file").read_bytes() == bytes(5000)


def test_one_that_waits_can_be_stopped(board: LabBoard, tmp_path: Path) -> None:
    first = on_board(board, tmp_path / "one", middle="sleep 1.5")
    folder = begin(first, RUN + "555550")
    second = on_board(board, tmp_path / "two", wait=True)
    second.executor._stopped = lambda: any("waiting" in n for n in second.reporter.notes)

    with pytest.raises(Interrupted, match="is measuring"):
        run_job(second.job(RUN + "555551"), second.session)
    record = attach(folder, first.session)

    assert record.exit_code == 0
    assert not list(second.session.store.all())


def test_all_runs_of_an_executor_are_killed_at_once(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path, middle="trap '' TERM; sleep 60")
    job = there.job(RUN + "666666")
    folder = there.session.store.new_run(job)
    handle = there.executor.start(job, Places(folder.path, there.session.experiments, None))

    there.executor.kill_all()
    ending = there.executor.collect(handle, folder.path)

    assert ending.exit_code != 0
    assert not there.executor._live


def test_without_an_engine_nothing_is_said_to_be_stopped(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path, middle="sleep 60")
    folder = begin(there, RUN + "777777")
    handle = load_handle(folder.handle_path)
    die(there, RUN + "777777")
    board.stop_engine()
    try:
        with pytest.raises(DockerUnavailable):
            there.executor.cancel(handle)
        with pytest.raises(DockerUnavailable):
            there.executor.alive(handle)
    finally:
        board.start_engine()

    record = attach(folder, there.session)

    assert record.exit_code != 0
    assert not there.executor.alive(handle)


def test_a_run_that_nobody_holds_is_found_by_any_name_left(board: LabBoard, tmp_path: Path) -> None:
    there = on_board(board, tmp_path / "one", middle="until [ -e /out/go ]; do sleep 0.1; done")
    folder = begin(there, RUN + "888880")
    wait_until((board.data / "runs" / folder.name / "pid").exists, "the run")
    pid = int((board.data / "runs" / folder.name / "pid").read_text().split()[0])
    os.killpg(os.getpgid(pid), signal.SIGKILL)  # sshd gave it a session of its own
    die(there, RUN + "888880")
    # Its own lease was emptied since; another device's still has a name.
    (board.folder / "narrowgauge.lock").write_text("")
    other = board.folder / "narrowgauge-cpu0.lock"
    other.write_text('{"run_id": "somebody"}')
    second = on_board(board, tmp_path / "two")
    try:
        with pytest.raises(Busy, match="nobody holds its lease"):
            run_job(second.job(RUN + "888881"), second.session)
    finally:
        other.unlink()
        (board.data / "runs" / folder.name / "out/go").touch()

    assert attach(folder, there.session).exit_code == 0


def test_what_a_lost_word_left_there_is_named_and_removed(
    board: LabBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line was cut just after the board was told to remove a run: that never came."""
    run = RUN + "vvvvvv"
    there = on_board(board, tmp_path)
    monkeypatch.setattr(Watching, "remove", lambda self: None)
    folder, record = run_job(there.job(run), there.session)
    assert (record.status, record.exit_code) == (Status.COMPLETE, 0)
    assert left_on(board)["folders"] == [run]

    targets = load_targets(ROOT / TARGETS_FILE)
    found = examine([there.link.board], there.link.env, targets)
    shown = io.StringIO()
    print_findings(found, Console(file=shown, width=200))
    assert f"{run} has ended there: narrowgauge attach {run}" in shown.getvalue()

    world = World(find_checkout(ROOT, ROOT), there.link.env, probe_host(), there.reporter.note)
    forget_leftovers(world, folder)
    assert left_on(board) == NOTHING
    forget_leftovers(world, folder)  # as often as one likes
    assert not [note for note in there.reporter.notes if "not removed" in note]
