"""compose.yaml itself: which services there are, and what each is given. Nothing is run here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import docker
import pytest
from harness import ROOT, Compose

from narrowgauge.container import create_body
from narrowgauge.plan import Places, User, plan_container
from narrowgauge.targets import TARGETS_FILE, Accelerator, load_targets
from narrowgauge_contract.job import new_run_id, resolve
from narrowgauge_contract.spec import load_spec

UID, GID = 4321, 4322
TARGETS = load_targets(ROOT / TARGETS_FILE)


def config(compose: Compose) -> dict[str, Any]:
    """The services as compose understands them, by name."""
    done = compose.call("--profile", "*", "config", "--format", "json")
    return dict(json.loads(done.stdout)["services"])


@pytest.mark.parametrize("service", ["cpu-train", "cpu-shell"])
def test_the_engine_is_asked_for_the_same_container(
    compose: Compose, engine: docker.DockerClient, service: str, tmp_path: Path
) -> None:
    """What the engine was told, beside what the launcher would tell it."""
    compose.set(uid=UID, gid=GID)
    compose.call("create", "--no-build", service)
    made = engine.containers.get(f"{compose.name}-{service}-1").attrs
    spec = load_spec(ROOT / "experiments/mnist/experiment.toml")
    job = resolve(spec, {}, profile="smoke", target="cpu", seed=0, run_id=new_run_id("mnist"))
    body = create_body(
        plan_container(
            job, TARGETS["cpu"], image="i", cache="c", accelerator=Accelerator.NONE,
            places=Places(tmp_path, compose.folder / "experiments", tmp_path),
            user=User(UID, GID),
        )
    )  # fmt: skip
    wanted, host = body["HostConfig"], made["HostConfig"]

    for key in ("CapDrop", "Init", "LogConfig", "NetworkMode", "ReadonlyRootfs", "SecurityOpt",
                "ShmSize", "Tmpfs", "AutoRemove"):  # fmt: skip
        assert host[key] == wanted[key], key
    assert not host["CapAdd"]
    assert host["Privileged"] is False
    assert host["RestartPolicy"]["Name"] in ("", "no")
    assert made["Config"]["User"] == body["User"]
    assert set(made["Config"]["Env"]) >= set(body["Env"])
    mounts = {each["Destination"]: each["RW"] for each in made["Mounts"]}
    planned = {each["Target"]: not each.get("ReadOnly", False) for each in wanted["Mounts"]}
    planned.pop("/job.json")
    planned["/results"] = planned.pop("/out")
    assert mounts == planned


def test_every_target_has_its_services_and_only_the_right_ones_get_a_gpu(compose: Compose) -> None:
    services = config(compose)

    kinds = ("train", "shell", "notebook", "fetch")
    expected = {f"{target}-{kind}" for target in TARGETS for kind in kinds} | {"data-fetch"}
    assert set(services) == expected
    for name, service in services.items():
        target = name.rpartition("-")[0]
        gpu = target if name.endswith(kinds[:3]) else ""
        assert ("deploy" in service) == gpu.startswith("desktop"), name
        assert (service.get("runtime") == "nvidia") == gpu.startswith("jetson"), name
        if gpu.startswith("desktop"):
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            assert (device["driver"], device["count"]) == ("nvidia", -1)
            assert device["capabilities"] == ["gpu"]


def test_every_service_is_as_closed_as_its_work_allows(compose: Compose) -> None:
    for name, service in config(compose).items():
        kind = name.rpartition("-")[2]
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges"], name
        assert service["read_only"] is True, name
        assert service["user"] == "1000:1000", name
        assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & set(service), name
        mounts = {each["target"]: each.get("read_only", False) for each in service["volumes"]}
        assert not any("docker.sock" in target for target in mounts), name
        if kind == "fetch":
            assert (service["network_mode"], mounts) == ("bridge", {"/data": False}), name
            continue
        assert mounts == {
            "/experiments": True, "/results": False, "/data": True, "/cache": False,
        }, name  # fmt: skip
        if kind == "notebook":
            (port,) = service["ports"]
            assert (port["host_ip"], port["published"]) == ("127.0.0.1", "8888"), name
            assert list(service["networks"]) == ["notebook"], name
        else:
            assert service["network_mode"] == "none", name


def test_nothing_starts_that_was_not_named(compose: Compose) -> None:
    """A bare `docker compose up` must not start five notebooks on one port."""
    done = compose.call("config", "--services")

    assert done.stdout.split() == ["data-fetch"]
