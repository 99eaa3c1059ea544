"""What an exit status means, and what the engine's own words mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from result_cases import job, record_of

from narrowgauge.errors import (
    ContainerRefused,
    DiskFull,
    DockerPermission,
    DockerUnavailable,
    ended_badly,
)
from narrowgauge.executors.docker_errors import connection_error, refusal_error
from narrowgauge.executors.ending import ending_from, vanished
from narrowgauge.recording import problem_of
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.outcome import Status


@pytest.mark.parametrize(
    ("status", "oom", "code", "how"),
    [
        (0, False, ExitCode.OK, Status.COMPLETE),
        # A row may have been killed for memory in a run that ended well all the same.
        (0, True, ExitCode.OK, Status.COMPLETE),
        (137, True, ExitCode.OUT_OF_MEMORY, Status.UNFINISHED),
        (137, False, ExitCode.KILLED, Status.UNFINISHED),
        (143, False, ExitCode.KILLED, Status.UNFINISHED),
        (130, False, ExitCode.INTERRUPTED, Status.INTERRUPTED),
        (30, False, ExitCode.RUN_FAILED, Status.FAILED),
        (31, True, ExitCode.OUT_OF_MEMORY, Status.FAILED),
        (22, False, ExitCode.DISK_FULL, Status.FAILED),
        (33, False, ExitCode.NO_VALID_ROW, Status.FAILED),
        (2, False, ExitCode.USAGE, Status.FAILED),
        (1, False, ExitCode.RUN_FAILED, Status.FAILED),
        (99, False, ExitCode.RUN_FAILED, Status.FAILED),
    ],
)
def test_an_exit_status_has_one_meaning(
    status: int, oom: bool, code: ExitCode, how: Status
) -> None:
    ending = ending_from(status, out_of_memory=oom, log_tail="a\nb\n", what="container")

    assert (ending.exit_code, ending.status) == (code, how)
    assert (ending.error is None) == (status == 0)


@pytest.mark.parametrize("code", [code for code in ExitCode if code != ExitCode.OK])
def test_a_run_ends_with_the_code_that_its_record_says(code: ExitCode, tmp_path: Path) -> None:
    record = record_of(Store(tmp_path).new_run(job()))
    failed = dataclasses.replace(record, status=Status.FAILED, exit_code=int(code))

    error = problem_of(failed, RunFolder(tmp_path))

    assert error is not None
    assert error.exit_code is code


def test_a_code_that_is_not_ours_is_a_failed_run() -> None:
    assert ended_badly(99, "it broke").exit_code is ExitCode.RUN_FAILED


def test_a_lab_that_broke_is_quoted() -> None:
    ending = ending_from(
        1, out_of_memory=False, log_tail="x\n" * 9 + "ImportError: y\n", what="process"
    )

    assert ending.error is not None
    assert ending.error.why.endswith("ImportError: y")


def test_a_container_that_vanished_was_killed() -> None:
    assert vanished("container", "gone").exit_code == ExitCode.KILLED


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            'could not select device driver "" with capabilities: [[gpu]]',
            "this engine cannot give a container the GPU",
        ),
        ("Unknown runtime specified nvidia", "this engine has no NVIDIA runtime"),
        ("unknown or invalid runtime name: nvidia", "this engine has no NVIDIA runtime"),
        (
            'error gathering device information while adding custom device "/dev/nvidia0"',
            "a device file that the container asks for is not on this host",
        ),
        (
            'invalid mount config for type "bind": bind source path does not exist: /nowhere',
            "a folder that the container mounts is not there",
        ),
        ("something new", "the engine refused the container"),
    ],
)
def test_a_refusal_is_translated_and_quoted(text: str, what: str) -> None:
    error = refusal_error(text, 400)

    assert isinstance(error, ContainerRefused)
    assert error.what == what
    assert text in error.why
    assert error.next_step


def test_no_room_in_the_engine_is_a_full_disk() -> None:
    assert isinstance(refusal_error("write /x: no space left on device", 500), DiskFull)


def test_why_no_engine_answers_is_told_apart() -> None:
    host = "unix:///var/run/docker.sock"
    wrapped = RuntimeError("Error while fetching server API version")
    wrapped.__cause__ = PermissionError(13, "Permission denied")

    assert isinstance(connection_error(wrapped, host), DockerPermission)
    missing = connection_error(FileNotFoundError(2, "No such file or directory"), host)
    refused = connection_error(ConnectionRefusedError(111, "Connection refused"), host)
    assert isinstance(missing, DockerUnavailable)
    assert "does not exist" in missing.why
    assert "not started" in refused.why
    assert "--executor native" in missing.next_step


def test_an_engine_over_ssh_is_said_to_be_of_no_use() -> None:
    """Whatever went wrong: no client is missing, and no group of this host opens it."""
    for said in ("Install paramiko package to enable ssh:// support", "Permission denied (key)"):
        error = connection_error(RuntimeError(said), "ssh://me@there")

        assert isinstance(error, DockerUnavailable)
        assert "ssh://me@there" in error.what
        assert "folders of this host" in error.why
        assert "unset DOCKER_HOST" in error.next_step
        assert "usermod" not in error.next_step
