"""Notebooks in containers: on this host whoever has the token gets in, and nothing gets further."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import pytest
from harness import Built, Compose, Program, wait_until

from narrowgauge.container import LABEL_NOTEBOOK
from narrowgauge.images.build import BuildRequest, make_context
from narrowgauge.images.client import find_client
from narrowgauge.images.content import dockerfile_path, notebook_lock_path
from narrowgauge.images.inspect import facts_of
from narrowgauge.images.notebook import notebook_image_name
from narrowgauge.targets import TARGETS_FILE, Target, load_targets
from narrowgauge_contract.record import load_record

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
    ours = _own_name(engine, image, target)
    with make_context(request) as context:
        build = [*client.build_words(), "--target", "notebook", "--tag", IMAGE, "--tag", ours]
        build += ["--file", str(context / dockerfile_path(target)), str(context)]
        subprocess.run(build, env=client.build_environment(), check=True)
    yield
    if before is None:
        engine.images.remove(IMAGE)
    else:
        engine.images.get(before).tag(IMAGE)
    engine.images.remove(ours)


def _own_name(engine: docker.DockerClient, image: Built, target: Target) -> str:
    """What `narrowgauge notebook` looks for, before it builds it from an index."""
    inspected = engine.images.get(image.name).attrs
    return notebook_image_name(target, facts_of(image.name, inspected))


def status(token: str = "") -> int:
    """What the service answers; 0 where there is none yet."""
    return _status(f"{ADDRESS}{token}")


def _status(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
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


@pytest.fixture
def served(program: Program, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """`narrowgauge notebook mnist`, the address that it says, and its port; ended if need be."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ["notebook", "mnist", "--on", "cpu", "--port", str(port), "--data", str(tmp_path)]
    process = program.start([*program.words(*words), "--results", str(program.results)])
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert address, process.stderr.read() if process.stderr else ""
    yield process, address, port
    process.kill()
    process.communicate()


def _ours(engine: docker.DockerClient) -> tuple[list[Any], list[Any]]:
    labelled = {"label": LABEL_NOTEBOOK}
    return engine.containers.list(all=True, filters=labelled), engine.networks.list(
        filters=labelled
    )


@pytest.mark.usefixtures("notebook")
def test_an_experiment_is_opened_run_and_left_without_a_trace(
    program: Program,
    served: tuple[subprocess.Popen[str], str, int],
    engine: docker.DockerClient,
) -> None:
    process, address, port = served
    ((container,), (network,)) = _ours(engine)

    assert re.fullmatch(
        rf"http://127\.0\.0\.1:{port}/lab/tree/notebooks/mnist\.ipynb\?token=[0-9a-f]{{48}}",
        address,
    )
    contents = f"http://127.0.0.1:{port}/api/contents/notebooks/mnist.ipynb"
    assert _status(contents) == 403
    assert _status(contents + "?" + address.partition("?")[2]) == 200
    assert network.attrs["Options"]["com.docker.network.bridge.enable_ip_masquerade"] == "false"
    assert container.exec_run(["touch", "/x"]).exit_code == 1
    assert container.exec_run(["id", "-u"]).output.decode().strip() == str(os.getuid())
    # Nothing gets out: not even a name is known.
    out = "import socket; socket.create_connection(('1.1.1.1', 53), 3)"
    assert container.exec_run(["python3", "-c", out]).exit_code == 1

    path = program.results / "notebooks" / "mnist.ipynb"
    made = json.loads(path.read_text())
    settings = next(cell for cell in made["cells"] if cell["cell_type"] == "code")
    settings["source"] += '\nparameters.update(data="synthetic", precision="fp32")'
    path.write_text(json.dumps(made))
    done = container.exec_run(
        ["jupyter", "execute", "--inplace", "--timeout=300", "/results/notebooks/mnist.ipynb"]
    )
    assert done.exit_code == 0, done.output.decode()
    outputs = [o for cell in json.loads(path.read_text())["cells"] for o in cell.get("outputs", ())]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 3
    assert "complete, 1 of 1 rows valid" in "".join(
        text for o in outputs for text in o.get("text", ())
    )
    (record,) = program.results.glob("mnist/*/record.json")
    assert load_record(record).synthetic

    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert _ours(engine) == ([], [])
