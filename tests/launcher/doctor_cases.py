"""Situations for the doctor's tests: a PC, a Jetson and a laptop on which nothing is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from narrowgauge.doctor.situation import (
    Board,
    BuildTool,
    DataState,
    DeviceFile,
    Engine,
    Folder,
    GpuState,
    Lab,
    Memory,
    Processor,
    Project,
    Sensor,
    Situation,
    Socket,
    User,
)
from narrowgauge.executors.base import ExecutorFacts
from narrowgauge.machine import Gpu, Host
from narrowgauge.targets import load_targets

__all__ = ["ENGINE", "GB", "GIB", "JETSON", "LAPTOP", "PC", "TARGETS"]

TARGETS = load_targets(Path(__file__).parents[2] / "docker" / "targets.toml")
GIB = 1 << 30
GB = 10**9

ENGINE = Engine(
    address="unix:///var/run/docker.sock",
    api="1.47",
    architecture="amd64",
    facts=ExecutorFacts("docker", "27.5.1", ("nvidia", "runc")),
    default_runtime="runc",
    folder="/var/lib/docker",
    free_bytes=200 * GB,
    volumes=("narrowgauge-cache-desktop-0123456789ab-1000",),
)
_PROJECT = Project(
    results=Folder("/checkout/results", True, True, 1000, 100 * GB),
    data=(DataState("mnist", "complete"),),
    data_root="/home/me/data",
    lab=Lab("/checkout/.venv-lab", "3.11.2", "2.13.0+cu130", True),
    unresolved={},
)

PC = Situation(
    host=Host("amd64", (Gpu("RTX 3090", "8.6", 24 * GIB, {}),), "580.65.06"),
    targets=TARGETS,
    target=TARGETS["desktop"],
    refused=None,
    user=User(1000, frozenset({1000})),
    engine=ENGINE,
    socket=Socket("unix:///var/run/docker.sock", True, 0o660),
    build_tool=BuildTool("/usr/bin/docker", True),
    gpus=(GpuState("RTX 3090", True, True),),
    processor=Processor(("performance",), False, False),
    memory=Memory(32 * GIB, 30 * GIB),
    board=None,
    counters=(Sensor("package-0", "/sys/class/powercap/intel-rapl:0/energy_uj", True),),
    devices=(DeviceFile("/dev/nvidia0", "root", True),),
    docker_group=True,
    project=_PROJECT,
)

JETSON = dataclasses.replace(
    PC,
    host=Host("arm64", l4t="35.2.1", soc="tegra194", device_groups=("44",)),
    target=TARGETS["jetson"],
    engine=dataclasses.replace(
        ENGINE,
        architecture="arm64",
        default_runtime="nvidia",
        volumes=("narrowgauge-cache-jetson-0123456789ab-1000",),
    ),
    gpus=(),
    processor=Processor(("performance",)),
    memory=Memory(30 * GIB, 28 * GIB),
    board=Board(
        "NV Power Mode: MAXN 0",
        (1377000000, 1377000000),
        (Sensor("GPU", "/sys/rail/in1_input", True), Sensor("CPU", "/sys/rail/in2_input", True)),
    ),
    counters=(),
    devices=(DeviceFile("/dev/nvmap", "video", True),),
)

LAPTOP = dataclasses.replace(
    PC,
    host=Host("amd64"),
    target=TARGETS["cpu"],
    engine=dataclasses.replace(ENGINE, facts=ExecutorFacts("docker", "27.5.1", ("runc",))),
    gpus=(),
    devices=(),
)
