"""Energy of a call: idle first, then the call over windows of seconds, gross and net of idle.

Gross is all that the device drew from the beginning of a window until it was synchronised at its
end. Net is that without what it would have drawn idle. Both per call, in J.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch

from narrowgauge_lab import turns
from narrowgauge_lab.measure.energy.opening import HERE, Places, source_or_invalid
from narrowgauge_lab.measure.energy.replay import write_recording
from narrowgauge_lab.measure.energy.source import (
    REAL_CLOCK,
    Clock,
    Energy,
    EnergyError,
    NullSource,
    Source,
)
from narrowgauge_lab.measure.state import HostState, read_state, steadily

__all__ = [
    "LEAST_PERIODS",
    "LEAST_SECONDS",
    "EnergyPlan",
    "EnergyResult",
    "Meter",
    "Window",
    "measure_energy",
]

#: No window is shorter than either: of seconds, and of periods of the source. Where power is read,
#: it has as many readings too.
LEAST_SECONDS = 5.0
LEAST_PERIODS = 50
#: Calls are counted for so much more than the least, so that quicker ones still fill a window.
_MARGIN = 1.05
#: A window that came out too short is tried again, with more calls, so often in all.
_ATTEMPTS = 3
#: What the time of a call is estimated from.
_ESTIMATE_S = 0.1
#: A window that came out at less than this share of what was asked for is too short.
_NEAR = 0.9

Call = Callable[[], Any]


@dataclass(frozen=True)
class EnergyPlan:
    """`seconds`: a window's length, at least what LEAST_SECONDS and LEAST_PERIODS ask for.
    `windows`: how many, one sample each. `idle_seconds` likewise. `warm_up_seconds`: the call runs
    so long before the first window. `cool_down_seconds`: waited before the idle window."""

    seconds: float = 10.0
    windows: int = 1
    idle_seconds: float = LEAST_SECONDS
    warm_up_seconds: float = 2.0
    cool_down_seconds: float = 1.0


@dataclass(frozen=True)
class Window:
    """One window of `calls` calls; `energy` as the source gave it, `seconds` until synchronised."""

    calls: int
    energy: Energy

    @property
    def seconds(self) -> float:
        return self.energy.seconds - self.energy.tail_s

    def gross(self, rail: str, idle_watts: float) -> float:
        """J per call until the device was synchronised: what a counter's last step holds beyond
        that is taken off at idle power."""
        return (self.energy.joules[rail] - idle_watts * self.energy.tail_s) / self.calls

    def net(self, rail: str, idle_watts: float) -> float:
        """J per call above idle; it needs no such correction."""
        return (self.energy.joules[rail] - idle_watts * self.energy.seconds) / self.calls

    def to_fact(self) -> Dict[str, Any]:
        energy = self.energy
        fact: Dict[str, Any] = {
            "calls": self.calls,
            "seconds": self.seconds,
            "tail_s": energy.tail_s,
            "joules": dict(energy.joules),
            "coverage": energy.coverage,
            "resolution_j": energy.resolution_j,
        }
        if energy.sampling is not None:
            fact["sampler"] = energy.sampling.to_fact()
        return fact


@dataclass(frozen=True)
class EnergyResult:
    """What was measured. `idle_watts` by rail. `gross` and `net` are of the total, J per call, one
    for each window; None where these rails have no total, which `energy_total` explains."""

    idle: Energy
    windows: Tuple[Window, ...]
    gross: Optional[Tuple[float, ...]]
    net: Optional[Tuple[float, ...]]

    @property
    def idle_watts(self) -> Dict[str, float]:
        return _mean_watts(self.idle)


class Meter:
    """A source, a device and a clock, put together: idle windows, and windows of calls."""

    def __init__(self, source: Source, device: torch.device, clock: Clock = REAL_CLOCK) -> None:
        self.source = source
        self._device = device
        self._clock = clock

    @property
    def least_seconds(self) -> float:
        return max(LEAST_SECONDS, LEAST_PERIODS * self.source.period_s)

    def idle(self, seconds: float) -> Energy:
        """What is drawn while nothing runs. Raises EnergyError."""
        self._synchronize()
        self.source.begin()
        try:
            self._clock.sleep(max(seconds, self.least_seconds))
            return self._end()
        finally:
            self.source.abandon()

    def run(self, call: Call, calls: int) -> Window:
        """So many calls in one window, however long that takes. Raises EnergyError."""
        self._synchronize()
        self.source.begin()
        try:
            for _ in range(calls):
                call()
            # Work is queued: the window holds it only once the device has done it.
            self._synchronize()
            return Window(calls, self._end())
        finally:
            self.source.abandon()

    def measure(self, call: Call, plan: EnergyPlan) -> Tuple[Energy, Tuple[Window, ...]]:
        """The idle window and the plan's others. Raises EnergyError, and what the call raises."""
        with turns.alone():
            return self._measured(call, plan)

    def _measured(self, call: Call, plan: EnergyPlan) -> Tuple[Energy, Tuple[Window, ...]]:
        self._synchronize()
        self._clock.sleep(plan.cool_down_seconds)
        idle = self.idle(plan.idle_seconds)
        seconds = max(plan.seconds, self.least_seconds)
        per_call = self.warm_up(call, plan.warm_up_seconds)
        windows: List[Window] = []
        for _ in range(plan.windows):
            windows.append(self._long_enough(call, per_call, seconds))
            per_call = windows[-1].seconds / windows[-1].calls
        return idle, tuple(windows)

    def warm_up(self, call: Call, seconds: float) -> float:
        """Run the call for so long; the seconds that one takes at the end of it.

        What only the first call does, such as compiling, is no part of either.
        """
        self._time(call, 1)
        began = self._clock.now()
        calls = 1
        while True:
            took = self._time(call, calls)
            spent = self._clock.now() - began
            if took >= _ESTIMATE_S and spent >= seconds:
                return took / calls
            if took < _ESTIMATE_S:
                calls *= 2

    def _long_enough(self, call: Call, per_call: float, seconds: float) -> Window:
        least = max(self.least_seconds, _NEAR * seconds)
        calls = max(1, math.ceil(seconds * _MARGIN / per_call))
        for _ in range(_ATTEMPTS):
            window = self.run(call, calls)
            if window.seconds >= least:
                return window
            calls = math.ceil(calls * _MARGIN * seconds / window.seconds)
        raise EnergyError(
            f"{calls} calls do not fill a window of {least:g} s",
            why="each time they were quicker than the time before",
        )

    def _end(self) -> Energy:
        energy = self.source.end()
        if energy.sampling is not None and len(energy.sampling.times) < LEAST_PERIODS:
            raise EnergyError(
                f"power was read {len(energy.sampling.times)} times only in {energy.seconds:.1f} s",
                why=f"a window needs {LEAST_PERIODS} readings",
                next_step="leave a processor core free for the reading, or measure longer windows",
            )
        return energy

    def _time(self, call: Call, calls: int) -> float:
        self._synchronize()
        began = self._clock.now()
        for _ in range(calls):
            call()
        self._synchronize()
        return self._clock.now() - began

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_energy(
    ctx: Any,
    call: Call,
    device: torch.device,
    source: Union[str, Source, None],
    plan: EnergyPlan = EnergyPlan(),
    *,
    places: Places = HERE,
    clock: Clock = REAL_CLOCK,
    read: Callable[[torch.device], HostState] = read_state,
) -> Optional[EnergyResult]:
    """Measure what a call draws and record it in the row; None where nothing was measured.

    `source` is a name for `open_source`, which is then closed again; an open source, which is not;
    or None, what `source_or_invalid` gave for one that is absent. Where energy was asked for and
    not had, or the source failed on the way, the row is INVALID and says why; "none" asks for none.
    Where something held the device back, idle and windows are measured again, see `steadily`.
    Raises DeviceLostError.

    Metrics, one sample a window: `energy_gross` and `energy_net` (J per call; of the total, where
    there is one), the same with `_RAIL` behind them for each of several rails, and
    `energy_idle_power` (W). Facts: `energy_source`, `_caveat`, `_total`, `_rails`, `_period`,
    `_resolution`, `_coverage`, `_idle`, `_windows`, each with `energy` before it, and
    those of `steadily`, with `energy_`.
    """
    if isinstance(source, str):
        opened = source_or_invalid(ctx, source, device, places, clock)
        if opened is None:
            return None
        with opened:
            return measure_energy(ctx, call, device, opened, plan, clock=clock, read=read)
    if source is None:
        return None
    ctx.fact("energy_source", source.name)
    if isinstance(source, NullSource):
        return None
    try:
        meter = Meter(source, device, clock)
        idle, windows = steadily(
            ctx, lambda: meter.measure(call, plan), device, read=read, prefix="energy_"
        )
    except EnergyError as error:
        ctx.invalid(f"energy was asked for and not measured: {error.in_words()}")
        return None
    result = _result(source, idle, windows)
    _record(ctx, source, result)
    return result


