"""What a comparison on one device can see: from the newest run of `noise-floor` on the same.

Looked up whenever a ratio is printed, never stored with it. A noise floor holds for one device,
target and executor; that of native runs says nothing about containers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge import statistics
from narrowgauge.statistics import Configuration, Effect
from narrowgauge.statistics.ratios import LEAST
from narrowgauge.store import Store
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.figures import is_time
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.record import Record, load_record

__all__ = [
    "EXPERIMENT",
    "MEANING",
    "UNKNOWN",
    "Detectable",
    "Floors",
    "NoiseFloor",
    "Trials",
    "floor_of",
    "percent",
    "trials_of",
    "workloads_of",
]

EXPERIMENT = "noise-floor"
UNKNOWN = "noise floor unknown: narrowgauge run noise-floor"
MEANING = (
    "detectable: the least effect that 95 % of comparisons of this size would find"
    " at 5 % false alarms"
)
#: One figure per process; the other side of each pair shares its process and so its luck.
_METRIC = "latency_first"
_PLANTED = "planted"
#: The workload that is launches and nothing else.
_LAUNCH = "launch"


#: Device, target and executor: for these a floor holds.
_Place = tuple[str | None, str, str]


@dataclass(frozen=True)
class Detectable:
    """What stands beside one ratio. `least` as a share: 0.02 is a ratio of 1.02.

    `least` and `within` are None where `reason` says why; `within`: the ratio is no further from 1
    than that. `workload` is the noisiest one, and `run_id` the run that measured it.
    """

    least: float | None
    within: bool | None
    workload: str = ""
    run_id: str = ""
    reason: str = ""

    @property
    def text(self) -> str:
        """`1.2 %`, with a word where the ratio is within it; empty where it does not apply."""
        if self.least is None:
            return ""
        return percent(self.least) + (", ratio within it" if self.within else "")


@dataclass(frozen=True)
class NoiseFloor:
    """A run of A against A: one figure per process and workload, in seconds per call."""

    run_id: str
    workloads: tuple[tuple[str, tuple[float, ...]], ...]
    launching: tuple[str, ...] = ()

    def effect(self, above: int, below: int, *, device_bound: bool = False) -> tuple[Effect, str]:
        """The effect that a comparison of so many processes finds in the noisiest workload.

        The worst of all, since which of them another experiment resembles nobody knows; but where
        the device binds (`device_bound`), the host's noise in launching (`launching`) is not in it.
        """
        found = [
            (_effect(figures, above, below), label)
            for label, figures in self.workloads
            if not (device_bound and label in self.launching)
        ]
        known = [(each, label) for each, label in found if each.least is not None]
        if not known:
            return found[0] if found else (Effect(None, None, "no workload was measured"), "")
        return max(known, key=lambda each: each[0].least or 0.0)


@functools.lru_cache(maxsize=256)
def _effect(figures: tuple[float, ...], above: int, below: int) -> Effect:
    return statistics.least_detectable_effect(figures, above, below)


def floor_of(record: Record) -> NoiseFloor | None:
    """The floor that a run of noise-floor measured; None where it has too few valid processes."""
    enough = tuple(each for each in workloads_of(record) if len(each[1]) >= LEAST)
    found, names = _labelled(record)
    launching = tuple(
        each.label(names) for each in found if each.parameters.get("workload") == _LAUNCH
    )
    return NoiseFloor(record.run_id, enough, launching) if enough else None


def workloads_of(record: Record) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Of a run of noise-floor: one figure per valid process of A, by workload, however few."""
    found, names = _labelled(record)
    return tuple((each.label(names), each.figures(_METRIC)) for each in found)


def _labelled(record: Record) -> tuple[tuple[Configuration, ...], list[str]]:
    """The configurations of A against A, and the parameters that tell them apart."""
    found = statistics.configurations(r for r in record.rows if not r.parameters.get(_PLANTED))
    names = [name for name in statistics.varying(found) if name != _PLANTED]
    if not names and found:
        names = [name for name in ("workload", "size") if name in found[0].parameters]
    return found, names


