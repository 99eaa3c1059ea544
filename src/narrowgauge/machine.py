"""The host as the launcher sees it: what it has (to pick a target), and what a record says of it.

Everything is read from files below `root` (tests give their own) and, where a driver is loaded,
from NVML. What is not there, or not readable, is None; nothing is guessed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge_contract.record import MachineFacts

__all__ = [
    "ARCHITECTURES",
    "ROOT",
    "Gpu",
    "Host",
    "ask_power_mode",
    "has_driver",
    "machine_facts",
    "probe_host",
]

ROOT = Path("/")
#: What kernels and images call a processor → what Docker does.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64", "amd64": "amd64"}
#: A PC's loaded NVIDIA driver shows one of these.
_LOADED_SIGNS = ("proc/driver/nvidia/version", "dev/nvidiactl")
#: Without one of these NVML is not even loaded. WSL's device is there with any maker's GPU.
_DRIVER_SIGNS = (*_LOADED_SIGNS, "dev/dxg")
#: A Jetson's system on chip, as its device tree names it, and its GPU's compute capability. NVML,
#: which would say it, is not there before JetPack 6.
_TEGRA = {
    "tegra210": "5.3",
    "tegra186": "6.2",
    "tegra194": "7.2",
    "tegra234": "8.7",
    "tegra264": "11.0",
}
_NVIDIA_VENDOR = "0x10de"
#: The beginning of a PCI class: display controllers, compute cards among them.
_DISPLAY_CLASS = "0x03"
_POWER_MODE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. `capability` as `8.6`; memory in bytes, None where it is the host's; clocks
    in MHz."""

    name: str
    capability: str
    memory_bytes: int | None
    clocks_mhz: dict[str, int]


@dataclass(frozen=True)
class Host:
    """What a target is picked by. `architecture` as Docker calls it; `l4t` as `35.2.1`; `soc` as a
    Jetson's device tree names it (`tegra194`)."""

    architecture: str
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    l4t: str | None = None
    device_groups: tuple[str, ...] = ()
    #: What the NVIDIA driver said instead of answering, where there is one.
    driver_problem: str | None = None
    soc: str | None = None

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpus) or self.l4t is not None

    @property
    def capabilities(self) -> tuple[tuple[str, str], ...]:
        """Each GPU's name and compute capability; a Jetson's by its chip where NVML is silent."""
        if self.gpus or self.l4t is None or self.soc not in _TEGRA:
            return tuple((gpu.name, gpu.capability) for gpu in self.gpus)
        return ((f"the {self.soc}", _TEGRA[self.soc]),)

    @property
    def broken_driver(self) -> bool:
        """Whether NVIDIA devices are here that no run could use."""
        return self.driver_problem is not None and not self.has_gpu

    def describe(self) -> str:
        """One phrase for messages: `amd64 with NVIDIA H200 (9.0)`."""
        if self.l4t is not None:
            chip = f" ({self.soc})" if self.soc else ""
            return f"{self.architecture}, Jetson{chip} with L4T {self.l4t}"
        if self.broken_driver:
            return f"{self.architecture} without an NVIDIA driver that answers"
        if not self.gpus:
            return f"{self.architecture} without an NVIDIA GPU"
        names = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in self.gpus)
        return f"{self.architecture} with {names}, driver {self.driver}"


def probe_host(root: Path = ROOT, machine: str | None = None, *, nvml: bool = True) -> Host:
    """Look at the host. Costs a few file look-ups where there is no NVIDIA driver.

    `nvml` False asks the files only, where NVML is known to hang.
    """
    machine = platform.machine() if machine is None else machine
    gpus, driver, problem = _nvml(root) if nvml else ((), None, None)
    return Host(
        architecture=ARCHITECTURES.get(machine, machine),
        gpus=gpus,
        driver=driver,
        l4t=_l4t(root),
        device_groups=_device_groups(root),
        driver_problem=problem or (None if gpus else _card_without_driver(root)),
        soc=_soc(root),
    )


def has_driver(root: Path = ROOT) -> bool:
    """Whether a loaded NVIDIA driver shows itself. A few file look-ups."""
    return any((root / sign).exists() for sign in _DRIVER_SIGNS)


