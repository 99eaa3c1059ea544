"""Runs that end badly: nothing recorded is lost, no container stays, and each has its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import Program, wait_until

from narrowgauge_contract.events import EVENTS_FILE
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import Record

Containers = Callable[[], list[Any]]
#: A busy machine takes many seconds to end a container.
WITHIN_S = 300


def started(program: Program, act: str) -> subprocess.Popen[str]:
    """A run whose row waits until the test lets it go on."""
    process = program.start(program.run_words("probe", "-p", f"act={act}"))

    def working() -> bool:
        assert process.poll() is None, process.communicate()
        return any(
            '"progress"' in path.read_text()
            for path in program.results.glob(f"*/*/out/{EVENTS_FILE}")
        )

    wait_until(working, "the row's progress")
    return process


def answers(record: Record) -> tuple[float, ...]:
    metric = record.rows[0].metric("answer")
    assert metric is not None
    return metric.values


def let_go(program: Program) -> None:
    (program.folder() / "out" / "go").touch()


def test_ctrl_c_stops_the_container_and_keeps_what_was_measured(
    program: Program, containers: Containers
) -> None:
    process = started(program, "wait")

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WITHIN_S)

    assert process.returncode == 130, out + err
    assert containers() == []
    record = program.record()
    assert record.status is Status.INTERRUPTED
    assert answers(record) == (42.0,)
    assert not record.rows[0].validity.valid


def test_sigterm_does_the_same(program: Program, containers: Containers) -> None:
    process = started(program, "wait")

    process.terminate()
    process.communicate(timeout=WITHIN_S)

    assert process.returncode == 130
    assert containers() == []
    assert answers(program.record()) == (42.0,)


def test_a_container_killed_from_outside(program: Program, containers: Containers) -> None:
    process = started(program, "wait")
    (container,) = containers()

    container.kill()
    out, err = process.communicate(timeout=WITHIN_S)

    assert process.returncode == 32, out + err
    assert containers() == []
    record = program.record()
    assert record.status is Status.UNFINISHED
    assert answers(record) == (42.0,)
    assert record.host is not None
    assert record.host.exit_code == 32


def test_a_container_removed_from_outside(program: Program, containers: Containers) -> None:
    process = started(program, "wait")
    (container,) = containers()

    container.remove(force=True)
    process.communicate(timeout=WITHIN_S)

    assert process.returncode == 32
    assert answers(program.record()) == (42.0,)


def test_a_killed_launcher_leaves_the_run_for_attach(
    program: Program, containers: Containers
) -> None:
    process = started(program, "wait")
    process.kill()
    process.communicate(timeout=WITHIN_S)
    (container,) = containers()
    assert container.status == "running"
    assert not (program.folder() / "record.json").exists()

    let_go(program)
    program.call("attach", program.folder().name, "--results", str(program.results))

    assert containers() == []
    record = program.record()
    assert record.status is Status.COMPLETE
    assert answers(record) == (42.0, 43.0)
    assert record.hashes.image
    assert record.host is not None


def test_attach_after_the_container_ended_by_itself(
    program: Program, containers: Containers
) -> None:
    process = started(program, "wait")
    process.kill()
    process.communicate(timeout=WITHIN_S)
    (container,) = containers()
    let_go(program)
    container.wait(timeout=60)

    program.call("attach", program.folder().name, "--results", str(program.results))

    assert containers() == []
    assert answers(program.record()) == (42.0, 43.0)


def test_a_second_run_while_one_measures(program: Program, containers: Containers) -> None:
    process = started(program, "wait")
    words = [word for word in program.run_words("probe") if word != "--wait"]

    second = program.start(words)
    out, err = second.communicate(timeout=WITHIN_S)
    let_go(program)
    process.communicate(timeout=WITHIN_S)

    assert second.returncode == 25, out + err
    assert "--wait" in err
    assert process.returncode == 0
    assert containers() == []


@contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A small file system. Mounting one needs root, as the container tests' provisioning does."""
    folder.mkdir()
    sudo = [] if os.getuid() == 0 else ["sudo", "-n"]
    options = f"size={megabytes}m,uid={os.getuid()},gid={os.getgid()}"
    subprocess.run([*sudo, "mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*sudo, "umount", folder], check=True)


def test_a_disk_that_fills_during_the_run(program: Program, tmp_path: Path) -> None:
    """Exit 22; once there is room, the record can still be made from what was written."""
    with disk(tmp_path / "small", 128) as small:
        full = Program(program.project, small / "results", program.env)

        done = full.run("probe", "-p", "act=fill", expect=22)

        assert "room" in done.stderr
        folder = full.folder()
        if not (folder / "record.json").exists():
            for big in folder.glob("out/row-*/big.bin"):
                big.unlink()
            full.call("attach", folder.name, "--results", str(full.results), expect=22)
        record = full.record()
        assert answers(record) == (42.0,)
        assert record.status is not Status.COMPLETE


def test_a_disk_that_is_full_before_the_run(program: Program, tmp_path: Path) -> None:
    """Nothing is started that could not be recorded."""
    with disk(tmp_path / "small", 2) as small:
        full = Program(program.project, small / "results", program.env)

        done = full.run("probe", expect=22)

        assert "--results" in done.stderr
        assert not list(full.results.glob("*/*"))


def test_out_of_memory(program: Program, containers: Containers) -> None:
    process = started(program, "hog")
    (container,) = containers()
    container.update(mem_limit="600m", memswap_limit="600m")

    let_go(program)
    out, err = process.communicate(timeout=120)

    assert process.returncode == 31, out + err
    assert containers() == []
    assert answers(program.record()) == (42.0,)
