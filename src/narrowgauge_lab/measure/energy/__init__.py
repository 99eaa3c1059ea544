"""Energy: sources that say it, rails by their raw names, and windows that measure a call's."""

from __future__ import annotations

from narrowgauge_lab.measure.energy.opening import NAMES, Places, open_source, source_or_invalid
from narrowgauge_lab.measure.energy.source import (
    Clock,
    Energy,
    EnergyError,
    EnergyMissingError,
    Rail,
    Source,
    Total,
)
from narrowgauge_lab.measure.energy.windows import (
    EnergyPlan,
    EnergyResult,
    Meter,
    Window,
    measure_energy,
)

__all__ = [
    "NAMES",
    "Clock",
    "Energy",
    "EnergyError",
    "EnergyMissingError",
    "EnergyPlan",
    "EnergyResult",
    "Meter",
    "Places",
    "Rail",
    "Source",
    "Total",
    "Window",
    "measure_energy",
    "open_source",
    "source_or_invalid",
]
