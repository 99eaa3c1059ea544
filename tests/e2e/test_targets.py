"""The images of other targets, on stand-ins: built, checked from inside, run, of one source.

`desktop`: Python 3.8 and torch 1.8.0 as its true base and index would give, but no CUDA compiler.
`jetson` (slow): arm64 by emulation, so that the NEON kernels really run. Both run on the CPU here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest
from harness import ROOT, Built, Program

from narrowgauge.images.content import source_hash, standin_name
from narrowgauge.targets import TARGETS_FILE, load_targets
from narrowgauge_contract.record import Record, load_record

#: Seconds for an image: by emulation, beside other tests, a compiler takes minutes.
_BUILD_WITHIN = 1800.0
HARDENED = (
    "--read-only",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--network=none",
    "--tmpfs=/tmp:exec",
    "--tmpfs=/cache:exec,mode=1777",
)


@dataclass(frozen=True)
class Standin:
    """Where a target's stand-in and its wheels are, and the wheels' folder's name by default."""

    base: str
    wheels: Path


def standin(target: str) -> Standin:
    word = target.upper()
    base = os.environ.get(f"NARROWGAUGE_TEST_BASE_{word}", f"narrowgauge-standin:{target}")
    wheels = os.environ.get(f"NARROWGAUGE_TEST_WHEELS_{word}", ROOT / f".test/wheels-{target}")
    return Standin(base, Path(wheels))


def build(target: str, program: Program) -> Built:
    """The image of `target`, built by the program on its stand-in."""
    made = standin(target)
    script = ROOT / "scripts/standin.sh"
    env = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([script, "base", target, ROOT / ".test", made.base], check=True, env=env)
    subprocess.run([script, "wheels", target, made.wheels, sys.executable], check=True)
    words = ("images", "build", target, "--base", made.base, "--wheels", str(made.wheels))
    built = program.call(*words, within=_BUILD_WITHIN)
    # What is there already is not built again, and so not checked again.
    checked = program.call("images", "verify", target, within=_BUILD_WITHIN)
    return Built(built.stdout.split()[0], built.stderr + checked.stdout)


@pytest.fixture(scope="module")
def builder(
    engine: docker.DockerClient, project: Path, environment: Mapping[str, str]
) -> Iterator[Callable[[str], Built]]:
    """Builds a target's image; its aliases are taken away again."""
    program = Program(project, project / "results", environment)
    built: list[str] = []

    def make(target: str) -> Built:
        made = build(target, program)
        built.append(target)
        return made

    yield make
    targets = load_targets(project / TARGETS_FILE)
    for name in built:
        for alias in (targets[name].alias, standin_name(project, targets[name])):
            engine.images.remove(alias)


@pytest.fixture(scope="module")
def desktop(builder: Callable[[str], Built]) -> Built:
    return builder("desktop")


