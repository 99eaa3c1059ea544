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
from harness import ALIAS, LABEL_RUN, ROOT, Built, Compose, Program

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
    name = os.environ.get("NARROWGAUGE_TEST_BASE", "narrowgauge-standin:cpu")
    subprocess.run([ROOT / "scripts/standin.sh", "base", "cpu", ROOT / ".test", name], check=True)
    assert engine.images.get(name)
    return name


@pytest.fixture(scope="session")
def wheels() -> Path:
    """Every wheel of the image, so that building asks no package index."""
    folder = Path(os.environ.get("NARROWGAUGE_TEST_WHEELS", ROOT / ".test/wheels"))
    words = ["wheels", "cpu", folder, sys.executable]
    subprocess.run([ROOT / "scripts/standin.sh", *words], check=True)
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
    # What is there already is not built again, and so not checked again.
    checked = program.call("images", "verify", "cpu")
    yield Built(built.stdout.split()[0], built.stderr + checked.stdout)
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
def compose(
    image: Built,
    project: Path,
    environment: Mapping[str, str],
    tmp_path: Path,
    own: Callable[[Path, int, int], None],
) -> Iterator[Compose]:
    """compose.yaml as a clone has it, in a project of its own; nothing of it stays."""
    assert image.name
    folder = tmp_path / "clone"
    (folder / "results").mkdir(parents=True)
    shutil.copy2(ROOT / "compose.yaml", folder)
    (folder / "experiments").symlink_to(project / "experiments")
    unset = ("NARROWGAUGE_UID", "NARROWGAUGE_GID", "NARROWGAUGE_DATA", "NARROWGAUGE_TARGET")
    env = {name: value for name, value in environment.items() if name not in unset}
    made = Compose(folder, f"narrowgauge-test-{os.getpid()}-{os.urandom(3).hex()}", env)
    yield made
    made.call("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "1")
    left = ["docker", "volume", "ls", "--quiet", "--filter", f"name=^{made.name}_"]
    volumes = subprocess.run(left, capture_output=True, text=True, check=True).stdout.split()
    if volumes:  # of a uid that .env no longer names
        subprocess.run(["docker", "volume", "rm", *volumes], capture_output=True, check=True)
    own(folder, os.getuid(), os.getgid())


@pytest.fixture
def own(image: Built) -> Callable[[Path, int, int], None]:
    """Gives a folder to a user, whoever runs the tests: in a container, as root."""

    def give(folder: Path, uid: int, gid: int) -> None:
        words = ["docker", "run", "--rm", "--user", "0:0", "--entrypoint", "chown"]
        words += ["--volume", f"{folder}:/given", image.name, "-R", "-h", f"{uid}:{gid}", "/given"]
        subprocess.run(words, capture_output=True, check=True)

    return give


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
