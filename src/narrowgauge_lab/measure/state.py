"""What a device's clocks were doing around a measurement, and whether anything held them back.

Read before and after, never during: reading disturbs. What happened in between shows in counters
that only rise: for how long heat held a card down, how often a processor was throttled, how often a
board's supply gave in. A window with such a fault is measured again, and then the row is INVALID.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

import torch

from narrowgauge_lab import turns
from narrowgauge_lab.measure.nvml import (
    CUDA_LIBRARY,
    FAULT_REASONS,
    NVML_LIBRARY,
    Card,
    Nvml,
    NvmlError,
    bus_id,
    reason_names,
)

__all__ = ["HostState", "Roots", "faults_between", "read_state", "steadily"]

_CPUS = "sys/devices/system/cpu"
#: What a Jetson's GPU is called in sys/class/devfreq, after the address; Thor's has several.
_GPU_DEVFREQ = re.compile(r"(?:gm20b|gp10b|gv11b|ga10b|gpu|gpu-gpc-\d+)$")
#: Cooling devices that cool by holding a clock down; a fan does not.
_CLOCK_COOLING = re.compile(r"cpu|gpu|gm20b|gp10b|gv11b|ga10b", re.IGNORECASE)
_GPU_ZONE = re.compile(r"gpu", re.IGNORECASE)
_POWER_MODEL = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>")
_NVPMODEL_TIMEOUT_S = 5.0
#: Heat may hold a card down for moments that no figure shows; from this share of a window on it
#: counts.
_HOT_SHARE = 0.01

T = TypeVar("T")


@dataclass(frozen=True)
class Roots:
    """Where things are looked for; tests give their own. `nvpmodel` is a command."""

    root: Path = Path("/")
    nvml: str = NVML_LIBRARY
    cuda: str = CUDA_LIBRARY
    nvpmodel: str = "nvpmodel"


@dataclass(frozen=True)
class HostState:
    """One look. None: not there, or not readable, and `unread` says why where something refused.

    `at` is a monotonic clock's seconds. `throttle` has NVML's names for what holds the clocks.
    `thermal_seconds`, `cpu_throttles` and `supply_events` only ever rise. `gpu_processes`: how many
    others compute on the GPU. `cooling`: how far each of a board's cooling devices holds a clock
    down now, in its own steps. `unread` has "throttle counters" where nothing that only rises can
    be read: then what came and went between two looks is not known.
    """

    at: float
    sm_clock_mhz: Optional[float] = None
    memory_clock_mhz: Optional[float] = None
    temperature_c: Optional[float] = None
    power_w: Optional[float] = None
    power_limit_w: Optional[float] = None
    throttle: Tuple[str, ...] = ()
    thermal_seconds: Optional[float] = None
    persistence: Optional[bool] = None
    gpu_processes: Optional[int] = None
    power_mode: Optional[str] = None
    supply_events: Optional[int] = None
    governor: Optional[str] = None
    cpu_mhz: Tuple[float, ...] = ()
    cpu_throttles: Optional[int] = None
    load_average: Optional[float] = None
    cooling: Dict[str, int] = field(default_factory=dict)
    unread: Tuple[str, ...] = ()

    def to_fact(self) -> Dict[str, Any]:
        """What is known, as JSON has it."""
        known = {name: value for name, value in asdict(self).items() if value not in (None, (), {})}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in known.items()}


def read_state(device: torch.device, roots: Roots = Roots()) -> HostState:
    """Look at what `device` is, and at the processor that feeds it. Never raises for what is not
    there; costs some ms, and on a Jetson a process (`nvpmodel -q`)."""
    state = _processor(HostState(at=time.monotonic()), roots.root)
    frequency = _board_clock(roots.root)
    if frequency is not None:
        state = _board(replace(state, sm_clock_mhz=frequency), roots)
    elif device.type == "cuda":
        state = _card(state, device, roots)
    heat = state.cpu_throttles if device.type == "cpu" else None
    if (heat, state.thermal_seconds, state.supply_events) == (None, None, None):
        return replace(state, unread=(*state.unread, "throttle counters"))
    return state


def faults_between(before: HostState, after: HostState, device: torch.device) -> Tuple[str, ...]:
    """Why what was measured between two looks must not be used; empty where nothing was wrong.

    A power cap, an idle clock and sync boost are how a card is set up: recorded, and no fault.
    """
    found = sorted(FAULT_REASONS.intersection(before.throttle + after.throttle))
    hot = _risen(before.thermal_seconds, after.thermal_seconds)
    if hot > _HOT_SHARE * (after.at - before.at):
        found.append(f"heat held the clocks down for {hot:.3g} s")
    dips = _risen(before.supply_events, after.supply_events)
    if dips > 0:
        found.append(f"the supply gave in {dips:.0f} times (over-current or under-voltage)")
    for name, now in after.cooling.items():
        was = before.cooling.get(name, now)
        if now > was:
            found.append(f"cooling held the clocks down ({name} from {was} to {now})")
    throttles = _risen(before.cpu_throttles, after.cpu_throttles)
    # A card's work is measured on the card; its host's heat shows in its own samples.
    if device.type == "cpu" and throttles > 0:
        found.append(f"the processor was throttled {throttles:.0f} times for its heat")
    return tuple(found)


def steadily(
    ctx: Any,
    measure: Callable[[], T],
    device: torch.device,
    attempts: int = 3,
    read: Callable[[torch.device], HostState] = read_state,
    prefix: str = "",
) -> T:
    """What `measure` gives in a window without a fault; else the last one's, and an INVALID row.

    `measure` synchronises the device before it returns, and records nothing itself: what a fault
    spoilt is dropped here. Facts `state_before` and `state_after` are those of the window that
    counts; `windows_discarded` counts the others. `prefix` stands before each of these names, where
    a row measures more than once.
    """
    assert attempts >= 1
    discarded: List[Tuple[str, ...]] = []
    first: Optional[HostState] = None
    while True:
        with turns.alone():
            before = read(device)
            first = first or before
            value = measure()
            after = read(device)
        # What began to cool in a window that was discarded may go on all through the next.
        faults = faults_between(replace(before, cooling=first.cooling), after, device)
        if not faults or len(discarded) + 1 == attempts:
            break
        discarded.append(faults)
        ctx.log(f"a window is measured again: {'; '.join(faults)}")
    ctx.fact(f"{prefix}state_before", before.to_fact())
    ctx.fact(f"{prefix}state_after", after.to_fact())
    ctx.fact(f"{prefix}windows_discarded", len(discarded))
    if faults:
        ctx.invalid(f"the device was held back in each of {attempts} windows: {'; '.join(faults)}")
    return value


def _risen(before: Optional[float], after: Optional[float]) -> float:
    """How far a counter has risen; 0 where it was not read at both ends."""
    return 0.0 if before is None or after is None else after - before


def _processor(state: HostState, root: Path) -> HostState:
    folders = sorted((root / _CPUS).glob("cpu[0-9]*/cpufreq"))
    governors = {word for word in (_read(f / "scaling_governor") for f in folders) if word}
    clocks = [_number(folder / "scaling_cur_freq") for folder in folders]
    counts = [
        _number(path)
        for name in ("core_throttle_count", "package_throttle_count")
        for path in sorted((root / _CPUS).glob(f"cpu[0-9]*/thermal_throttle/{name}"))
    ]
    known = [count for count in counts if count is not None]
    load = re.match(r"[\d.]+", _read(root / "proc/loadavg") or "")
    return replace(
        state,
        governor=", ".join(sorted(governors)) or None,
        cpu_mhz=tuple(clock / 1e3 for clock in clocks if clock is not None),
        cpu_throttles=sum(known) if known else None,
        load_average=float(load.group()) if load else None,
    )


def _board_clock(root: Path) -> Optional[float]:
    """A Jetson's GPU clock in MHz; None where the kernel shows no such GPU."""
    for folder in sorted((root / "sys/class/devfreq").glob("*")):
        frequency = _number(folder / "cur_freq") if _GPU_DEVFREQ.search(folder.name) else None
        if frequency is not None:
            return frequency / 1e6
    return None


