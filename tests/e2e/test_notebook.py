"""The notebook service: on this host whoever has its token gets in, and nothing gets further."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import docker
import pytest
from harness import Built, Compose, wait_until

from narrowgauge.images.build import BuildRequest, make_context
from narrowgauge.images.client import find_client
from narrowgauge.images.content import dockerfile_path, notebook_lock_path
from narrowgauge.targets import TARGETS_FILE, load_targets

pytestmark = pytest.mark.slow

IMAGE = "narrowgauge/cpu-notebook:local"
ADDRESS = "http://127.0.0.1:8888/api/contents"


@pytest.fixture(scope="module")
def notebook(
    engine: docker.DockerClient,
    image: Built,
    base: str,
    wheels: Path,
    project: Path,
    environment: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """The image that the service asks for, with JupyterLab from its lock."""
    assert image.name
    target = load_targets(project / TARGETS_FILE)["cpu"]
    folder = tmp_path_factory.mktemp("wheels")
    for wheel in wheels.glob("*.whl"):
        shutil.copy2(wheel, folder)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    words += ["--only-binary=:all:", "--python-version", target.python, "--implementation", "cp"]
    words += [
        f"--platform={tag}_{os.uname().machine}" for tag in ("manylinux_2_28", "manylinux2014")
    ]
    words += ["--platform=any", "--dest", str(folder)]
    subprocess.run([*words, "-r", str(project / notebook_lock_path(target))], check=True)
    try:
        before = engine.images.get(IMAGE).id
    except docker.errors.ImageNotFound:
        before = None
    request = BuildRequest(project, target, base=base, wheels=folder, env=dict(environment))
    client = find_client(target.builder, environment)
    with make_context(request) as context:
        build = [*client.build_words(), "--target", "notebook", "--tag", IMAGE]
        build += ["--file", str(context / dockerfile_path(target)), str(context)]
        subprocess.run(build, env=client.build_environment(), check=True)
    yield
    if before is None:
        engine.images.remove(IMAGE)
    else:
        engine.images.get(before).tag(IMAGE)


def status(token: str = "") -> int:
    """What the server answers; 0 where there is none yet."""
    try:
        with urllib.request.urlopen(f"{ADDRESS}{token}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.usefixtures("notebook")
def test_a_notebook_wants_its_token(
    compose: Compose, own: Callable[[Path, int, int], None], engine: docker.DockerClient
) -> None:
    own(compose.results, 4321, 4322)
    compose.set(uid=4321, gid=4322)
    compose.call("up", "--detach", "--no-build", "cpu-notebook")

    assert wait_until(status, "the server") == 403
    said = compose.call("--profile", "*", "logs", "cpu-notebook").stdout
    (token, *_) = re.findall(r"127\.0\.0\.1:8888/lab(\?token=[0-9a-f]+)", said)
    assert status(token) == 200
    network = engine.networks.get(f"{compose.name}_notebook").attrs
    assert network["Options"]["com.docker.network.bridge.enable_ip_masquerade"] == "false"
    inside = ["--profile", "*", "exec", "cpu-notebook"]
    assert compose.call(*inside, "id", "-u").stdout.strip() == "4321"
    compose.call(*inside, "touch", "/x", expect=1)
