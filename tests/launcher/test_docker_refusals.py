"""An engine that is too old, an image for another processor, and every refusal with its way out.

The engine is a fake one; what a true one says is tried in test_docker_executor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import VERSION, FakeEngine, fake_engine
from launching import IMAGE, tiny_job

from narrowgauge.container import ContainerPlan
from narrowgauge.errors import (
    ContainerRefused,
    DockerTooOld,
    DockerUnavailable,
    ExitCode,
    NarrowgaugeError,
)
from narrowgauge.executors.base import ExecutorFacts
from narrowgauge.executors.docker import DockerExecutor
from narrowgauge.executors.docker_client import connect, engine_facts, require_architecture
from narrowgauge.executors.docker_errors import refusal_error
from narrowgauge.launch import NO_IMAGE
from narrowgauge.plan import Places, User, plan_container
from narrowgauge.targets import Accelerator, load_targets
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import ImageFacts

TARGETS = load_targets(Path(__file__).parents[2] / "docker" / "targets.toml")
IMAGES = "GET /images/.*/json"


@pytest.mark.parametrize(
    ("version", "api"), [("19.03.15", "1.40"), ("18.09.9", "1.39"), ("1.11.2", "1.23")]
)
def test_an_engine_that_is_too_old_says_what_it_is_and_what_is_needed(
    tmp_path: Path, version: str, api: str
) -> None:
    """1.23 is below what the SDK itself speaks: it would only say that it does not."""
    old = {**VERSION, "Version": version, "ApiVersion": api}
    with (
        fake_engine(tmp_path, {"GET /version": (200, old)}) as engine,
        pytest.raises(DockerTooOld) as refused,
    ):
        connect(engine.env)

    assert f"version {version} (API {api})" in refused.value.what
    assert "Docker 20.10 (API 1.41)" in refused.value.why
    assert "--executor native" in refused.value.next_step
    assert refused.value.exit_code == ExitCode.DOCKER_TOO_OLD


@pytest.mark.parametrize("api", ["1.41", "1.51"])
def test_an_engine_that_is_new_enough_is_taken(tmp_path: Path, api: str) -> None:
    with fake_engine(tmp_path, {"GET /version": (200, {**VERSION, "ApiVersion": api})}) as engine:
        client = connect(engine.env)
        client.close()

    assert client.api_version == api


def test_auto_goes_native_where_the_engine_is_too_old() -> None:
    assert issubclass(DockerTooOld, NO_IMAGE)


def test_an_engine_that_does_not_answer_in_time_is_no_engine(tmp_path: Path) -> None:
    with (
        fake_engine(tmp_path, {"GET /version": (200, None)}) as engine,
        pytest.raises(DockerUnavailable, match="no Docker engine answers"),
    ):
        connect(engine.env, timeout_s=1)


@pytest.mark.parametrize(
    ("made", "has", "fits"),
    [
        ("amd64", "amd64", True),
        ("arm64", "aarch64", True),
        ("amd64", "x86_64", True),
        ("arm64", "amd64", False),
        ("amd64", "arm64", False),
        ("", "amd64", True),  # an engine that does not say is not contradicted
    ],
)
def test_an_image_for_another_processor_is_refused(
    tmp_path: Path, made: str, has: str, fits: bool
) -> None:
    answers = {
        "GET /version": (200, {**VERSION, "Arch": has}),
        IMAGES: (200, {"Id": "sha256:1", "Architecture": made}),
    }
    with fake_engine(tmp_path, answers) as engine:
        client = connect(engine.env)
        try:
            if fits:
                require_architecture(client, "narrowgauge/jetson:1")
                return
            with pytest.raises(ContainerRefused, match=f"is for {made}.*runs {has}") as refused:
                require_architecture(client, "narrowgauge/jetson:1")
        finally:
            client.close()
    assert "emulator" in refused.value.why
    assert refused.value.exit_code == ExitCode.CONTAINER_REFUSED


def _start(engine: FakeEngine, tmp_path: Path, accelerator: Accelerator) -> None:
    """One job through the executor, up to the engine's answers."""

    def plan(job: Job, places: Places, image: ImageFacts, facts: ExecutorFacts) -> ContainerPlan:
        return plan_container(
            job,
            TARGETS["desktop"],
            image=image.name,
            cache="cache",
            places=places,
            user=User(1, 1),
            accelerator=accelerator,
        )

    client = connect(engine.env)
    executor = DockerExecutor(client, ensure_image=lambda: IMAGE, plan=plan)
    try:
        executor.start(tiny_job(), Places(tmp_path, tmp_path, None))
    finally:
        client.close()


def test_nothing_is_created_for_an_image_of_another_processor(tmp_path: Path) -> None:
    with (
        fake_engine(tmp_path, {IMAGES: (200, {"Architecture": "arm64"})}) as engine,
        pytest.raises(ContainerRefused, match="is for arm64"),
    ):
        _start(engine, tmp_path, Accelerator.NONE)

    assert not any("/containers" in asked for asked in engine.asked)