# unverified: oc*_event_cnt, nvpmodel's status file | no Jetson at hand | read both on an Orin
def _board(state: HostState, roots: Roots) -> HostState:
    """A Jetson: NVML says nothing there, the kernel's files do."""
    events = [
        count
        for path in sorted((roots.root / "sys/class/hwmon").glob("hwmon*/oc[0-9]*_event_cnt"))
        for count in [_number(path)]
        if count is not None
    ]
    temperature = None
    for zone in sorted((roots.root / "sys/class/thermal").glob("thermal_zone*")):
        if _GPU_ZONE.search(_read(zone / "type") or ""):
            temperature = _number(zone / "temp")
            break
    memory = _number(roots.root / "sys/kernel/debug/bpmp/debug/clk/emc/rate")
    return replace(
        state,
        temperature_c=None if temperature is None else temperature / 1e3,
        memory_clock_mhz=None if memory is None else memory / 1e6,
        supply_events=sum(events) if events else None,
        cooling=_cooling(roots.root),
        power_mode=_power_mode(roots),
    )


# unverified: GPU and CPU cooling_device*/cur_state | no Jetson at hand | heat an Orin and read them
def _cooling(root: Path) -> Dict[str, int]:
    found = {}
    for device in sorted((root / "sys/class/thermal").glob("cooling_device*")):
        kind, steps = _read(device / "type") or "", _number(device / "cur_state")
        if steps is not None and _CLOCK_COOLING.search(kind):
            found[f"{device.name} {kind}"] = steps
    return found


