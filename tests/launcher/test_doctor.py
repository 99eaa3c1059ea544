"""The doctor's probes on fake roots and a fake engine, what it prints, and a true run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from doctor_cases import PC
from fake_engine import HANGS_S, VERSION, fake_engine

from narrowgauge.checkout import Checkout
from narrowgauge.cli.app import run_program
from narrowgauge.doctor import probe, probe_files
from narrowgauge.doctor.findings import Severity
from narrowgauge.doctor.probe import Surroundings, gather, gpu_states
from narrowgauge.doctor.report import CHECKS, Answer, examine, explain, json_text, table
from narrowgauge.doctor.situation import Engine, Problem, Sensor, Situation, Socket, User
from narrowgauge.errors import ExitCode, UnknownNameError
from narrowgauge.machine import Gpu

ROOT = Path(__file__).parents[2]
ME = User(1000, frozenset({1000, 44}))
NOBODY = User(4711, frozenset({4711}))
#: What the doctor calls its patience, for all, for docker and where there is a GPU.
PATIENCE = ("_PATIENCE_S", "_PATIENCE_DOCKER_S", "_PATIENCE_GPU_S")
#: Every check, in the order of the JSON document.
IDS = """
target architecture l4t capability driver
engine engine-api client gpu-runtime default-runtime docker-group socket rootless cgroup-memory
disk-engine disk-results results data cache pins lab-python
memory device-access power-mode gpu-clocks governor smt turbo energy-gpu energy-board energy-cpu
"""
INFO = {
    "Runtimes": {"runc": {}},
    "DefaultRuntime": "runc",
    "DockerRootDir": "/",
    "MemoryLimit": True,
    "SwapLimit": True,
    "SecurityOptions": ["name=seccomp,profile=default"],
}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMORY = "MemTotal:       {0} kB\nMemFree: 1 kB\nMemAvailable:   {0} kB\n"
INA = "sys/bus/i2c/drivers/ina3221x/1-0040"

XAVIER = {
    "etc/nv_tegra_release": "# R35 (release), REVISION: 2.1, GCID: 32413640, BOARD: t186ref\n",
    "etc/group": "root:x:0:\nvideo:x:44:me\n",
    "proc/device-tree/compatible": "nvidia,galen\0nvidia,jetson-xavier\0nvidia,tegra194\0",
    "proc/meminfo": MEMORY.format(31 << 20),
    "proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 1048576 0 5\n",
    "dev/nvmap": "",
    "dev/nvhost-ctrl": "",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "schedutil\n",
    "sys/class/devfreq/15340000.vic/min_freq": "1\n",
    "sys/class/devfreq/15340000.vic/max_freq": "2\n",
    "sys/class/devfreq/17000000.gv11b/min_freq": "114750000\n",
    "sys/class/devfreq/17000000.gv11b/max_freq": "1377000000\n",
    f"{INA}/hwmon/hwmon3/in1_label": "GPU\n",
    f"{INA}/hwmon/hwmon3/in1_input": "19000\n",
    f"{INA}/hwmon/hwmon3/curr1_input": "100\n",
    f"{INA}/hwmon/hwmon3/in2_label": "NC\n",
    f"{INA}/hwmon/hwmon3/in2_input": "0\n",
    f"{INA}/hwmon/hwmon3/curr2_input": "0\n",
    f"{INA}/hwmon/hwmon3/in7_label": "Sum of shunt voltages\n",
    f"{INA}/hwmon/hwmon3/in7_input": "0\n",
}

ORIN = {
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n",
    "proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0",
    "proc/meminfo": MEMORY.format(30 << 20),
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/class/devfreq/17000000.gpu/min_freq": "1300500000\n",
    "sys/class/devfreq/17000000.gpu/max_freq": "1300500000\n",
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4/in1_label": "VDD_GPU_SOC\n",
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4/in1_input": "1\n",
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4/curr1_input": "1\n",
    "sys/bus/i2c/drivers/ina3221/1-0041/hwmon/hwmon5/in2_label": "VDDQ_VDD2_1V8AO\n",
    "sys/bus/i2c/drivers/ina3221/1-0041/hwmon/hwmon5/in2_input": "1\n",
    "sys/bus/i2c/drivers/ina3221/1-0041/hwmon/hwmon5/curr2_input": "1\n",
}

DESKTOP = {
    "dev/nvidiactl": "",
    "dev/nvidia0": "",
    "proc/meminfo": MEMORY.format(64 << 20),
    "proc/self/cgroup": "0::/user.slice\n",
    "sys/fs/cgroup/user.slice/memory.max": "max\n",
    "sys/devices/system/cpu/smt/active": "1\n",
    "sys/devices/system/cpu/intel_pstate/no_turbo": "0\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    "sys/class/powercap/intel-rapl:0/name": "package-0\n",
    "sys/class/powercap/intel-rapl:0/energy_uj": "123\n",
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, only what never answers is late."""
    for name in PATIENCE:
        monkeypatch.setattr(probe, name, 120.0)


