"""`narrowgauge run` in a container: a whole run, and what the container may and may not do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import pytest
from harness import Built, Program, facts_in

from narrowgauge.images.content import source_hash
from narrowgauge_contract.hashing import sha256_file, tree_hash
from narrowgauge_contract.outcome import Status

Containers = Callable[[], list[Any]]


def test_mnist_on_made_up_data(
    program: Program,
    engine: docker.DockerClient,
    containers: Containers,
    image: Built,
    project: Path,
) -> None:
    """The whole flow: plan, container, events, record with its three hashes, pictures."""
    program.run("mnist", "-p", "data=synthetic")
    record = program.record()

    assert containers() == []
    assert record.status is Status.COMPLETE
    assert record.synthetic
    assert record.hashes.image == engine.images.get(image.name).id
    assert record.hashes.source == source_hash(project)
    assert record.hashes.experiment == tree_hash([project / "experiments/mnist"])
    assert record.host is not None
    assert record.host.executor == "docker"
    assert record.host.image is not None
    assert record.host.image.stand_in
    (row,) = record.rows
    assert row.validity.valid, row.validity.reasons
    assert row.facts["synthetic"] is True
    assert any((program.folder() / "derived").iterdir())


def test_mnist_on_the_true_data(program: Program, tmp_path: Path) -> None:
    """Fetched from the first source that answers, verified, mounted read-only, learned from."""
    data = tmp_path / "data"
    program.call("data", "fetch", "mnist", "--data", str(data))
    program.run("mnist", "--data", str(data))
    record = program.record()

    assert not record.synthetic
    assert record.data_sets == ("mnist",)
    accuracy = record.rows[0].metric("test_accuracy")
    assert accuracy is not None
    assert accuracy.values[-1] > 0.5


def test_what_a_container_may_do(program: Program, containers: Containers) -> None:
    program.run("probe")
    facts = facts_in(program.record())

    assert containers() == []
    assert (facts["uid"], facts["gid"]) == (os.getuid(), os.getgid())
    assert facts["capabilities"] == 0
    assert facts["no_new_privileges"] is True
    assert facts["interfaces"] == ["lo"]
    assert facts["docker_socket"] is False
    assert facts["home"] == "/cache"
    assert "init" in facts["first_process"] or "tini" in facts["first_process"]
    for place in ("root", "opt", "experiments"):
        assert facts[f"writable_{place}"] is False, place
    for place in ("cache", "tmp", "out"):
        assert facts[f"writable_{place}"] is True, place
    for place in ("cache", "tmp"):
        assert facts[f"executable_{place}"] is True, place
    assert facts["compiler"] is True


def test_side_files_are_kept_by_content(program: Program) -> None:
    program.run("probe")
    (side_file,) = program.record().rows[0].side_files

    path = program.folder() / "out" / side_file.path
    assert path.read_text() == "42\n"
    assert sha256_file(path) == side_file.sha256


def test_the_checkouts_experiments_win_over_the_images(program: Program) -> None:
    """An edited experiment needs no new image."""
    folder = program.project / "experiments/probe"
    source = folder / "run.py"
    before = source.read_text(encoding="utf-8")
    source.write_text(before.replace("42.0", "44.0"), encoding="utf-8")
    try:
        program.run("probe")
        edited = tree_hash([folder])
    finally:
        source.write_text(before, encoding="utf-8")

    answer = program.record().rows[0].metric("answer")
    assert answer is not None
    assert answer.values == (44.0,)
    assert program.record().hashes.experiment == edited


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("prob",), 2, "did you mean 'probe'"),
        (("probe", "-p", "act=reprot"), 2, "act"),
        (("probe", "-p", "akt=report"), 2, "did you mean 'act'"),
        (("probe", "-p", "act=fail"), 30, "fail"),
    ],
)
def test_exit_codes(
    words: tuple[str, ...], code: int, says: str, program: Program, containers: Containers
) -> None:
    done = program.run(*words, expect=code)

    assert says in done.stdout + done.stderr
    assert containers() == []


def test_a_target_without_an_image_does_not_apply(program: Program) -> None:
    words = program.words("run", "probe", "--on", "desktop", "--results", str(program.results))
    done = subprocess.run(
        words, env=dict(program.env), capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 3, done.stderr
    assert "desktop" in done.stderr
