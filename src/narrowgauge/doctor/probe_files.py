"""What the kernel's files say, below a root that tests give themselves."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from narrowgauge.doctor.situation import (
    Board,
    DeviceFile,
    Memory,
    Processor,
    Sensor,
    Swap,
    User,
)
from narrowgauge.machine import Host

__all__ = [
    "board",
    "counters",
    "devices",
    "in_group",
    "memory",
    "permits",
    "processor",
    "rails",
    "read",
    "this_user",
]

_CPUS = "sys/devices/system/cpu"
#: What a Jetson's GPU is called in /sys/class/devfreq, after the address; Thor's has several.
_GPU_DEVFREQ = re.compile(r"(?:gm20b|gp10b|gv11b|ga10b|gpu|gpu-gpc-\d+)$")
_JETSON_DEVICES = ("dev/nvmap", "dev/nvhost-ctrl", "dev/nvhost-gpu", "dev/nvgpu/igpu0/ctrl")
_PC_DEVICES = ("dev/nvidiactl", "dev/nvidia0", "dev/nvidia-uvm")
#: Of an INA3221 seven channels have a label; the seventh is a sum of shunt voltages.
_LAST_RAIL = 6
#: A control group of version 1 without a limit shows a number near 2^63.
_NO_LIMIT = 1 << 60


def this_user() -> User:
    return User(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))


def read(path: Path) -> str | None:
    """A file's text without white space around it; None where it is not there or not for us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def permits(path: Path, user: User, wanted: int) -> bool:
    """Whether `user` may read (4) and write (2) a file, by its owner, group and mode."""
    try:
        status = path.stat()
    except OSError:
        return False
    if user.uid == 0:
        return True
    if status.st_uid == user.uid:
        bits = status.st_mode >> 6
    elif status.st_gid in user.groups:
        bits = status.st_mode >> 3
    else:
        bits = status.st_mode
    return bits & wanted == wanted


def processor(root: Path) -> Processor:
    found = {read(path) for path in (root / _CPUS).glob("cpu[0-9]*/cpufreq/scaling_governor")}
    smt = read(root / _CPUS / "smt/active")
    no_turbo = read(root / _CPUS / "intel_pstate/no_turbo")
    boost = read(root / _CPUS / "cpufreq/boost")
    turbo = no_turbo == "0" if no_turbo is not None else boost == "1" if boost else None
    return Processor(
        governors=tuple(sorted(filter(None, found))),
        smt=smt == "1" if smt in ("0", "1") else None,
        turbo=turbo,
    )


def memory(root: Path) -> Memory:
    numbers = dict(re.findall(r"^(\w+):\s+(\d+) kB", read(root / "proc/meminfo") or "", flags=re.M))
    swaps = []
    for line in (read(root / "proc/swaps") or "").splitlines()[1:]:
        name, _, size, *_ = line.split()
        swaps.append(Swap(name, int(size) * 1024, "zram" in name))
    return Memory(
        total=int(numbers.get("MemTotal", 0)) * 1024,
        available=int(numbers.get("MemAvailable", 0)) * 1024,
        swaps=tuple(swaps),
        limit=_memory_limit(root),
    )


def board(root: Path, power_mode: str | None, user: User) -> Board:
    """The Jetson below `root`. `power_mode` is what nvpmodel said."""
    return Board(power_mode, _gpu_clock(root), rails(root, user))


def rails(root: Path, user: User) -> tuple[Sensor, ...]:
    """The power rails by the names the board gives them; a channel called NC is not connected."""
    found = []
    for folder in sorted((root / "sys/bus/i2c/drivers").glob("ina3221*/*")):
        for label, values in (*_hwmon_rails(folder), *_iio_rails(folder)):
            name = read(label)
            if name and "NC" not in name:
                readable = all(permits(path, user, 4) for path in values)
                found.append(Sensor(name, str(values[0]), readable))
    return tuple(found)


def counters(root: Path, user: User) -> tuple[Sensor, ...]:
    """The processor's energy counters (RAPL), of Intel and AMD alike."""
    found = []
    for folder in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        path = folder / "energy_uj"
        if path.exists():
            name = read(folder / "name") or folder.name
            found.append(Sensor(name, str(path), permits(path, user, 4)))
    return tuple(found)


def devices(root: Path, host: Host, user: User) -> tuple[DeviceFile, ...]:
    """The device files that CUDA opens here; none without a GPU."""
    if not host.has_gpu:
        return ()
    names = _JETSON_DEVICES if host.l4t is not None else _PC_DEVICES
    found = []
    for path in (root / name for name in names):
        try:
            gid = path.stat().st_gid
        except OSError:
            continue
        group = _groups(root).get(gid, str(gid))
        found.append(DeviceFile(str(path), group, permits(path, user, 6)))
    return tuple(found)


def in_group(root: Path, name: str, user: User) -> bool:
    return any(_groups(root).get(gid) == name for gid in user.groups)


def socket_mode(path: Path) -> int | None:
    """A unix socket's permission bits; None where it is not there."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None


def _groups(root: Path) -> dict[int, str]:
    lines = (read(root / "etc/group") or "").splitlines()
    fields = [line.split(":") for line in lines]
    return {int(parts[2]): parts[0] for parts in fields if len(parts) > 2 and parts[2].isdigit()}


def _gpu_clock(root: Path) -> tuple[int, int] | None:
    """The least and the most that the GPU may run at now; equal where its clock is locked."""
    for folder in sorted((root / "sys/class/devfreq").glob("*")):
        if not _GPU_DEVFREQ.search(folder.name):
            continue
        least, most = read(folder / "min_freq"), read(folder / "max_freq")
        if least and most and least.isdigit() and most.isdigit():
            return int(least), int(most)
    return None


def _hwmon_rails(folder: Path) -> Iterator[tuple[Path, tuple[Path, ...]]]:
    """JetPack 5 and later: a label, a voltage and a current for each channel."""
    for label in sorted(folder.glob("hwmon/hwmon*/in*_label")):
        number = label.name.removeprefix("in").removesuffix("_label")
        if number.isdigit() and int(number) <= _LAST_RAIL:
            place = label.parent
            yield label, (place / f"in{number}_input", place / f"curr{number}_input")


def _iio_rails(folder: Path) -> Iterator[tuple[Path, tuple[Path, ...]]]:
    """JetPack 4: a name and a power for each channel."""
    for label in sorted(folder.glob("iio:device*/rail_name_*")):
        number = label.name.removeprefix("rail_name_")
        yield label, (label.parent / f"in_power{number}_input",)


def _memory_limit(root: Path) -> int | None:
    """The bound on this process, in bytes: the least of its control group's and its parents'."""
    found = []
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        number, kinds, place = line.split(":", 2)
        if number == "0":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in kinds.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        below = PurePosixPath(place.lstrip("/"))
        texts = [read(base / group / name) for group in (below, *below.parents)]
        found += [int(text) for text in texts if text and text.isdigit()]
    return min((limit for limit in found if limit < _NO_LIMIT), default=None)