def run_by_hand(image: str, out: Path, *words: str) -> Record:
    """A run as `docker run` alone starts it: the entry point takes an experiment's name."""
    out.mkdir()
    command = ["docker", "run", "--rm", *HARDENED, "--user", f"{os.getuid()}:{os.getgid()}"]
    command += ["--volume", f"{out}:/results", image, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = out.glob("*/*/record.json")
    return load_record(record)


SMOKE = ("mnist", "--profile", "smoke", "-p", "data=synthetic", "-p", "train_limit=512")


def test_desktop_holds_the_same_source_as_every_image(
    desktop: Built, image: Built, project: Path
) -> None:
    for built in (desktop, image):
        printed = re.findall(r"^source ([0-9a-f]{64})$", built.log, re.MULTILINE)
        assert set(printed) == {source_hash(project)}


def test_desktop_checks_itself_and_says_what_is_not_judged(desktop: Built) -> None:
    assert re.search(r"^python 3\.8\.", desktop.log, re.MULTILINE)
    assert re.search(r"^torch 1\.8\.0, not judged: .* has 1\.8\.0\+cu111$", desktop.log, re.M)
    assert "kernel linear_mac on cpu: within" in desktop.log
    assert "unresolved pins: base, torch" in desktop.log


def test_desktop_trains(desktop: Built, tmp_path: Path) -> None:
    record = run_by_hand(desktop.name, tmp_path / "out", *SMOKE)

    assert record.target == "desktop"
    assert record.host is None
    assert record.inside.python.startswith("3.8.")
    assert record.inside.torch.startswith("1.8.0")
    assert record.inside.pins_unresolved == ("base", "torch")
    assert len(record.valid_rows()) == 1


def test_building_again_is_known_at_once_and_a_change_of_the_lab_is_a_small_build(
    desktop: Built, project: Path, environment: Mapping[str, str]
) -> None:
    made = standin("desktop")
    program = Program(project, project / "results", environment)
    words = ("images", "build", "desktop", "--base", made.base, "--wheels", str(made.wheels))

    again = program.call(*words)
    assert "is up to date" in again.stderr
    assert "#1 " not in again.stderr

    lab = project / "src/narrowgauge_lab/seeding.py"
    text = lab.read_text(encoding="utf-8")
    lab.write_text(f"{text}# {uuid.uuid4()}\n", encoding="utf-8")
    try:
        changed = program.call(*words).stderr
    finally:
        lab.write_text(text, encoding="utf-8")
        program.call(*words)
    # A BuildKit step is a number; CACHED stands for it later.
    steps = dict(re.findall(r"^#(\d+) \[(dependencies|kernels)[^\]]*\] RUN", changed, re.M))
    cached = set(re.findall(r"^#(\d+) CACHED", changed, re.M))
    assert steps
    assert set(steps) <= cached


def test_an_experiment_alone_needs_no_build(
    desktop: Built, project: Path, environment: Mapping[str, str]
) -> None:
    program = Program(project, project / "results", environment)
    run = project / "experiments/mnist/run.py"
    text = run.read_text(encoding="utf-8")
    run.write_text(f"{text}# {uuid.uuid4()}\n", encoding="utf-8")
    try:
        assert program.call("images", "verify", "desktop").returncode == 0
    finally:
        run.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_what_was_saved_is_loaded(
    desktop: Built, project: Path, environment: Mapping[str, str], tmp_path: Path
) -> None:
    program = Program(project, project / "results", environment)
    file = tmp_path / "desktop.tar"

    program.call("images", "save", "desktop", "--out", str(file))
    loaded = program.call("images", "load", str(file))

    assert desktop.name in loaded.stdout
    manifest = json.loads((tmp_path / "desktop.tar.json").read_text())
    assert manifest["image"] == desktop.name
    assert manifest["stand_in"] is True
    assert manifest["bytes"] == file.stat().st_size


@pytest.mark.slow
def test_jetson_for_arm64_by_emulation(
    builder: Callable[[str], Built], project: Path, tmp_path: Path
) -> None:
    built = builder("jetson")

    assert f"source {source_hash(project)}" in built.log
    assert "instruction sets generic neon" in built.log
    assert "kernel linear_mac on cpu: within" in built.log
    record = run_by_hand(built.name, tmp_path / "out", *SMOKE)
    assert record.target == "jetson"
    assert record.inside.platform == "Linux-aarch64"
    assert len(record.valid_rows()) == 1


#: The true docker, but for what needs a card: --gpus is left out, and a runtime is claimed.
_WITHOUT_CARD = """#!/bin/sh
case "$1 ${2-}" in
"info --format") "$REAL_DOCKER" "$@" | sed 's/|/|nvidia /' ;;
run*)
    for word; do
        shift
        if [ -n "$skip" ]; then skip=; continue; fi
        if [ "$word" = --gpus ]; then skip=yes; continue; fi
        set -- "$@" "$word"
    done
    exec "$REAL_DOCKER" "$@" ;;
*) exec "$REAL_DOCKER" "$@" ;;
esac
"""
_CARD = """#!/bin/sh
echo '8.6, 470.57.02, 49140, 1410, 1980, 9501, 9501, a card'
"""


def test_desktop_sh_leaves_a_record_with_the_hosts_facts(
    desktop: Built, project: Path, environment: Mapping[str, str], tmp_path: Path
) -> None:
    """The script, the engine, the image and the lab are true; the card is not."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("docker", _WITHOUT_CARD), ("nvidia-smi", _CARD)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    if not (project / "scripts").exists():
        shutil.copytree(ROOT / "scripts", project / "scripts")
    words = [str(project / "scripts/desktop.sh"), "--image", desktop.name]
    words += ["--results", str(tmp_path / "results"), "--data", str(tmp_path / "data"), *SMOKE]
    env = {**environment, "REAL_DOCKER": shutil.which("docker") or "", "skip": ""}
    env["PATH"] = f"{programs}:{environment['PATH']}"

    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "results").glob("mnist/*/record.json")
    record = load_record(path)
    assert f"results: {path.parent}" in done.stderr
    assert path.stat().st_uid == os.getuid()
    assert record.target == "desktop"
    assert record.host is not None
    assert record.host.executor == "script"
    assert record.host.machine.driver == "470.57.02"
    assert record.host.machine.cpu_count == os.cpu_count()
    assert record.host.image is not None
    assert record.host.image.stand_in
    assert record.hashes.image == record.host.image.digest