class Floors:
    """The noise floors that are known, newest first; no record is read before it is needed."""

    def __init__(self, load: Callable[[], Iterable[Record]]) -> None:
        self._load = load
        self._found: dict[_Place, NoiseFloor | None] = {}

    @classmethod
    def none(cls) -> Floors:
        """Where no results are at hand."""
        return cls(lambda: ())

    @classmethod
    def in_store(cls, store: Store) -> Floors:
        """Those of the runs in a results folder."""
        return cls(lambda: _stored(store))

    @classmethod
    def in_references(cls, experiments: Path) -> Floors:
        """Those of the reference records in a checkout."""
        folder = experiments / EXPERIMENT / "reference"
        # Run ids begin with their second, so that their order is that of time.
        paths = sorted(folder.glob("*/*.json.gz"), key=lambda path: path.name, reverse=True)
        return cls(lambda: map(load_record, paths))

    def of(self, record: Record) -> NoiseFloor | None:
        """The newest floor of the record's device, target and executor."""
        place = _place(record)
        if place not in self._found:
            self._found[place] = self._newest(place) if place[0] else None
        return self._found[place]

    def _newest(self, place: _Place) -> NoiseFloor | None:
        here = (floor_of(each) for each in self._load() if _place(each) == place)
        return next((floor for floor in here if floor is not None), None)

    def beside(
        self, ratio: float, unit: str, counts: tuple[int, int], records: Sequence[Record]
    ) -> Detectable:
        """What to print beside a ratio of medians of so many processes, taken from `records`.

        Of two records on unlike devices the noisier counts, since its noise is in the ratio.
        """
        if not is_time(unit):
            return Detectable(None, None, reason="no time: the noise floor is one of times")
        floors = [self.of(record) for record in records]
        known = {floor.run_id: floor for floor in floors if floor is not None}
        if not floors or any(floor is None for floor in floors):
            return Detectable(None, None, reason=UNKNOWN)
        device_bound = all(map(_device_binds, records))
        effects = [
            (*floor.effect(*counts, device_bound=device_bound), floor.run_id)
            for floor in known.values()
        ]
        unknown = next((effect for effect in effects if effect[0].least is None), None)
        if unknown is not None:
            return Detectable(None, None, run_id=unknown[2], reason=unknown[0].reason)
        effect, workload, run_id = max(effects, key=lambda each: each[0].least or 0.0)
        least = effect.least or 0.0
        within = None
        if math.isfinite(ratio) and ratio > 0:
            within = abs(math.log(ratio)) <= math.log1p(least)
        return Detectable(least, within, workload, run_id)


def _device_binds(record: Record) -> bool:
    """Whether every row found out, and says, that the device binds it and not its launches."""
    rows = record.valid_rows()
    return bool(rows) and all(row.facts.get("bound_by") == "device" for row in rows)


def _place(record: Record) -> _Place:
    inside = record.inside
    device = (inside.accelerator or inside.cpu) if inside else None
    return device, record.target, record.host.executor if record.host else "none"


def _stored(store: Store) -> Iterator[Record]:
    for folder in store.of(EXPERIMENT):
        try:
            if folder.recorded:
                yield folder.record()
        except (DamagedRecordError, OSError):
            continue  # a damaged run is told of where it is shown; here it only is no floor


@dataclass(frozen=True)
class Trials:
    """The comparisons of one workload. `alarms`: those whose 95 % interval of the median ratio of
    pairs does not hold 1, either way; `slower`: those of them that say that the second is slower,
    which alone find a planted slowdown."""

    label: str
    planted: float
    total: int
    alarms: int
    slower: int

    @property
    def alarm_rate(self) -> float:
        """The statistic `alarm-rate` of claims."""
        return self.alarms / self.total

    @property
    def slower_rate(self) -> float:
        """The statistic `slower-rate` of claims."""
        return self.slower / self.total


def trials_of(record: Record) -> tuple[Trials, ...]:
    """What a run of noise-floor found, per configuration, over its valid rows.

    A row whose samples were reduced is left out: its comparisons cannot be told apart any more.
    """
    found = statistics.configurations(record.rows)
    names = statistics.varying(found)
    trials = []
    for each in found:
        found_ratios = [
            # The rule of every paired comparison. Pairs that do not differ are counted: they alarm
            # nobody, and find nothing.
            statistics.log_ratio_interval(ratios, [1.0] * len(ratios), paired=True)
            for row in each.valid
            for ratios in _comparisons(row)
            if len(ratios) >= LEAST
        ]
        if found_ratios:
            alarms = [ratio for ratio in found_ratios if ratio.holds_one is False]
            slower = sum(ratio.ratio > 1.0 for ratio in alarms)
            planted = float(each.parameters.get(_PLANTED, 0.0))
            label = each.label(names)
            trials.append(Trials(label, planted, len(found_ratios), len(alarms), slower))
    return tuple(trials)


def _comparisons(row: Row) -> Iterator[tuple[float, ...]]:
    metric = row.metric("ratio")
    counts = row.facts.get("pairs")
    if metric is None or not isinstance(counts, list) or sum(counts) != len(metric.values):
        return
    begin = 0
    for count in counts:
        yield metric.values[begin : begin + count]
        begin += count


def percent(share: float) -> str:
    """`1.2 %`: two figures say all that is known of a threshold."""
    value = 100 * share
    return f"{value:.2g} %" if value < 10 else f"{value:.0f} %"
