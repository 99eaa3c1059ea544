"""The `cpu` image: it builds, checks itself, and holds what the checkout holds."""

from __future__ import annotations

import re
from pathlib import Path

import docker
from harness import Built, Program

from narrowgauge.images.content import source_hash


def test_the_image_prints_the_source_hash_of_the_checkout(image: Built, project: Path) -> None:
    """The same in every image: it is computed inside, from what was copied in."""
    printed = re.findall(r"^source ([0-9a-f]{64})$", image.log, re.MULTILINE)
    assert set(printed) == {source_hash(project)}
    checked = r"^kernel linear_mac on cpu: within .*$"
    assert re.search(checked, image.log, re.MULTILINE)


def test_the_image_says_what_it_is(engine: docker.DockerClient, image: Built, base: str) -> None:
    labels = engine.images.get(image.name).labels

    assert labels["io.narrowgauge.target"] == "cpu"
    assert labels["io.narrowgauge.standin"] == "true"
    assert labels["org.opencontainers.image.base.name"] == base
    assert labels["org.opencontainers.image.base.digest"] == engine.images.get(base).id
    assert image.name == f"narrowgauge/cpu:{labels['io.narrowgauge.content']}"


def test_the_image_runs_as_an_ordinary_user_without_being_told(
    engine: docker.DockerClient, image: Built
) -> None:
    config = engine.images.get(image.name).attrs["Config"]

    assert config["User"] == "1000:1000"
    assert config["Entrypoint"] == ["/opt/narrowgauge/entrypoint.sh"]


def test_building_again_does_nothing(program: Program, base: str, wheels: Path) -> None:
    built = program.call("images", "build", "cpu", "--base", base, "--wheels", str(wheels))

    assert "is up to date" in built.stderr
    assert not re.findall(r"^#\d+ ", built.stderr, re.MULTILINE)


def test_a_base_that_is_nowhere_is_its_own_error(program: Program) -> None:
    done = program.call("images", "build", "cpu", "--base", "registry.invalid/nothing:1", expect=12)

    assert "registry.invalid/nothing:1 is not here and cannot be pulled" in done.stderr
    assert "--executor native" in done.stderr