def _power_mode(roots: Roots) -> Optional[str]:
    """As `nvpmodel -q` prints it, on one line. A container has no such command, and may have been
    given its files; else only the launcher knows it, and its record says so."""
    try:
        done = subprocess.run(
            [roots.nvpmodel, "-q"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_NVPMODEL_TIMEOUT_S,
            check=False,
        )
        if done.returncode == 0 and done.stdout.strip():
            return " ".join(done.stdout.split())
    except (OSError, subprocess.TimeoutExpired):
        pass  # the files may say it
    mode = re.search(r"pmode:(\d+)", _read(roots.root / "var/lib/nvpmodel/status") or "")
    if mode is None:
        return None
    number = int(mode.group(1))
    names = _POWER_MODEL.findall(_read(roots.root / "etc/nvpmodel.conf") or "")
    name = {int(key): word for key, word in names}.get(number)
    return f"NV Power Mode: {name} {number}" if name else f"NV Power Mode: {number}"


def _card(state: HostState, device: torch.device, roots: Roots) -> HostState:
    """An NVIDIA card, by NVML. What it does not say is None, and why is in `unread`."""
    try:
        with Nvml(roots.nvml) as handle:
            return _look(state, handle.card(bus_id(device, roots.cuda)))
    except NvmlError as error:
        return replace(state, unread=(*state.unread, str(error)))


def _look(state: HostState, card: Card) -> HostState:
    refusals: List[str] = []

    def ask(question: Callable[[], T]) -> Optional[T]:
        try:
            return question()
        except NvmlError as error:
            refusals.append(str(error))
            return None

    # First what a moment of idling changes.
    reasons = ask(card.event_reasons)
    clock, memory = ask(card.sm_clock_mhz), ask(card.memory_clock_mhz)
    power, limit = ask(card.power_mw), ask(card.power_limit_mw)
    heat = ask(card.thermal_violation_ns)
    return replace(
        state,
        sm_clock_mhz=clock,
        memory_clock_mhz=memory,
        temperature_c=ask(card.temperature_c),
        power_w=None if power is None else power / 1e3,
        power_limit_w=None if limit is None else limit / 1e3,
        throttle=() if reasons is None else reason_names(reasons),
        thermal_seconds=None if heat is None else heat / 1e9,
        persistence=ask(card.persistence),
        gpu_processes=_others(ask(card.processes)),
        unread=(*state.unread, *refusals),
    )


def _others(processes: Optional[List[int]]) -> Optional[int]:
    """How many processes are not this one. None where this one is not among those listed: in a
    container the numbers are the host's, so it cannot be told which is ours."""
    if processes is None or os.getpid() not in processes:
        return None
    return len(processes) - 1


def _read(path: Path) -> Optional[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> Optional[int]:
    text = _read(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None
