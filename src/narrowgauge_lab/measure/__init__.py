"""The instrument: windows and samples of time, energy, precision, cost and host state."""

from __future__ import annotations

from narrowgauge_lab.measure.hidden import with_hidden_launches
from narrowgauge_lab.measure.timing import (
    Comparison,
    Samples,
    TimingPlan,
    interleave,
    measure_time,
)
from narrowgauge_lab.measure.window import MEASUREMENT_VERSION, Window, window

__all__ = [
    "MEASUREMENT_VERSION",
    "Comparison",
    "Samples",
    "TimingPlan",
    "Window",
    "interleave",
    "measure_time",
    "window",
    "with_hidden_launches",
]
