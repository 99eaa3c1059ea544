"""Ratios to the baseline that an experiment's `[summary]` names, for its tables."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge import statistics
from narrowgauge.noise import MEANING, UNKNOWN, Detectable, Floors
from narrowgauge.statistics import Configuration, LogRatio
from narrowgauge.view import unit_of
from narrowgauge_contract.errors import NarrowgaugeError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import parse_spec
from narrowgauge_contract.summary import Summary

__all__ = ["Baseline", "baseline_of"]


@dataclass(frozen=True)
class Baseline:
    """The baseline of one record: how many times as good as it each configuration is."""

    record: Record
    closing: Summary
    value: Scalar
    floors: Floors

    @property
    def metric(self) -> str:
        return self.closing.metric

    @property
    def heading(self) -> str:
        """What the ratios are called: `× Float32`."""
        return f"× {self.closing.name_of(self.value)}"

    def ratio(self, found: Configuration) -> tuple[LogRatio, Detectable]:
        """Of the configuration's metric to that of the baseline with all else alike."""
        wanted = {**found.parameters, self.closing.parameter: self.value}
        if found.parameters == wanted:
            itself = "the baseline itself"
            return LogRatio(0.0, reason=itself), Detectable(None, None, reason=itself)
        nobody = Configuration(wanted, ())
        every = statistics.configurations(self.record.rows)
        base = next((each for each in every if each.parameters == wanted), nobody)
        above, below = (base, found) if self.closing.better_less else (found, base)
        ratio = statistics.ratio_of(above, below, self.metric)
        counts = len(above.figures(self.metric)), len(below.figures(self.metric))
        unit = unit_of(self.record, self.metric)
        return ratio, self.floors.beside(ratio.ratio, unit, counts, [self.record])

    def note(self) -> str:
        """What is to be said once below the ratios: what `detectable` means, or that it is unknown.

        Empty where the metric is no time.
        """
        found = (self.ratio(each)[1] for each in statistics.configurations(self.record.rows))
        for detectable in found:
            if detectable.reason == UNKNOWN:
                return UNKNOWN
            if detectable.least is not None:
                return f"{MEANING}; {detectable.workload}, `{detectable.run_id}`"
        return ""


def baseline_of(record: Record, floors: Floors) -> Baseline | None:
    """The record's baseline; None where its experiment names none."""
    try:
        closing = parse_spec(record.spec, where=f"the record of {record.run_id}").closing
    except NarrowgaugeError:
        return None  # an older declaration; the record itself is still whole
    if closing is None or closing.baseline is None:
        return None
    return Baseline(record, closing, closing.baseline, floors)
