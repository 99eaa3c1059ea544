"""A real engine, a stand-in base, and the `cpu` image built on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import pytest
from harness import ALIAS, LABEL_RUN, ROOT, Built, Program

from narrowgauge.images.content import standin_name
from narrowgauge.targets import TARGETS_FILE, load_targets


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    """The engine. Where none answers this fails: only --no-docker leaves container tests out."""
    client = docker.from_env()
    client.ping()
    yield client
    client.close()


@pytest.fixture(scope="session")
def base(engine: docker.DockerClient) -> str:
    """The stand-in base; made here where `scripts/test.sh` has not made it."""
    name = os.environ.get("NARROWGAUGE_TEST_BASE", "narrowgauge-standin:bookworm")
    subprocess.run([ROOT / "scripts/standin.sh", "base", ROOT / ".test", name], check=True)
    assert engine.images.get(name)
    return name


@pytest.fixture(scope="session")
def wheels() -> Path:
    """Every wheel of the image, so that building asks no package index."""
    folder = Path(os.environ.get("NARROWGAUGE_TEST_WHEELS", ROOT / ".test/wheels"))
    subprocess.run([ROOT / "scripts/standin.sh", "wheels", folder, sys.executable], check=True)
    return folder


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout, with the experiment that only tests use."""
    root = tmp_path_factory.mktemp("project")
    ignore = shutil.ignore_patterns("__pycache__", "build", "*.whl")
    for name in ("docker", "images", "experiments", "src"):
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    shutil.copytree(ROOT / "tests/data/experiments", root / "experiments", dirs_exist_ok=True)
    shutil.copy2(ROOT / "compose.yaml", root)
    return root


@pytest.fixture(scope="session")
def environment() -> Mapping[str, str]:
    """The environment of every command: the suite's own, and this source."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**own, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}


@pytest.fixture(scope="session")
def image(
    engine: docker.DockerClient,
    base: str,
    wheels: Path,
    project: Path,
    environment: Mapping[str, str],
) -> Iterator[Built]:
    """The image, built by the program. The alias is put back as it was."""
    try:
        before = engine.images.get(ALIAS).id
    except docker.errors.ImageNotFound:
        before = None
    program = Program(project, project / "results", environment)
    built = program.call("images", "build", "cpu", "--base", base, "--wheels", str(wheels))
    yield Built(built.stdout.split()[0], built.stdout + built.stderr)
    if before is None:
        engine.images.remove(ALIAS)
    else:
        engine.images.get(before).tag("narrowgauge/cpu", "local")
    engine.images.remove(standin_name(project, load_targets(project / TARGETS_FILE)["cpu"]))


@pytest.fixture
def program(image: Built, project: Path, environment: Mapping[str, str], tmp_path: Path) -> Program:
    assert image.name
    return Program(project, tmp_path / "results", environment)


@pytest.fixture
def containers(engine: docker.DockerClient, program: Program) -> Iterator[Callable[[], list[Any]]]:
    """The containers of this test's runs; after the test there must be none."""

    def ours() -> list[Any]:
        ids = {path.parent.name for path in program.results.glob("*/*/job.json")}
        found = engine.containers.list(all=True, filters={"label": LABEL_RUN})
        return [each for each in found if each.labels[LABEL_RUN] in ids]

    yield ours
    left = ours()
    for each in left:
        each.remove(force=True)
    assert not left, f"left behind: {[each.name for each in left]}"