def _result(source: Source, idle: Energy, windows: Tuple[Window, ...]) -> EnergyResult:
    rails = source.total.rails
    if not rails:
        return EnergyResult(idle, windows, None, None)
    watts = _mean_watts(idle)
    return EnergyResult(
        idle,
        windows,
        gross=tuple(sum(w.gross(name, watts[name]) for name in rails) for w in windows),
        net=tuple(sum(w.net(name, watts[name]) for name in rails) for w in windows),
    )


def _record(ctx: Any, source: Source, result: EnergyResult) -> None:
    watts = result.idle_watts
    if result.gross is not None and result.net is not None:
        label = source.label(source.total.rails)
        idle = source.total.of(watts)
        ctx.metric("energy_gross", result.gross, unit="J", source=label)
        ctx.metric("energy_net", result.net, unit="J", source=label)
        ctx.metric("energy_idle_power", [idle], unit="W", source=label)
        if min(result.net) <= 0:
            ctx.invalid(
                "the energy of a call cannot be told from that of an idle device: net"
                f" {min(result.net):.3g} J"
            )
    for rail in source.rails if len(source.rails) > 1 else ():
        name, label = rail.name, source.label((rail.name,))
        gross = [window.gross(name, watts[name]) for window in result.windows]
        net = [window.net(name, watts[name]) for window in result.windows]
        ctx.metric(f"energy_gross_{name}", gross, unit="J", source=label)
        ctx.metric(f"energy_net_{name}", net, unit="J", source=label)
        ctx.metric(f"energy_idle_power_{name}", [watts[name]], unit="W", source=label)
    everything = (result.idle, *(window.energy for window in result.windows))
    ctx.fact("energy_caveat", source.caveat)
    ctx.fact("energy_total", source.total.to_fact())
    ctx.fact("energy_rails", {rail.name: rail.to_fact() for rail in source.rails})
    ctx.fact("energy_period", source.period_s)
    ctx.fact("energy_resolution", max(energy.resolution_j for energy in everything))
    ctx.fact("energy_coverage", min(energy.coverage for energy in everything))
    ctx.fact("energy_idle", {"seconds": result.idle.seconds, "watts": watts})
    ctx.fact("energy_windows", [window.to_fact() for window in result.windows])
    for energy in everything:
        if energy.sampling is not None:
            write_recording(_new_side_file(ctx), energy.sampling)


def _new_side_file(ctx: Any) -> Path:
    """energy-0.csv is an idle window; a row may measure more than once."""
    number = 0
    while True:
        path: Path = ctx.folder / f"energy-{number}.csv"
        if not path.exists():
            return Path(ctx.side_file(path.name))
        number += 1


def _mean_watts(energy: Energy) -> Dict[str, float]:
    return {name: joules / energy.seconds for name, joules in energy.joules.items()}
