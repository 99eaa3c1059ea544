"""What a container gets, decided before any engine is asked.

One frozen `ContainerPlan` gives both the body of the engine's create call and the `docker run` line
that `narrowgauge plan` prints, so that the two cannot drift apart.
"""

from __future__ import annotations

import csv
import io
import shlex
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.targets import Accelerator

__all__ = [
    "LABEL_DEVICE",
    "LABEL_EXPERIMENT",
    "LABEL_FOLDER",
    "LABEL_NOTEBOOK",
    "LABEL_RUN",
    "Bind",
    "ContainerPlan",
    "create_body",
    "docker_run_line",
    "docker_run_words",
]

#: Every container of ours carries its run id; `attach` and the host's lock look for it.
LABEL_RUN = "io.narrowgauge.run"
LABEL_EXPERIMENT = "io.narrowgauge.experiment"
LABEL_FOLDER = "io.narrowgauge.folder"
#: Which device of a board the run has; without it, all of them.
LABEL_DEVICE = "io.narrowgauge.device"
#: A notebook's container, and the network that it alone is in.
LABEL_NOTEBOOK = "io.narrowgauge.notebook"

_LOOPBACK = "127.0.0.1"
#: A chatty run must not fill the host's disk: the engine's own log has no bound by default.
_LOG_OPTIONS = {"max-size": "10m", "max-file": "2"}


@dataclass(frozen=True)
class Bind:
    """A host path inside the container; the path must exist, Docker must not make it."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True)
class ContainerPlan:
    """One container. `environment`, `labels` and `tmpfs` are pairs in a fixed order.

    `cache_volume` is mounted at /cache. `entrypoint` None keeps the image's. `groups` are extra
    numeric groups for device files. `cpus` (`0-3`) and `gpu` (`0`) narrow what it gets of the host;
    None is all. `shm_bytes` sizes /dev/shm. `ports` are pairs of a port of this
    host's loopback, and nowhere else, and the container's; they need another `network` than none.
    """

    name: str
    image: str
    command: tuple[str, ...]
    user: str
    binds: tuple[Bind, ...]
    cache_volume: str
    accelerator: Accelerator = Accelerator.NONE
    environment: tuple[tuple[str, str], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    tmpfs: tuple[tuple[str, str], ...] = (("/tmp", "rw,exec,nosuid,nodev,mode=1777"),)
    groups: tuple[str, ...] = ()
    entrypoint: str | None = None
    read_only_root: bool = True
    network: str = "none"
    ports: tuple[tuple[int, int], ...] = ()
    drop_capabilities: tuple[str, ...] = ("ALL",)
    security_options: tuple[str, ...] = ("no-new-privileges",)
    init: bool = True
    shm_bytes: int = 1 << 30
    cpus: str | None = None
    gpu: str | None = None
    log_options: dict[str, str] = field(default_factory=lambda: dict(_LOG_OPTIONS))

    def all_environment(self) -> tuple[tuple[str, str], ...]:
        """The environment, with what the accelerator's runtime reads."""
        if self.accelerator is not Accelerator.NVIDIA_RUNTIME:
            return self.environment
        return (
            *self.environment,
            ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
            ("NVIDIA_VISIBLE_DEVICES", self.gpu or "all"),
        )


def create_body(plan: ContainerPlan) -> dict[str, Any]:
    """The body of the engine's `POST /containers/create`."""
    mounts: list[dict[str, Any]] = [
        {"Type": "bind", "Source": bind.source, "Target": bind.target, "ReadOnly": bind.read_only}
        for bind in plan.binds
    ]
    mounts.append({"Type": "volume", "Source": plan.cache_volume, "Target": "/cache"})
    host: dict[str, Any] = {
        "Mounts": mounts,
        "Tmpfs": dict(plan.tmpfs),
        "ReadonlyRootfs": plan.read_only_root,
        "CapDrop": list(plan.drop_capabilities),
        "SecurityOpt": list(plan.security_options),
        "NetworkMode": plan.network,
        "Init": plan.init,
        "ShmSize": plan.shm_bytes,
        "GroupAdd": list(plan.groups),
        "LogConfig": {"Type": "json-file", "Config": dict(plan.log_options)},
        "AutoRemove": False,
        "RestartPolicy": {"Name": "no"},
    }
    if plan.cpus is not None:
        host["CpusetCpus"] = plan.cpus
    host.update(_accelerator_body(plan.accelerator, plan.gpu))
    body: dict[str, Any] = {
        "Image": plan.image,
        "Cmd": list(plan.command),
        "User": plan.user,
        "Env": [f"{name}={value}" for name, value in plan.all_environment()],
        "Labels": dict(plan.labels),
        "HostConfig": host,
    }
    if plan.entrypoint is not None:
        body["Entrypoint"] = [plan.entrypoint]
    if plan.ports:
        body["ExposedPorts"] = {f"{inside}/tcp": {} for _, inside in plan.ports}
        host["PortBindings"] = {
            f"{inside}/tcp": [{"HostIp": _LOOPBACK, "HostPort": str(outside)}]
            for outside, inside in plan.ports
        }
    return body