class Here:
    """Gathers on a fake root, with a fake engine where one is given."""

    def __init__(self, checkout: Path, root: Path) -> None:
        self.checkout, self.root = checkout, root

    def __call__(
        self,
        files: dict[str, str],
        *,
        machine: str = "x86_64",
        env: dict[str, str] | None = None,
        on: str | None = None,
        user: User = ME,
        patience: float | None = None,
    ) -> Situation:
        where = Surroundings(
            checkout=Checkout(self.checkout),
            env={"PATH": "", "DOCKER_HOST": "unix:///nonexistent/docker.sock", **(env or {})},
            data_root=self.root / "data",
            root=tree(self.root, files),
            machine=machine,
            user=user,
            patience_s=patience,
        )
        return gather(where, on)


@pytest.fixture
def here(tiny_checkout: Path, tmp_path: Path) -> Here:
    return Here(tiny_checkout, tmp_path / "root")


def severities(situation: Situation) -> dict[str, str]:
    return {a.check.id: a.found.severity.value for a in examine(situation)}


def answer(situation: Situation, name: str) -> Answer:
    return next(each for each in examine(situation) if each.check.id == name)


def test_a_laptop_without_anything(here: Here) -> None:
    here.root.mkdir()
    situation = here({})

    assert situation.target is not None
    assert situation.target.name == "cpu"
    assert isinstance(situation.engine, Problem)
    assert isinstance(situation.build_tool, Problem)
    found = severities(situation)
    failed = {name for name, severity in found.items() if severity == "error"}
    assert failed == {"engine", "client"}
    assert found["power-mode"] == found["energy-gpu"] == found["driver"] == "skipped"


