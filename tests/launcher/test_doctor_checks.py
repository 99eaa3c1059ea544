"""Each check of the doctor: what it says where all is well, and where it is not."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from typing import Any

import pytest
from doctor_cases import ENGINE, GB, GIB, JETSON, LAPTOP, PC, TARGETS

from narrowgauge.doctor.findings import Finding, Severity
from narrowgauge.doctor.report import CHECKS, examine, exit_code
from narrowgauge.doctor.situation import (
    Board,
    BuildTool,
    DataState,
    DeviceFile,
    Folder,
    GpuState,
    Lab,
    Memory,
    Problem,
    Processor,
    Sensor,
    Situation,
    Socket,
    Swap,
    User,
)
from narrowgauge.errors import ExitCode
from narrowgauge.executors.base import ExecutorFacts
from narrowgauge.machine import Gpu, Host

OK, NOTE, WARNING, ERROR, SKIPPED = (
    Severity.OK,
    Severity.NOTE,
    Severity.WARNING,
    Severity.ERROR,
    Severity.SKIPPED,
)
DOWN = Problem("no Docker engine answers", "its socket does not exist", "sudo systemctl start")
OLD = Problem("the Docker engine is too old", "19.03", "update", ExitCode.DOCKER_TOO_OLD)
SHUT = Problem("does not let you in", "", "sudo usermod -aG docker", ExitCode.DOCKER_PERMISSION)
SLOW = Problem("it did not answer in time", late=True)
CLOSED = Problem("the data folder cannot be asked", "[Errno 13] Permission denied: '/d/mnist'")


def eng(base: Situation, **changes: Any) -> Situation:  # the fields are the data
    return replace(base, engine=replace(base.engine, **changes))


def pro(base: Situation, **changes: Any) -> Situation:
    return replace(base, project=replace(base.project, **changes))


def host(base: Situation, **changes: Any) -> Situation:
    return replace(base, host=replace(base.host, **changes))


def gpu(capability: str, driver: str, target: str) -> Situation:
    card = Gpu("a card", capability, GIB, {})
    return replace(PC, host=Host("amd64", (card,), driver), target=TARGETS[target])


NO_RUNTIME = ExecutorFacts("docker", "27.5.1", ("runc",))
CDI = ExecutorFacts("docker", "28.2", ("runc",), cdi=True)
REFUSED = Problem("no target fits this host", "desktop: above 8.6", "update the driver")

NO_TARGET = replace(PC, target=None, refused=REFUSED)

#: An arm64 desk whose user asked for a Jetson's target.
GB10 = replace(
    PC,
    host=Host("arm64", (Gpu("NVIDIA GB10", "12.1", None, {}),), "580.95"),
    target=TARGETS["jetson"],
)
#: `--on cpu` where the driver does not answer.
BROKEN = host(LAPTOP, driver_problem="version mismatch")
#: The NVML of JetPack 6 does not support all that it is asked.
ORIN = replace(
    host(JETSON, l4t="36.4.3", soc="tegra234", driver_problem="Not Supported"),
    target=TARGETS["jetson-next"],
)

#: (check, situation, severity, a part of the finding, a part of the remedy)
CASES = [
    ("target", PC, OK, "desktop: ", ""),
    ("target", LAPTOP, OK, "cpu: ", ""),
    ("target", replace(PC, refused=REFUSED), ERROR, "desktop: above 8.6", "update the driver"),
    ("architecture", PC, OK, "amd64", ""),
    ("architecture", replace(JETSON, target=TARGETS["desktop"]), ERROR, "for amd64", "--on cpu"),
    ("architecture", eng(PC, architecture="arm64"), ERROR, "runs arm64", "DOCKER_HOST"),
    ("architecture", eng(JETSON, architecture="aarch64"), OK, "arm64", ""),
    ("l4t", PC, SKIPPED, "not a Jetson", ""),
    ("l4t", JETSON, OK, "L4T 35.2.1", ""),
    ("l4t", host(JETSON, l4t="32.7.1"), ERROR, "needs L4T 35.1", "flash JetPack 5.1"),
    ("l4t", host(JETSON, l4t="38.2", soc="tegra234"), ERROR, "below 36.0", "flash JetPack 5.1"),
    ("l4t", host(JETSON, l4t="38.2", soc="tegra264"), ERROR, "below 36.0", "see `target`"),
    ("l4t", host(JETSON, l4t="38.2", soc=None), ERROR, "below 36.0", "see `target`"),
    ("l4t", host(JETSON, l4t="32.7.1", soc="tegra186"), ERROR, "35.1", "see `target`"),
    ("l4t", host(JETSON, l4t="32.7.1", soc="tegra210"), ERROR, "35.1", "see `target`"),
    ("l4t", replace(JETSON, target=TARGETS["jetson-next"]), ERROR, "36.0", "see `target`"),
    ("capability", LAPTOP, SKIPPED, "uses no GPU", ""),
    ("capability", PC, OK, "RTX 3090 (8.6) runs what is compiled for 7.0, 7.5, 8.0, 8.6", ""),
    ("capability", JETSON, OK, "tegra194 (7.2)", ""),
    ("capability", host(JETSON, soc=None), SKIPPED, "nothing here says", ""),
    ("capability", gpu("6.1", "580.1", "desktop"), ERROR, "below 7.0", "--on cpu"),
    ("capability", gpu("8.9", "580.1", "desktop"), ERROR, "above 8.6", "another target"),
    ("capability", gpu("11.0", "580.1", "desktop-next"), ERROR, "compiled for", 'add "11.0"'),
    ("capability", NO_TARGET, SKIPPED, "no target", ""),
    ("capability", GB10, SKIPPED, "it is for a Jetson", ""),
    ("capability", replace(GB10, target=TARGETS["desktop-next"]), OK, "12.1", ""),
    ("driver", LAPTOP, SKIPPED, "no NVIDIA driver", ""),
    ("driver", JETSON, SKIPPED, "comes with its L4T", ""),
    ("driver", PC, OK, "driver 580.65.06, and desktop needs 470", ""),
    ("driver", gpu("9.0", "550.54", "desktop-next"), ERROR, "needs driver 580", "to 580 or newer"),
    ("driver", replace(BROKEN, target=None, refused=REFUSED), ERROR, "mismatch", "reboot"),
    ("driver", replace(BROKEN, target=TARGETS["desktop"]), ERROR, "mismatch", "reboot"),
    ("driver", BROKEN, WARNING, "mismatch; cpu runs without it", "reboot"),
    ("driver", ORIN, SKIPPED, "comes with its L4T", ""),
    ("engine", PC, OK, "Docker 27.5.1 at unix:///var/run/docker.sock", ""),
    ("engine", replace(PC, engine=DOWN), ERROR, "its socket does not exist", "systemctl start"),
    ("engine", replace(PC, engine=OLD), OK, "an engine answers", ""),
    ("engine", replace(PC, engine=SLOW), WARNING, "in time", "is quieter: docker info"),
    ("engine", replace(PC, engine=Problem("reset")), ERROR, "reset", "docker info"),
    ("engine-api", PC, OK, "API 1.47", ""),
    ("engine-api", replace(PC, engine=OLD), ERROR, "too old", "update"),
    ("engine-api", replace(PC, engine=DOWN), SKIPPED, "no engine", ""),
    ("client", PC, OK, "builds with buildx", ""),
    (
        "client",
        replace(PC, build_tool=BuildTool("/usr/bin/docker", False)),
        OK,
        "the engine's own BuildKit",
        "",
    ),
    ("client", replace(PC, build_tool=Problem("none", "", "get it")), ERROR, "none", "get it"),
    (
        "client",
        replace(eng(PC, has_image=True), build_tool=Problem("none", "", "get it")),
        WARNING,
        "here already",
        "get it",
    ),
    ("client", replace(PC, build_tool=SLOW), WARNING, "in time", "docker buildx version"),
    ("gpu-runtime", LAPTOP, SKIPPED, "uses no GPU", ""),
    ("gpu-runtime", NO_TARGET, SKIPPED, "no target", ""),
    ("gpu-runtime", replace(PC, engine=DOWN), SKIPPED, "no engine", ""),
    ("gpu-runtime", PC, OK, "by device-request", ""),
    ("gpu-runtime", JETSON, OK, "by nvidia-runtime", ""),
    ("gpu-runtime", eng(PC, facts=NO_RUNTIME), ERROR, "no NVIDIA runtime", "Container Toolkit"),
    ("gpu-runtime", eng(PC, facts=NO_RUNTIME, hook=True), OK, "its hook is installed", ""),
    ("gpu-runtime", eng(JETSON, facts=NO_RUNTIME, hook=True), ERROR, "no NVIDIA", "nvidia-ctk"),
    ("gpu-runtime", eng(JETSON, facts=CDI), ERROR, "CDI devices are not how", "nvidia-ctk"),
    (
        "gpu-runtime",
        eng(replace(PC, target=TARGETS["desktop-next"]), facts=CDI),
        OK,
        "by cdi",
        "",
    ),
    ("default-runtime", PC, SKIPPED, "not a Jetson", ""),
    ("default-runtime", JETSON, OK, "nvidia", ""),
    ("default-runtime", replace(JETSON, engine=DOWN), SKIPPED, "no engine", ""),
    ("default-runtime", eng(JETSON, default_runtime="runc"), WARNING, "is runc", "set-as-default"),
    ("docker-group", PC, OK, "as good as root", ""),
    ("docker-group", replace(PC, user=User(0, frozenset({0}))), OK, "root needs no group", ""),
    ("docker-group", replace(PC, engine=SHUT), ERROR, "may not talk", "usermod -aG docker"),
    ("docker-group", replace(PC, docker_group=False), OK, "answers all the same", ""),
    ("docker-group", replace(PC, docker_group=False, engine=DOWN), SKIPPED, "no engine", ""),
    ("socket", PC, OK, "not open to everybody", ""),
    (
        "socket",
        replace(PC, socket=Socket("tcp://a:2375", False, None)),
        WARNING,
        "TLS",
        "unset DOCKER_HOST",
    ),
    ("socket", replace(PC, socket=Socket("ssh://a", False, None)), SKIPPED, "another host", ""),
    ("socket", replace(PC, socket=Socket("unix:///d", False, None)), SKIPPED, "/d is not", ""),
    (
        "socket",
        replace(PC, socket=Socket("unix:///my run/d", False, 0o666)),
        WARNING,
        "0666",
        "chmod 660 '/my run/d';",
    ),
    ("socket", replace(PC, socket=Socket("tcp://a:2376", True, None)), OK, "tcp://a:2376", ""),
    ("socket", replace(PC, socket=Socket("unix:///d", True, 0o666)), WARNING, "0666", "chmod 660"),
    ("rootless", PC, OK, "as they are", ""),
    ("rootless", replace(PC, engine=DOWN), SKIPPED, "no engine", ""),
    ("rootless", eng(PC, rootless=True), WARNING, "may not write its results", "context use"),
    ("rootless", eng(PC, remaps=True), WARNING, "remaps users", 'take "userns-remap" out of'),
    ("cgroup-memory", PC, OK, "no limit is in the way", ""),
    ("cgroup-memory", replace(PC, engine=DOWN), SKIPPED, "no engine", ""),
    (
        "cgroup-memory",
        replace(PC, memory=Memory(32 * GIB, 30 * GIB, (), GIB)),
        WARNING,
        "1.0 GiB of memory",
        "memory.max",
    ),
    ("cgroup-memory", eng(PC, limits_swap=False), NOTE, "cannot limit swap", "swapaccount=1"),
    ("disk-engine", PC, OK, "200 GB free in /var/lib/docker; the image would take up to 30", ""),
    ("disk-engine", eng(PC, free_bytes=20 * GB), ERROR, "up to 30 GB", "docker image prune"),
    ("disk-engine", eng(PC, free_bytes=20 * GB, has_image=True), OK, "the image is built", ""),
    ("disk-engine", eng(LAPTOP, free_bytes=20 * GB), OK, "would take up to", ""),
    ("disk-engine", eng(PC, free_bytes=None), SKIPPED, "not on this host", ""),
    ("disk-engine", replace(PC, engine=DOWN), SKIPPED, "no engine", ""),
    ("disk-engine", NO_TARGET, SKIPPED, "no target", ""),
    ("disk-results", PC, OK, "100 GB free", ""),
    (
        "disk-results",
        pro(PC, results=Folder("/r", True, True, 0, 10)),
        WARNING,
        "0 GB",
        "--results",
    ),
    ("results", PC, OK, "can be written", ""),
    ("results", pro(PC, results=Folder("/r", False, True, 0, GB)), OK, "can be made", ""),
    ("results", pro(PC, results=Folder("/r", True, False, 0, GB)), ERROR, "user 0", "chown -R"),
    (
        "results",
        pro(PC, results=Folder("/my runs; x", True, False, 0, GB)),
        ERROR,
        "user 0",
        "$(id -g) '/my runs; x';",
    ),
    ("data", PC, OK, "complete in /home/me/data", ""),
    ("data", pro(PC, data=(DataState("mnist", "missing"),)), NOTE, "not here: mnist", "data fetch"),
    (
        "data",
        pro(PC, data=(DataState("mnist", "corrupt"), DataState("cifar10", "missing"))),
        ERROR,
        "mnist",
        "data verify mnist --repair",
    ),
    ("data", pro(PC, data=SLOW), NOTE, "in time: a set is being hashed?", "data verify"),
    ("data", pro(PC, data=CLOSED, data_root="/my d"), ERROR, "'/d/mnist'", "ls -la '/my d'"),
    ("data", pro(PC, data=Problem("a marker", "", "do it")), ERROR, "a marker", "do it"),
    ("cache", PC, OK, "1 of yours for desktop", ""),
    ("cache", eng(PC, volumes=()), NOTE, "compiles and tunes anew", "run once"),
    ("cache", replace(PC, engine=DOWN), SKIPPED, "no engine", ""),
    ("cache", NO_TARGET, SKIPPED, "no target", ""),
    ("pins", PC, OK, "is pinned", ""),
    ("pins", pro(PC, unresolved={"desktop": ("base",)}), WARNING, "desktop (base)", "images lock"),
    ("pins", pro(PC, unresolved={"jetson": ("base",)}), NOTE, "jetson (base)", "images lock"),
    ("lab-python", PC, OK, "Python 3.11.2 with torch 2.13.0+cu130", ""),
    ("lab-python", pro(PC, lab=None), NOTE, "no native environment yet", "--lab-python"),
    ("lab-python", pro(PC, lab=Lab("/v", "3.11", "2.13", False)), WARNING, "lost", "rm -r /v"),
    ("lab-python", pro(PC, lab=Lab("/v", "3.11", "2.1+cpu", True)), WARNING, "no CUDA", "rm -r"),
    ("lab-python", pro(PC, lab=Lab("/v w", "3", "2", False)), WARNING, "lost", "rm -r '/v w';"),
    ("lab-python", pro(PC, lab=Lab("/v w", "3", "+cpu", True)), WARNING, "CUDA", "rm -r '/v w';"),
    ("lab-python", pro(LAPTOP, lab=Lab("/v", "3.11", "2.1+cpu", True)), OK, "2.1+cpu", ""),
    ("memory", PC, OK, "32.0 GiB memory", ""),
    ("memory", JETSON, OK, "30.0 GiB memory", ""),
    ("memory", replace(PC, memory=Memory(0, 0)), SKIPPED, "does not say", ""),
    ("memory", replace(PC, memory=Memory(32 * GIB, GIB)), WARNING, "1.0 GiB are free", "end"),
    # An 8 GB board shows less than 8 GiB, and is enough; a 4 GB one with a swap file, too.
    ("memory", replace(JETSON, memory=Memory(int(7.2 * GIB), 6 * GIB)), OK, "7.2 GiB", ""),
    ("memory", replace(JETSON, memory=Memory(4 * GIB, 3 * GIB)), WARNING, "not enough", "swapon"),
    (
        "memory",
        replace(JETSON, memory=Memory(4 * GIB, 3 * GIB, (Swap("/swap", 8 * GIB, False),))),
        OK,
        "8.0 GiB swap on disk",
        "",
    ),
    (
        "memory",
        replace(JETSON, memory=Memory(4 * GIB, 3 * GIB, (Swap("/dev/zram0", 4 * GIB, True),))),
        WARNING,
        "not enough",
        "swapon",
    ),
    (
        "memory",
        replace(JETSON, memory=Memory(30 * GIB, 28 * GIB, (Swap("/dev/zram0", GIB, True),))),
        NOTE,
        "1.0 GiB swap in memory (zram)",
        "nvzramconfig",
    ),
    ("device-access", LAPTOP, SKIPPED, "no device file", ""),
    ("device-access", PC, OK, "/dev/nvidia0", ""),
    (
        "device-access",
        replace(JETSON, devices=(DeviceFile("/dev/nvmap", "video", False),)),
        WARNING,
        "/dev/nvmap",
        "usermod -aG video",
    ),
    (
        "device-access",
        replace(JETSON, devices=(DeviceFile("/dev/nvmap", "root", False),)),
        WARNING,
        "/dev/nvmap",
        "/etc/udev/rules.d",
    ),
    (
        "device-access",
        replace(PC, devices=(DeviceFile("/dev/nvidia0", "0", False),)),
        WARNING,
        "/dev/nvidia0",
        "NVreg_DeviceFileGID",
    ),
    ("power-mode", PC, SKIPPED, "not a Jetson", ""),
    ("power-mode", JETSON, OK, "MAXN", ""),
    (
        "power-mode",
        replace(JETSON, board=Board("NV Power Mode: 15W 2")),
        NOTE,
        "15W",
        "nvpmodel -p --verbose",
    ),
    ("power-mode", replace(JETSON, board=Board(None)), WARNING, "does not say", "nvpmodel -q"),
    ("gpu-clocks", LAPTOP, SKIPPED, "no NVIDIA GPU", ""),
    ("gpu-clocks", JETSON, OK, "held at 1377 MHz", ""),
    ("gpu-clocks", replace(JETSON, board=Board("MAXN")), SKIPPED, "does not show", ""),
    (
        "gpu-clocks",
        replace(JETSON, board=Board("MAXN", (114750000, 1377000000))),
        WARNING,
        "between 115 and 1377 MHz",
        "sudo jetson_clocks",
    ),
    ("gpu-clocks", PC, NOTE, "does not say whether", "nvidia-smi -lgc"),
    (
        "gpu-clocks",
        replace(PC, gpus=(GpuState("A100", True, False),)),
        NOTE,
        "persistence mode is off for A100",
        "nvidia-smi -pm 1",
    ),
    ("governor", PC, OK, "performance", ""),
    ("governor", replace(PC, processor=Processor()), SKIPPED, "no frequency governor", ""),
    (
        "governor",
        replace(PC, processor=Processor(("performance", "schedutil"))),
        WARNING,
        "schedutil",
        "scaling_governor",
    ),
    ("smt", PC, OK, "one thread", ""),
    ("smt", JETSON, SKIPPED, "does not say", ""),
    ("smt", replace(PC, processor=Processor(smt=True)), NOTE, "two threads", "smt/control"),
    ("turbo", PC, OK, "off", ""),
    ("turbo", JETSON, SKIPPED, "does not say", ""),
    ("turbo", replace(PC, processor=Processor(turbo=True)), NOTE, "first seconds", "no_turbo"),
    ("energy-gpu", LAPTOP, SKIPPED, "no NVIDIA card", ""),
    ("energy-gpu", JETSON, SKIPPED, "no NVIDIA card", ""),
    ("energy-gpu", PC, OK, "counts the energy of RTX 3090", ""),
    (
        "energy-gpu",
        replace(PC, gpus=(GpuState("GTX 1080", False, True),)),
        WARNING,
        "no energy for GTX 1080",
        "power, read and integrated",
    ),
    ("energy-board", PC, SKIPPED, "not a Jetson", ""),
    ("energy-board", JETSON, OK, "readable: GPU, CPU", ""),
    ("energy-board", replace(JETSON, board=Board("MAXN")), WARNING, "no power monitor", "ina3221"),
    (
        "energy-board",
        replace(JETSON, board=Board("MAXN", None, (Sensor("VDD_IN", "/sys/r", False),))),
        WARNING,
        "may not read VDD_IN",
        "chmod a+r /sys/r",
    ),
    ("energy-cpu", JETSON, SKIPPED, "no energy counter", ""),
    ("energy-cpu", PC, OK, "readable: package-0", ""),
    (
        "energy-cpu",
        replace(PC, counters=(Sensor("package-0", "/sys/p", False),)),
        WARNING,
        "may not read package-0",
        "chmod a+r /sys/p",
    ),
    (
        "energy-cpu",
        replace(PC, counters=(Sensor("package-0", "/sys/a b", False),)),
        WARNING,
        "may not read package-0",
        "chmod a+r '/sys/a b' after",
    ),
]


def finding(name: str, situation: Situation) -> Finding:
    (check,) = (check for check in CHECKS if check.id == name)
    return check.examine(situation)


@pytest.mark.parametrize(
    ("name", "situation", "severity", "says", "remedy"),
    CASES,
    ids=[
        f"{name}-{severity.value}-{number}" for number, (name, _, severity, *_) in enumerate(CASES)
    ],
)
def test_a_check_finds(
    name: str, situation: Situation, severity: Severity, says: str, remedy: str
) -> None:
    found = finding(name, situation)

    assert found.severity is severity
    assert says in found.finding
    assert remedy in found.remedy
    assert bool(found.remedy) is bool(remedy)


def test_every_check_has_a_good_and_a_bad_case() -> None:
    good = {name for name, _, severity, *_ in CASES if severity in (OK, NOTE)}
    bad = {name for name, _, severity, *_ in CASES if severity in (ERROR, WARNING, NOTE)}

    assert good == bad == {check.id for check in CHECKS}


def test_an_error_or_a_warning_always_has_a_remedy() -> None:
    for _, situation, *_ in CASES:
        for answer in examine(situation):
            if answer.found.severity in (ERROR, WARNING):
                assert answer.found.remedy, answer


def test_nobody_is_told_to_join_the_group_of_root() -> None:
    mixed = (DeviceFile("/dev/nvmap", "video", False), DeviceFile("/dev/nvhost-gpu", "root", False))
    remedy = finding("device-access", replace(JETSON, devices=mixed)).remedy

    assert "usermod -aG video $USER, then log in again\n/dev/nvhost-gpu: KERNEL==" in remedy
    for devices, situation in ((mixed, JETSON), (mixed[1:], JETSON), (mixed[1:], PC)):
        told = finding("device-access", replace(situation, devices=devices)).remedy
        assert "-aG root" not in told
        assert ",root" not in told


def test_no_power_mode_is_advised_by_its_number() -> None:
    """Mode 0 is MAXN on an AGX Xavier, and 15 W with two cores on a Xavier NX."""
    bounded = replace(JETSON, board=Board("NV Power Mode: MODE_15W_6CORE 2"))
    texts = [finding("power-mode", bounded).remedy]
    texts += [check.mend for check in CHECKS if check.id == "power-mode"]

    assert len(texts) == 2
    for text in texts:
        assert "sudo nvpmodel -p --verbose" in text
        assert re.search(r"-m\s*\d", text) is None


def test_no_advice_ends_others_containers_or_needs_an_engine_by_ssh() -> None:
    slow = finding("engine", replace(PC, engine=SLOW))
    network = finding("socket", replace(PC, socket=Socket("tcp://a:2375", False, None)))
    (socket,) = (check for check in CHECKS if check.id == "socket")

    assert "restart" not in slow.remedy
    assert "ssh" not in network.remedy
    assert "ssh" not in socket.mend


@pytest.mark.parametrize(
    "situation", [PC, JETSON, LAPTOP, ORIN], ids=["pc", "jetson", "laptop", "orin"]
)
def test_where_nothing_is_wrong_nothing_is_found(situation: Situation) -> None:
    answers = examine(situation)

    assert [a for a in answers if a.found.severity in (ERROR, WARNING)] == []
    assert exit_code(answers) == ExitCode.OK


def test_only_an_error_changes_the_exit_code() -> None:
    warned = replace(PC, processor=Processor(("powersave",)))
    failed = replace(PC, engine=DOWN)

    assert exit_code(examine(warned)) == ExitCode.OK
    assert exit_code(examine(failed)) == ExitCode.HOST_UNFIT


def test_a_situation_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PC.engine = ENGINE  # type: ignore[misc]