def docker_run_words(plan: ContainerPlan, mode: tuple[str, ...] = ("--detach",)) -> tuple[str, ...]:
    """The same container as the words of a `docker run` command, not quoted.

    `mode` says how it is attached: a run is detached; a shell is interactive and goes at its end.
    """
    words = ["docker", "run", *mode]
    words += ["--name", plan.name]
    for name, value in plan.labels:
        words += ["--label", f"{name}={value}"]
    words += ["--user", plan.user]
    for group in plan.groups:
        words += ["--group-add", group]
    words += ["--init"] if plan.init else []
    words += ["--read-only"] if plan.read_only_root else []
    for capability in plan.drop_capabilities:
        words += ["--cap-drop", capability]
    for option in plan.security_options:
        words += ["--security-opt", option]
    words += ["--network", plan.network, "--shm-size", str(plan.shm_bytes)]
    for outside, inside in plan.ports:
        words += ["--publish", f"{_LOOPBACK}:{outside}:{inside}"]
    words += ["--log-driver", "json-file"]
    for name, value in plan.log_options.items():
        words += ["--log-opt", f"{name}={value}"]
    words += ["--cpuset-cpus", plan.cpus] if plan.cpus is not None else []
    words += _accelerator_words(plan.accelerator, plan.gpu)
    for path, options in plan.tmpfs:
        words += ["--tmpfs", f"{path}:{options}"]
    for bind in plan.binds:
        words += ["--mount", _mount_word("bind", bind.source, bind.target, bind.read_only)]
    words += ["--mount", _mount_word("volume", plan.cache_volume, "/cache", False)]
    for name, value in plan.all_environment():
        words += ["--env", f"{name}={value}"]
    if plan.entrypoint is not None:
        words += ["--entrypoint", plan.entrypoint]
    return (*words, plan.image, *plan.command)


def docker_run_line(plan: ContainerPlan) -> str:
    """The exact command, quoted for a shell, an option a line."""
    lines: list[str] = []
    words = [shlex.quote(word) for word in docker_run_words(plan)]
    end = len(words) - len(plan.command) - 1
    for word in words[2:end]:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    lines = [" ".join(words[:2]), *lines, " ".join(words[end:])]
    return " \\\n  ".join(lines)


def _accelerator_body(accelerator: Accelerator, gpu: str | None) -> dict[str, Any]:
    if accelerator is Accelerator.DEVICE_REQUEST:
        which: dict[str, Any] = {"Count": -1} if gpu is None else {"DeviceIDs": [gpu]}
        request = {"Driver": "", **which, "Capabilities": [["gpu"]], "Options": {}}
        return {"DeviceRequests": [request]}
    if accelerator is Accelerator.CDI:
        return {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": [_cdi_device(gpu)]}]}
    if accelerator is Accelerator.NVIDIA_RUNTIME:
        return {"Runtime": "nvidia"}
    return {}


def _accelerator_words(accelerator: Accelerator, gpu: str | None) -> list[str]:
    if accelerator is Accelerator.DEVICE_REQUEST:
        return ["--gpus", "all" if gpu is None else f"device={gpu}"]
    if accelerator is Accelerator.CDI:
        return ["--device", _cdi_device(gpu)]
    if accelerator is Accelerator.NVIDIA_RUNTIME:
        return ["--runtime", "nvidia"]
    return []


def _cdi_device(gpu: str | None) -> str:
    return f"nvidia.com/gpu={'all' if gpu is None else gpu}"


def _mount_word(kind: str, source: str, target: str, read_only: bool) -> str:
    """One `--mount` value. It is a CSV record, so a path with a comma in it must be quoted."""
    fields = [f"type={kind}", f"source={source}", f"target={target}"]
    fields += ["readonly"] if read_only else []
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()