def machine_facts(
    root: Path = ROOT, *, docker: str | None = None, power_mode: str | None = None
) -> MachineFacts:
    """What a record says of the host. `docker` is the engine's version where one ran the job."""
    gpus, driver, _ = _nvml(root)
    return MachineFacts(
        kernel=platform.release(),
        machine=platform.machine(),
        system=_system(root),
        cpu=_cpu(root),
        cpu_count=os.cpu_count() or 1,
        memory_bytes=_memory(root),
        docker=docker,
        driver=driver,
        l4t=_l4t_line(root),
        power_mode=power_mode if power_mode is not None else ask_power_mode(root),
        clocks=_clocks(root, gpus),
        gpus=tuple(
            {"name": gpu.name, "capability": gpu.capability, "memory_bytes": gpu.memory_bytes}
            for gpu in gpus
        ),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _l4t_line(root: Path) -> str | None:
    text = _read(root / "etc/nv_tegra_release")
    return text.splitlines()[0].strip() if text and text.strip() else None


def _l4t(root: Path) -> str | None:
    """`# R35 (release), REVISION: 2.1, …` → `35.2.1`."""
    match = re.match(r"#\s*R(\d+).*?REVISION:\s*([\d.]+)", _l4t_line(root) or "")
    return f"{match[1]}.{match[2]}" if match else None


def _soc(root: Path) -> str | None:
    match = re.search(r"nvidia,(tegra\d+)", _read(root / "proc/device-tree/compatible") or "")
    return match[1] if match else None


def _card_without_driver(root: Path) -> str | None:
    """An NVIDIA card that the PCI bus shows while no driver does: not a host without a GPU."""
    if has_driver(root):
        return None
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if (_read(folder / "vendor") or "").strip() != _NVIDIA_VENDOR:
            continue
        if (_read(folder / "class") or "").startswith(_DISPLAY_CLASS):
            return f"there is an NVIDIA card (PCI {folder.name}), but no driver is loaded"
    return None


def _system(root: Path) -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)"?', _read(root / "etc/os-release") or "", re.M)
    return match[1] if match else platform.system()


def _cpu(root: Path) -> str:
    text = _read(root / "proc/cpuinfo") or ""
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.M)
    if match:
        return match[1].strip()
    # arm64 kernels give numbers only; the device tree names the board.
    board = _read(root / "proc/device-tree/model")
    part = re.search(r"^CPU part\s*:\s*(\S+)$", text, re.M)
    words = [board.strip("\0\n ") if board else "", f"CPU part {part[1]}" if part else ""]
    return " ".join(filter(None, words)) or platform.machine()


def _memory(root: Path) -> int:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo") or "", re.M)
    return int(match[1]) * 1024 if match else 0


def _clocks(root: Path, gpus: tuple[Gpu, ...]) -> dict[str, Any]:
    """The CPU's governor and limits, and each GPU's clocks, as they are now."""
    folder = root / "sys/devices/system/cpu/cpu0/cpufreq"
    clocks: dict[str, Any] = {}
    for name in ("scaling_governor", "scaling_min_freq", "scaling_max_freq"):
        text = _read(folder / name)
        if text and text.strip():
            word = text.strip()
            clocks[f"cpu_{name}"] = int(word) * 1000 if word.isdigit() else word
    for position, gpu in enumerate(gpus):
        for name, value in gpu.clocks_mhz.items():
            clocks[f"gpu{position}_{name}_mhz"] = value
    return clocks


def ask_power_mode(root: Path) -> str | None:
    """`nvpmodel -q` on a Jetson: the mode's name and number on one line."""
    if _l4t_line(root) is None:
        return None
    try:
        done = subprocess.run(
            ["nvpmodel", "-q"],
            capture_output=True,
            text=True,
            timeout=_POWER_MODE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return " ".join(lines) if done.returncode == 0 and lines else None


def _device_groups(root: Path) -> tuple[str, ...]:
    """The groups that own a Jetson's device files; root's files need none."""
    groups = set()
    for name in ("dev/nvmap", "dev/nvhost-ctrl", "dev/dri/renderD128"):
        try:
            groups.add((root / name).stat().st_gid)
        except OSError:
            continue
    return tuple(str(group) for group in sorted(groups - {0}))


def _nvml(root: Path) -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """The GPUs, the driver's version, and what NVML said where it should answer and does not.

    Nothing of it where there is no driver. A loaded one without the NVML library, or without a GPU,
    is a problem; a Jetson before JetPack 6 has no NVML, and WSL shows its device for any GPU.
    """
    if not has_driver(root):
        return (), None, None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return (), None, _if_loaded(root, "its library libnvidia-ml.so.1 is not here")
    except pynvml.NVMLError as error:
        return (), None, str(error)
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        gpus = tuple(_gpu(pynvml, handle) for handle in handles)
        problem = None if gpus else _if_loaded(root, "it shows no GPU")
        return gpus, str(pynvml.nvmlSystemGetDriverVersion()), problem
    except pynvml.NVMLError as error:
        return (), None, str(error)
    finally:
        pynvml.nvmlShutdown()


def _if_loaded(root: Path, what: str) -> str | None:
    """`what` is wrong with a driver that is loaded; None where there need not be one."""
    loaded = any((root / sign).exists() for sign in _LOADED_SIGNS)
    return f"an NVIDIA driver is loaded, but {what}" if loaded and _l4t(root) is None else None


def _gpu(nvml: Any, handle: Any) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    clocks = {}
    for name, kind in (("sm", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM)):
        try:
            clocks[f"{name}_limit"] = int(nvml.nvmlDeviceGetMaxClockInfo(handle, kind))
            clocks[name] = int(nvml.nvmlDeviceGetClockInfo(handle, kind))
        except nvml.NVMLError:
            continue
    try:
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        memory = None  # an Orin's and a GB10's NVML do not support it; under MIG it may be denied
    return Gpu(
        name=str(nvml.nvmlDeviceGetName(handle)),
        capability=f"{major}.{minor}",
        memory_bytes=memory,
        clocks_mhz=clocks,
    )
