"""The energy of a processor: the counters of its power limiter (RAPL), of Intel and AMD alike.

    <root>/sys/class/powercap/intel-rapl:N/{name,energy_uj,max_energy_range_uj}  package-N, psys
    <root>/sys/class/powercap/intel-rapl:N:M/…                                   core, uncore, dram

`core` and `uncore` are parts of their package; `dram` is beside it. `psys` is the whole platform
and is no sum's part. The kernel lets only root read them since 2020, for they betray secrets.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Tuple

from narrowgauge_lab.measure.energy.counter import CounterSource
from narrowgauge_lab.measure.energy.source import (
    Clock,
    EnergyError,
    EnergyMissingError,
    Rail,
    Total,
)

__all__ = ["Zone", "open_rapl", "zones"]

_ZONES = "sys/class/powercap"
_ZONE_NAME = re.compile(r"intel-rapl:(\d+)(?::(\d+))?$")
_PARTS = {
    "package": ("cpu",), "core": ("cpu cores",), "uncore": ("integrated gpu",), "dram": ("memory",),
    "psys": ("platform",),
}  # fmt: skip


@dataclass(frozen=True)
class Zone:
    """One counter. `name` is the kernel's, behind its package's where it lies inside one."""

    name: str
    folder: Path
    range_j: float

    @property
    def kind(self) -> str:
        """`package`, `core`, `uncore`, `dram` or `psys`."""
        return self.name.rpartition("/")[2].partition("-")[0]

    def joules(self) -> float:
        """Raises EnergyError where it went away, or is not a number."""
        return _microjoules(self.folder / "energy_uj") / 1e6


def zones(root: Path) -> Tuple[Zone, ...]:
    """Every counter below `root` that this user may read. Raises EnergyMissingError otherwise."""
    folder = root / _ZONES
    listed = sorted(
        (match.group(1), match.group(2) or "", path)
        for path in folder.glob("intel-rapl:*")
        for match in [_ZONE_NAME.search(path.name)]
        if match is not None
    )
    if not listed:
        raise EnergyMissingError(
            "no energy counter (RAPL) of this processor is shown",
            why=f"{folder} has no intel-rapl:*: most virtual machines hide it",
            next_step="measure without energy, or on the host itself",
        )
    names: Dict[str, str] = {}
    found: List[Zone] = []
    for package, inner, path in listed:
        try:
            name = (path / "name").read_text(encoding="ascii", errors="replace").strip()
            if inner:
                name = f"{names[package]}/{name}"
            else:
                names[package] = name
            zone = Zone(name, path, _microjoules(path / "max_energy_range_uj") / 1e6)
            zone.joules()
        except (OSError, EnergyError, KeyError) as error:
            raise _not_readable(path, error) from error
        found.append(zone)
    return tuple(found)


def open_rapl(root: Path, clock: Clock) -> CounterSource:
    """The counters as a source. Raises EnergyMissingError; EnergyError where they stand."""
    found = zones(root)
    counted = tuple(zone.name for zone in found if zone.kind in ("package", "dram"))
    if not any(zone.kind == "package" for zone in found):
        total = Total("none", (), "no counter of a whole processor package is shown")
    else:
        total = Total(
            "sum", counted, "processor packages, and the memory where it is counted beside them"
        )

    def read() -> Dict[str, float]:
        return {zone.name: zone.joules() for zone in found}

    return CounterSource(
        "rapl",
        tuple(
            Rail(zone.name, _PARTS.get(zone.kind, ()), "the kernel's powercap", str(zone.folder))
            for zone in found
        ),
        total,
        read,
        clock=clock,
        quantum_j=1e-6,
        ranges={zone.name: zone.range_j for zone in found},
        caveat="the whole processor's: other processes on this machine draw from it too",
    )


def _microjoules(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise EnergyError(f"{path} cannot be read", why=error.strerror or str(error)) from error
    if re.fullmatch(r"\d{1,20}", text) is None:
        raise EnergyError(f"{path} is not a number", why=f"it says {text[:40]!r}")
    return int(text)


def _not_readable(path: Path, error: Exception) -> EnergyMissingError:
    """Why, and the way out: in a container there is none but to leave it."""
    if os.path.islink(str(path)) and not path.exists():
        return EnergyMissingError(
            "the container engine hides the processor's energy counters",
            why=f"{path} leads nowhere: engines mask /sys/devices/virtual/powercap since 2023",
            next_step="run with --executor native, after sudo chmod a+r"
            " /sys/class/powercap/intel-rapl:*/energy_uj on the host",
        )
    what = error.what if isinstance(error, EnergyError) else str(error)
    why = error.why if isinstance(error, EnergyError) else type(error).__name__
    return EnergyMissingError(
        "the processor's energy counters cannot be read",
        why=f"{what}: {why}",
        next_step="the kernel lets only root read them since 2020; on a host of your own: sudo"
        " chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj, after each start",
    )
