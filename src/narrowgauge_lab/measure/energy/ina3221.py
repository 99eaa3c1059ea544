"""A Jetson's power rails, from the files that the kernel makes for its INA3221 monitors.

    <root>/sys/bus/i2c/drivers/ina3221*/<bus>-<address>/
        hwmon/hwmon*/inN_label, inN_input (mV), currN_input (mA)         JetPack 5 and later
        iio:device*/rail_name_N, in_powerN_input (mW)                    JetPack 4

A monitor has three channels. On one that is not connected NC stands for the rail's name, and what
the kernel numbers beyond the third are shunt voltages and their sum, which are no rails.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from narrowgauge_lab.measure.energy.boards import describe_rail, total_of
from narrowgauge_lab.measure.energy.sampled import SampledSource, ThreadTicker
from narrowgauge_lab.measure.energy.source import Clock, EnergyError, EnergyMissingError

__all__ = ["Channel", "channels", "open_ina3221"]

_DRIVERS = "sys/bus/i2c/drivers"
_CHANNELS = 3
#: A reading goes over the I2C bus and costs the processor some 0.1 ms a value, so not much oftener.
# unverified: an INA3221's bus time a value | no Jetson at hand | a row's seconds_per_reading there
_INTERVAL_S = 0.01
#: What the chip can show: a bus of 32.76 V, and a shunt voltage of 163.8 mV over 1 mΩ or more.
_MOST_MILLIVOLTS = 32_760
_MOST_MILLIAMPERES = 163_800
_MOST_MILLIWATTS = _MOST_MILLIVOLTS * _MOST_MILLIAMPERES // 1000
#: The chip's steps of the shunt voltage, in V.
_SHUNT_STEP_V = 40e-6
_WHOLE_NUMBER = re.compile(r"[+-]?\d{1,10}")


@dataclass(frozen=True)
class Channel:
    """One rail of one monitor. `rail` is the kernel's word for it; `power` is a file in mW, or
    `voltage` and `current` are in mV and mA. `monitor` is `1-0040`."""

    rail: str
    monitor: str
    power: Optional[Path] = None
    voltage: Optional[Path] = None
    current: Optional[Path] = None
    shunt: Optional[Path] = None

    def watts(self) -> float:
        """Now. Raises EnergyError where a file went away, cannot be read, or is not a number."""
        if self.power is not None:
            return _number(self.power, -_MOST_MILLIWATTS, _MOST_MILLIWATTS) / 1e3
        assert self.voltage is not None
        assert self.current is not None
        millivolts = _number(self.voltage, 0, _MOST_MILLIVOLTS)
        milliamperes = _number(self.current, -_MOST_MILLIAMPERES, _MOST_MILLIAMPERES)
        return millivolts * milliamperes / 1e6

    def step_watts(self) -> float:
        """The smallest difference it can show: the chip's, or the file's where the kernel does not
        say how large the shunt is."""
        if self.shunt is None or self.voltage is None:
            return 1e-3
        microohms = _number(self.shunt, 1, 10**9)
        volts = _number(self.voltage, 0, _MOST_MILLIVOLTS) / 1e3
        return max(1e-3, _SHUNT_STEP_V / (microohms * 1e-6)) * volts


def channels(root: Path) -> Tuple[Channel, ...]:
    """Every connected rail below `root`, in the order of monitors and channels. Raises EnergyError
    for a label that is there and cannot be read."""
    found: List[Channel] = []
    for monitor in sorted((root / _DRIVERS).glob("ina3221*/*-*")):
        found += [*_hwmon(monitor), *_iio(monitor)]
    counts = Counter(channel.rail for channel in found)
    # Two rails of one name are told apart by their monitors; the name stays in front.
    return tuple(
        replace(channel, rail=f"{channel.rail}@{channel.monitor}")
        if counts[channel.rail] > 1
        else channel
        for channel in found
    )


def open_ina3221(
    root: Path,
    clock: Clock,
    *,
    interval_s: float = _INTERVAL_S,
    ticker: Optional[Callable[[], ThreadTicker]] = None,
) -> SampledSource:
    """The rails as a source. Raises EnergyMissingError where there are none, or not for us."""
    try:
        found = channels(root)
        steps = {channel.rail: channel.step_watts() for channel in found}
        for channel in found:
            channel.watts()
    except EnergyError as error:
        raise EnergyMissingError(
            "the power rails of this board cannot be read", why=f"{error.what}: {error.why}",
            next_step="sudo chmod a+r the files of /sys/bus/i2c/drivers/ina3221*/*/ that it needs",
        ) from error  # fmt: skip
    if not found:
        raise EnergyMissingError(
            "no power monitor (INA3221) shows a rail",
            why=f"looked for {root / _DRIVERS}/ina3221*",
            next_step="some carrier boards have none; then measure without energy",
        )
    names = [channel.rail for channel in found]

    def read() -> Dict[str, float]:
        return {channel.rail: channel.watts() for channel in found}

    return SampledSource(
        "ina3221",
        tuple(describe_rail(c.rail, names, f"ina3221 {c.monitor}") for c in found),
        total_of(names),
        read,
        clock=clock,
        interval_s=interval_s,
        quanta_w=steps,
        period_s=_own_period(root),
        ticker=ticker() if ticker is not None else None,
    )


def _hwmon(monitor: Path) -> Iterator[Channel]:
    for folder in sorted(monitor.glob("hwmon/hwmon*")):
        for number in range(1, _CHANNELS + 1):
            label = folder / f"in{number}_label"
            name = _name(label)
            if name is None or _says(folder / f"in{number}_enable", "0"):
                continue
            shunt = folder / f"shunt{number}_resistor"
            yield Channel(
                name,
                monitor.name,
                voltage=folder / f"in{number}_input",
                current=folder / f"curr{number}_input",
                shunt=shunt if shunt.exists() else None,
            )


def _iio(monitor: Path) -> Iterator[Channel]:
    for folder in sorted(monitor.glob("iio:device*")):
        for number in range(_CHANNELS):
            name = _name(folder / f"rail_name_{number}")
            if name is None:
                continue
            yield Channel(name, monitor.name, power=folder / f"in_power{number}_input")


def _name(label: Path) -> Optional[str]:
    """A rail's name; None where there is no such channel, or nothing is connected to it."""
    if not label.exists():
        return None
    name = _text(label)
    return None if not name or "NC" in name or "sum of shunt" in name.lower() else name


def _own_period(root: Path) -> float:
    """How long the slowest monitor takes for a new reading, in seconds, where the kernel says."""
    found = [0.0]
    for path in (root / _DRIVERS).glob("ina3221*/*-*/hwmon/hwmon*/update_interval"):
        try:
            found.append(_number(path, 0, 10**6) / 1e3)
        except EnergyError:
            continue  # not every kernel answers; our own interval stands then
    return max(found)


def _says(path: Path, word: str) -> bool:
    return path.exists() and _text(path) == word


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip().strip("\0")
    except OSError as error:
        raise EnergyError(f"{path} cannot be read", why=error.strerror or str(error)) from error


def _number(path: Path, least: int, most: int) -> int:
    text = _text(path)
    if _WHOLE_NUMBER.fullmatch(text) is None or not text.isascii():
        raise EnergyError(f"{path} is not a number", why=f"it says {text[:40]!r}")
    value = int(text)
    if not least <= value <= most:
        raise EnergyError(
            f"{path} says what the monitor cannot show", why=f"{value} is not {least} to {most}"
        )
    return value