def test_a_xavier_on_r35(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ask_power_mode", lambda root: "NV Power Mode: MODE_15W 2")
    situation = here(XAVIER, machine="aarch64")

    assert situation.target is not None
    assert situation.target.name == "jetson"
    assert situation.board is not None
    assert situation.board.gpu_clock == (114750000, 1377000000)
    rail = str(here.root / INA / "hwmon/hwmon3/in1_input")
    assert situation.board.rails == (Sensor("GPU", rail, True),)
    found = severities(situation)
    assert found["capability"] == found["l4t"] == "ok"
    assert found["gpu-clocks"] == found["governor"] == "warning"
    assert found["memory"] == found["power-mode"] == "note"
    assert "MODE_15W" in answer(situation, "power-mode").found.finding
    assert "(1.0 GiB" not in answer(situation, "memory").found.finding
    assert "1.0 GiB swap in memory (zram)" in answer(situation, "memory").found.finding


def test_an_orin_on_r36_with_its_clocks_held(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ask_power_mode", lambda root: "NV Power Mode: MAXN 0")
    situation = here(ORIN, machine="aarch64")

    assert situation.target is not None
    assert situation.target.name == "jetson-next"
    assert situation.board is not None
    assert [rail.name for rail in situation.board.rails] == ["VDD_GPU_SOC", "VDDQ_VDD2_1V8AO"]
    found = severities(situation)
    assert found["gpu-clocks"] == found["governor"] == found["power-mode"] == "ok"
    assert found["capability"] == found["energy-board"] == "ok"


def test_a_xavier_on_jetpack_4_is_told_what_to_flash(here: Here) -> None:
    old = {**XAVIER, "etc/nv_tegra_release": "# R32 (release), REVISION: 7.1, GCID: 1\n"}
    situation = here(old, machine="aarch64")

    assert situation.target is not None
    assert situation.target.name == "jetson"
    assert situation.refused is not None
    assert "flash JetPack 5.1" in answer(situation, "l4t").found.remedy
    assert "flash JetPack 5.1" in answer(situation, "target").found.remedy


class Nvml:
    """One card. `energy` False is a card before Volta, or a slice of one."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818 - pynvml's name
        pass

    def __init__(self, capability: tuple[int, int], driver: str, energy: bool = True) -> None:
        self.capability, self.driver, self.energy = capability, driver, energy

    def nvmlInit(self) -> None: ...  # noqa: N802 - pynvml's names, here and below

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.driver

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA RTX"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return self.capability

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        raise self.NVMLError

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        raise self.NVMLError

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        if not self.energy:
            raise self.NVMLError("Not Supported")
        return 0  # a counter that has just begun is a counter

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:  # noqa: N802
        return 0


def test_a_desktop_with_a_card(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml((8, 6), "580.65.06"))  # type: ignore[arg-type]
    situation = here(DESKTOP)

    assert situation.host.gpus == (Gpu("NVIDIA RTX", "8.6", None, {}),)
    assert situation.target is not None
    assert situation.target.name == "desktop"
    found = severities(situation)
    assert found["driver"] == found["capability"] == found["energy-gpu"] == "ok"
    assert found["smt"] == found["turbo"] == found["gpu-clocks"] == "note"
    assert found["governor"] == "warning"
    assert situation.memory.limit is None
    assert "persistence mode is off" in answer(situation, "gpu-clocks").found.finding


def test_a_driver_that_is_too_old_is_held_against_the_target_that_would_fit(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml((8, 9), "470.82"))  # type: ignore[arg-type]
    situation = here(DESKTOP)

    assert situation.target is not None
    assert situation.target.name == "desktop-next"
    assert situation.refused is not None
    assert "to 580 or newer" in answer(situation, "driver").found.remedy
    assert answer(situation, "capability").found.severity is Severity.OK


def test_a_gb10_is_not_held_against_a_target_for_jetsons(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml((12, 1), "580.95"))  # type: ignore[arg-type]
    situation = here(DESKTOP, machine="aarch64")
    named = here(DESKTOP, machine="aarch64", on="jetson")

    assert situation.target is not None
    assert situation.target.name == "desktop-next"
    assert severities(situation)["architecture"] == "error"
    assert "compiled for 7.2" not in answer(named, "capability").found.finding
    assert severities(named)["capability"] == "skipped"


def test_the_cpu_that_was_asked_for_needs_no_driver(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Nvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise self.NVMLError("version mismatch")

    monkeypatch.setitem(sys.modules, "pynvml", Broken((8, 6), "1"))  # type: ignore[arg-type]
    asked, card = here(DESKTOP, on="cpu"), here(DESKTOP, on="desktop")

    assert severities(asked)["driver"] == "warning"
    assert severities(asked)["target"] == "ok"
    assert severities(card)["driver"] == severities(card)["target"] == "error"
    assert "version mismatch" in answer(card, "target").found.finding
    assert severities(here(DESKTOP))["driver"] == "error"


def test_what_nvml_does_not_count_is_not_counted() -> None:
    assert [state.energy for state in gpu_states(Nvml((6, 1), "580.1", energy=False))] == [False]
    assert [state.energy for state in gpu_states(Nvml((7, 0), "580.1"))] == [True]


def test_nvml_that_hangs_is_a_driver_with_a_problem(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    class Hangs(Nvml):
        def nvmlInit(self) -> None:  # noqa: N802
            over.wait(HANGS_S)

    monkeypatch.setitem(sys.modules, "pynvml", Hangs((8, 6), "1"))  # type: ignore[arg-type]
    began = time.monotonic()
    try:
        situation = here(DESKTOP, patience=0.5)
    finally:
        over.set()

    assert time.monotonic() - began < HANGS_S / 2
    assert situation.host.driver_problem == "NVML did not answer in time"
    assert answer(situation, "driver").found.severity is Severity.ERROR
    assert answer(situation, "target").found.severity is Severity.ERROR


def test_a_named_target_is_what_is_checked(here: Here) -> None:
    here.root.mkdir()
    situation = here({}, on="desktop-next")

    assert situation.target is not None
    assert situation.target.name == "desktop-next"
    assert "shows none" in answer(situation, "target").found.finding
    with pytest.raises(UnknownNameError, match="dekstop"):
        here({}, on="dekstop")


def answers_of(info: dict[str, Any], *images: str) -> dict[str, tuple[int, Any]]:
    volumes = [{"Name": "narrowgauge-cache-cpu-0123456789ab-1000"}]
    volumes.append({"Name": "narrowgauge-cache-cpu-0123456789ab-1"})
    found: dict[str, tuple[int, Any]] = {
        "GET /info": (200, info),
        "GET /volumes": (200, {"Volumes": volumes}),
        "GET /images/.*/json": (404, {"message": "No such image"}),
    }
    for image in images:
        found = {f"GET /images/{image}/json": (200, {"Id": "sha256:1"}), **found}
    return found


def test_an_engine_is_described_by_its_answers(here: Here, tmp_path: Path) -> None:
    info = {
        **INFO,
        "Runtimes": {"runc": {}, "nvidia": {}},
        "DefaultRuntime": "nvidia",
        "SwapLimit": False,
        "SecurityOptions": ["name=seccomp,profile=default", "name=rootless"],
    }
    here.root.mkdir()
    with fake_engine(tmp_path, answers_of(info, "narrowgauge/cpu:local")) as engine:
        engine.path.chmod(0o666)
        situation = here({}, env=engine.env)

    found = situation.engine
    assert isinstance(found, Engine)
    assert (found.api, found.architecture) == ("1.41", "amd64")
    assert found.facts.runtimes == ("nvidia", "runc")
    assert (found.default_runtime, found.rootless, found.limits_swap) == ("nvidia", True, False)
    assert found.has_image
    assert found.volumes == ("narrowgauge-cache-cpu-0123456789ab-1000",)  # another user's is not
    assert (found.folder, found.free_bytes is not None) == ("/", True)
    told = severities(situation)
    assert told["rootless"] == told["socket"] == "warning"
    assert told["cgroup-memory"] == "note"
    assert told["cache"] == told["engine"] == "ok"


def test_an_engine_that_remaps_users_is_seen(here: Here, tmp_path: Path) -> None:
    here.root.mkdir()
    info = {**INFO, "SecurityOptions": ["name=seccomp,profile=default", "name=userns"]}
    with fake_engine(tmp_path, answers_of(info)) as engine:
        situation = here({}, env=engine.env)

    found = situation.engine
    assert isinstance(found, Engine)
    assert (found.remaps, found.rootless) == (True, False)
    assert "remaps users" in answer(situation, "rootless").found.finding


def test_a_socket_that_is_not_there_is_not_called_safe(here: Here) -> None:
    here.root.mkdir()
    assert answer(here({}), "socket").found.severity is Severity.SKIPPED


@pytest.mark.parametrize("certificates", [(), ("ca.pem", "cert.pem", "key.pem")])
def test_a_context_is_reached_as_it_says(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificates: tuple[str, ...]
) -> None:
    """Nothing listens there; the check is of the address alone."""
    number = hashlib.sha256(b"far").hexdigest()
    address = "tcp://127.0.0.1:9"
    meta = {"Name": "far", "Metadata": {}, "Endpoints": {"docker": {"Host": address}}}
    files = {
        ".docker/config.json": json.dumps({"currentContext": "far"}),
        f".docker/contexts/meta/{number}/meta.json": json.dumps(meta),
    }
    tls = f".docker/contexts/tls/{number}/docker"
    tree(tmp_path / "home", {**files, **{f"{tls}/{name}": "" for name in certificates}})
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    here.root.mkdir()
    situation = here({}, env={"DOCKER_HOST": ""})

    assert situation.socket == Socket(address, bool(certificates), None)
    wanted = Severity.OK if certificates else Severity.WARNING
    assert answer(situation, "socket").found.severity is wanted


def test_a_data_folder_that_cannot_be_read_is_not_being_hashed(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shut(root: Path) -> None:
        raise PermissionError(13, "Permission denied", str(root))

    here.root.mkdir()
    monkeypatch.setattr(probe, "_data", shut)
    found = answer(here({}), "data").found

    assert found.severity is Severity.ERROR
    assert "Permission denied" in found.finding
    assert "hashed" not in found.finding


def test_an_engine_that_is_too_old_is_said_once(here: Here, tmp_path: Path) -> None:
    here.root.mkdir()
    old = {**VERSION, "Version": "19.03.15", "ApiVersion": "1.40"}
    with fake_engine(tmp_path, {"GET /version": (200, old)}) as engine:
        situation = here({}, env=engine.env)

    found = severities(situation)
    assert (found["engine"], found["engine-api"]) == ("ok", "error")
    assert "19.03.15" in answer(situation, "engine-api").found.finding


def test_an_engine_that_hangs_is_not_waited_for(here: Here, tmp_path: Path) -> None:
    """It accepts, and never answers."""
    here.root.mkdir()
    with fake_engine(tmp_path, {"GET /version": (200, None)}) as engine:
        began = time.monotonic()
        situation = here({}, env=engine.env, patience=0.5)
        took = time.monotonic() - began

    assert took < HANGS_S / 2
    assert "in time" in answer(situation, "engine").found.finding
    assert answer(situation, "engine").found.severity is Severity.WARNING


def test_a_slow_engine_is_not_a_dead_one(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than all else is waited for; and nothing waits once it has answered."""
    ask = probe._engine
    monkeypatch.setattr(probe, "_PATIENCE_S", 0.2)

    def slowly(*words: Any) -> Engine:
        time.sleep(0.5)
        return ask(*words)

    monkeypatch.setattr(probe, "_engine", slowly)
    command = tmp_path / "bin" / "docker"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\nexec sleep 0.5\n")
    command.chmod(0o755)
    here.root.mkdir()
    with fake_engine(tmp_path, answers_of(INFO)) as engine:
        began = time.monotonic()
        situation = here({}, env={**engine.env, "PATH": f"{command.parent}:/usr/bin:/bin"})
        took = time.monotonic() - began

    assert answer(situation, "engine").found.severity is Severity.OK
    assert answer(situation, "client").found.severity is Severity.OK
    assert took < probe._PATIENCE_DOCKER_S / 2


def test_a_docker_command_that_hangs_is_not_waited_for(here: Here, tmp_path: Path) -> None:
    """It ends only once the doctor has its findings."""
    command = tmp_path / "bin" / "docker"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\nuntil [ -e {tmp_path}/over ]; do sleep 0.05; done\n")
    command.chmod(0o755)
    here.root.mkdir()
    began = time.monotonic()
    situation = here({}, env={"PATH": f"{command.parent}:/usr/bin:/bin"}, patience=0.5)
    took = time.monotonic() - began
    (tmp_path / "over").touch()

    # A command that says nothing is ended after 30 s, and asked its version after that.
    assert took < 20
    assert "in time" in answer(situation, "client").found.finding


def test_an_unexpected_error_of_a_probe_is_not_swallowed(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(root: Path) -> None:
        raise ZeroDivisionError

    here.root.mkdir()
    monkeypatch.setattr(probe, "_data", broken)
    with pytest.raises(ZeroDivisionError):
        here({})


@pytest.mark.parametrize(
    ("mode", "user", "wanted", "may"),
    [
        (0o600, User(0, frozenset({0})), 6, True),
        (0o600, NOBODY, 4, False),
        (0o604, NOBODY, 4, True),
        (0o604, NOBODY, 6, False),
        (0o060, User(4711, frozenset({os.getgid()})), 6, True),
        (0o006, User(4711, frozenset({os.getgid()})), 4, False),  # the group's bits count alone
    ],
)
def test_who_may_read_and_write(
    tmp_path: Path, mode: int, user: User, wanted: int, may: bool
) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    try:
        assert probe_files.permits(path, user, wanted) is may
    finally:
        path.chmod(0o600)
    assert not probe_files.permits(tmp_path / "missing", User(0, frozenset()), 4)


def test_counters_and_rails_that_only_root_reads(here: Here) -> None:
    tree(here.root, {**DESKTOP, **XAVIER})
    counter = here.root / "sys/class/powercap/intel-rapl:0/energy_uj"
    counter.chmod(0o400)
    current = here.root / INA / "hwmon/hwmon3/curr1_input"
    current.chmod(0o400)

    assert probe_files.counters(here.root, NOBODY) == (Sensor("package-0", str(counter), False),)
    assert not any(rail.readable for rail in probe_files.rails(here.root, NOBODY))


def test_the_power_rails_of_jetpack_4(here: Here) -> None:
    place = "sys/bus/i2c/drivers/ina3221x/1-0040/iio:device0"
    root = tree(here.root, {f"{place}/rail_name_0": "VDD_IN\n", f"{place}/in_power0_input": "1\n"})

    assert [rail.name for rail in probe_files.rails(root, NOBODY)] == ["VDD_IN"]


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "1073741824\n"}, 1 << 30),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1073741824\n",
            },
            1 << 30,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,
        ),
        (  # version 2: a parent's bound holds for all below it
            {
                "proc/self/cgroup": "0::/user.slice/a/b\n",
                "sys/fs/cgroup/user.slice/memory.max": "1073741824\n",
                "sys/fs/cgroup/user.slice/a/memory.max": "4294967296\n",
                "sys/fs/cgroup/user.slice/a/b/memory.max": "max\n",
            },
            1 << 30,
        ),
        (  # in a container of version 1 the path is the host's, and the folder is the container's
            {
                "proc/self/cgroup": "4:memory:/docker/0123\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
            },
            1 << 30,
        ),
        ({}, None),
    ],
)
def test_the_memory_limit_of_this_process(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    assert probe_files.memory(tree(tmp_path, files)).limit == limit


@pytest.mark.parametrize("user", [ME, NOBODY])
def test_device_files_and_their_groups(here: Here, user: User) -> None:
    root = tree(here.root, XAVIER)
    (root / "dev/nvmap").chmod(0o600)
    (root / "dev/nvhost-ctrl").chmod(0o666)
    gid = (root / "dev/nvmap").stat().st_gid
    (root / "etc/group").write_text(f"video:x:{gid}:\ndocker:x:44:\n")
    from narrowgauge.machine import probe_host

    found = probe_files.devices(root, probe_host(root, "aarch64"), user)
    assert [(Path(d.path).name, d.group) for d in found] == [
        ("nvmap", "video"),
        ("nvhost-ctrl", "video"),
    ]
    assert [device.usable for device in found] == [user.uid == os.getuid(), True]
    assert probe_files.in_group(root, "docker", user) is (user is ME)


def test_the_results_folder_and_those_in_it(tmp_path: Path) -> None:
    inside = probe._results(tmp_path / "not" / "yet")
    assert (inside.exists, inside.writable) == (False, True)
    assert inside.path == str(tmp_path / "not" / "yet")
    (tmp_path / "file").touch()
    assert not probe._results(tmp_path / "file" / "results").writable


def test_a_data_set_that_lies_here_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-labels.u8").write_bytes(b"wrong")
    found = {state.name: state.state for state in probe._data(tmp_path)}

    assert found["mnist"] == "corrupt"
    assert found["cifar10"] == "missing"


def test_the_native_environment_is_known_by_its_stamp(tiny_checkout: Path) -> None:
    from narrowgauge.environment import STAMP_FILE, Stamp
    from narrowgauge_contract.codec import write_json_atomic

    assert probe._lab(Checkout(tiny_checkout)) is None
    folder = tiny_checkout / ".venv-lab"
    folder.mkdir()
    write_json_atomic(folder / STAMP_FILE, Stamp("torch", "3.11.2", "2.13.0", "0"))
    lab = probe._lab(Checkout(tiny_checkout))
    assert lab is not None
    assert (lab.torch, lab.starts) == ("2.13.0", False)
    (folder / STAMP_FILE).write_text("{")
    assert probe._lab(Checkout(tiny_checkout)) is None


def test_the_ids_and_the_json_document_are_stable() -> None:
    """Scripts read this: a change of a name here is a change for users."""
    document = json.loads(json_text(PC, examine(PC)))

    assert sorted(document) == ["checks", "counts", "format", "host", "target"]
    assert document["format"] == 1
    assert document["target"] == "desktop"
    assert sorted(document["counts"]) == ["error", "note", "ok", "skipped", "warning"]
    assert sum(document["counts"].values()) == len(CHECKS)
    assert all(list(e) == ["id", "severity", "finding", "remedy"] for e in document["checks"])
    assert [entry["id"] for entry in document["checks"]] == IDS.split()


def test_the_table_has_problems_first_and_every_check_once() -> None:
    import dataclasses

    sick = dataclasses.replace(PC, engine=Problem("down", "no socket\nat all", "start it"))
    lines = table(sick, examine(sick)).splitlines()
    words = [line.split()[0] for line in lines if line[:1].isalpha()][2:]

    assert lines[0].startswith("host:   amd64 with RTX 3090")
    assert lines[1] == "target: desktop"
    order = [severity.value for severity in Severity]
    assert words == sorted(words, key=order.index)
    assert len(words) == len(CHECKS)
    start = next(number for number, line in enumerate(lines) if line.startswith("error    engine"))
    assert [line.strip() for line in lines[start + 1 : start + 4]] == [
        "no socket",
        "at all",
        "-> start it",
    ]
    assert lines[-1].startswith("1 error, ")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_every_check_explains_itself(check: Any) -> None:
    text = explain(check.id)

    assert text.startswith(f"{check.id}: ")
    assert "To mend it: " in text
    assert all(len(line) <= 96 for line in text.splitlines())
    assert min(len(check.asks), len(check.why), len(check.mend)) > 10
    assert check.why.endswith(".")


def test_an_unknown_check_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as unknown:
        explain("drivr")

    assert unknown.value.nearest == "driver"


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")


@pytest.mark.usefixtures("no_engine")
def test_the_command_fails_where_a_run_would(
    tiny_checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "--json", "--project", str(tiny_checkout)]
    code = run_program(words, os.environ, sys.stderr)
    document = json.loads(capsys.readouterr().out)

    assert code == ExitCode.HOST_UNFIT
    broken = [entry["id"] for entry in document["checks"] if entry["severity"] == "error"]
    assert "engine" in broken


def test_explaining_asks_nothing_of_the_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "gather", lambda *_: 1 / 0)

    assert run_program(["doctor", "--explain", "governor"], os.environ, sys.stderr) == ExitCode.OK
    assert "scaling_governor" in capsys.readouterr().out
    assert run_program(["doctor", "--explain", "governr"], os.environ, sys.stderr) == ExitCode.USAGE


@pytest.mark.docker
def test_a_true_run_on_this_host() -> None:
    """The engine of this host, the checkout as it is; patient, since others may work here too."""
    patient = "; ".join(f"probe.{name} = 120.0" for name in PATIENCE)
    code = (
        f"import os, sys; from narrowgauge.doctor import probe; {patient}\n"
        "from narrowgauge.cli.app import run_program\n"
        "sys.exit(run_program(sys.argv[1:], os.environ, sys.stderr))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json", "--project", str(ROOT)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    document = json.loads(done.stdout)
    found = {entry["id"]: entry for entry in document["checks"]}

    assert done.returncode == (ExitCode.HOST_UNFIT if document["counts"]["error"] else 0)
    assert done.stderr == ""
    assert found["engine"]["severity"] == found["engine-api"]["severity"] == "ok"