def test_a_start_that_the_engine_refuses_removes_what_it_created(tmp_path: Path) -> None:
    """Docker creates a container with a device request it cannot keep, and fails at its start."""
    said = 'could not select device driver "" with capabilities: [[gpu]]'
    answers: dict[str, tuple[int, Any]] = {
        IMAGES: (200, {"Architecture": "amd64"}),
        "GET /volumes/cache": (404, {"message": "get cache: no such volume"}),
        "POST /containers/create": (201, {"Id": "c0ffee", "Warnings": []}),
        "POST /containers/c0ffee/start": (500, {"message": said}),
        "DELETE /containers/c0ffee": (204, ""),
    }
    with (
        fake_engine(tmp_path, answers) as engine,
        pytest.raises(ContainerRefused, match="cannot give a container the GPU") as refused,
    ):
        _start(engine, tmp_path, Accelerator.DEVICE_REQUEST)

    assert engine.asked[-1] == "DELETE /containers/c0ffee"
    assert said in refused.value.why
    assert "NVIDIA Container Toolkit" in refused.value.next_step


@pytest.mark.parametrize(
    ("status", "said", "what", "way_out"),
    [
        (
            500,
            'could not select device driver "" with capabilities: [[gpu]]',
            "cannot give a container the GPU",
            "nvidia-ctk runtime configure",
        ),
        (
            500,
            'could not select device driver "cdi" with capabilities: []',
            "does not give devices by CDI",
            "Docker 28",
        ),
        (400, "Unknown runtime specified nvidia", "has no NVIDIA runtime", "nvidia-ctk"),
        (
            400,
            "unknown or invalid runtime name: nvidia",
            "has no NVIDIA runtime",
            "nvidia-ctk",
        ),
        (
            500,
            "error gathering device information while adding custom device"
            ' "/dev/nvhost-ctrl": no such file or directory',
            "device file",
            "nvidia-smi",
        ),
        (
            500,
            "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all",
            "knows no CDI device",
            "nvidia-ctk",
        ),
        (
            500,
            "failed to create task for container: OCI runtime create failed: could not apply"
            " required modification to OCI specification: error modifying OCI spec: failed to"
            " inject CDI devices: unresolvable CDI devices nvidia.com/gpu=all: unknown",
            "knows no CDI device",
            "nvidia-ctk",
        ),
        (
            500,
            "OCI runtime create failed: error running hook #0: Auto-detected mode as 'csv'\n"
            "invoking the NVIDIA Container Runtime Hook directly (e.g. specifying the docker"
            " --gpus flag) is not supported.",
            "--gpus does not work on a Jetson",
            "doctor",
        ),
        (
            500,
            "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=11.4",
            "driver of this host is too old",
            "update the NVIDIA driver",
        ),
        (
            500,
            "nvidia-container-cli: initialization error: load library failed:"
            " libnvidia-ml.so.1: cannot open shared object file",
            "finds no NVIDIA driver",
            "nvidia-smi",
        ),
        (
            400,
            "exec /opt/narrowgauge/entrypoint.sh: exec format error",
            "for another processor",
            "narrowgauge doctor",
        ),
        (
            404,
            "image with reference x was found but does not match the specified platform:"
            " wanted linux/amd64, actual: linux/arm64",
            "for another processor",
            "narrowgauge doctor",
        ),
        (
            400,
            "The requested image's platform (linux/arm64) does not match the detected host"
            " platform (linux/amd64) and no specific platform was requested",
            "for another processor",
            "narrowgauge doctor",
        ),
    ],
)
def test_what_the_engine_says_is_translated(
    status: int, said: str, what: str, way_out: str
) -> None:
    error = refusal_error(said, status)

    assert isinstance(error, NarrowgaugeError)
    assert error.exit_code == ExitCode.CONTAINER_REFUSED
    assert what in error.what
    assert way_out in error.next_step
    assert error.why == said


@pytest.mark.parametrize(
    ("info", "runtimes", "cdi"),
    [
        ({}, (), False),
        ({"Runtimes": {"runc": {}, "nvidia": {}}}, ("nvidia", "runc"), False),
        ({"Runtimes": None, "CDISpecDirs": None, "DiscoveredDevices": None}, (), False),
        # Docker 28.2 lists them; its word counts, whatever lies in the folders.
        ({"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]}, (), True),
        ({"DiscoveredDevices": [{"Source": "cdi", "ID": "example.com/net=1"}]}, (), False),
        ({"DiscoveredDevices": [], "CDISpecDirs": ["FOLDER"]}, (), False),
        # Docker 25 to 28.1 only say where they look.
        ({"CDISpecDirs": ["/nowhere", "FOLDER"]}, (), True),
        ({"CDISpecDirs": ["/nowhere"]}, (), False),
    ],
)
def test_what_an_engine_offers(
    tmp_path: Path, info: dict[str, Any], runtimes: tuple[str, ...], cdi: bool
) -> None:
    (tmp_path / "nvidia.yaml").write_text("cdiVersion: 0.6.0\nkind: nvidia.com/gpu\n")
    if info.get("CDISpecDirs"):
        named = [place.replace("FOLDER", str(tmp_path)) for place in info["CDISpecDirs"]]
        info = {**info, "CDISpecDirs": named}
    facts = engine_facts(VERSION, info)

    assert (facts.version, facts.runtimes, facts.cdi) == ("20.10.24", runtimes, cdi)
