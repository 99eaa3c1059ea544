"""What judging says: one `Judgement` per claim, and all of one occasion as `Judged`.

Plain data for the report, the bundle and scripts. The contract's codec writes and reads it:
`dumps(judged)`, `decode(Judged, json)`. Texts in it may come from records, which anybody can have
written: whoever shows them escapes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrowgauge.statistics import COVERAGE
from narrowgauge_contract.claims import Claim, Expectation, Verdict
from narrowgauge_contract.codec import LATER
from narrowgauge_contract.record import GitFacts

__all__ = [
    "JUDGED_FORMAT",
    "Estimate",
    "Exclusion",
    "Judged",
    "Judgement",
    "Occasion",
    "Refused",
    "Sensitivity",
]

#: 1: first.
JUDGED_FORMAT = 1


@dataclass(frozen=True)
class Estimate:
    """A figure, the interval that holds it, and what it was computed from.

    `coverage` is the interval's: 0.95, and 0.90 for an equivalence, which is two one-sided tests at
    5 %.

    `low` and `high` are None where the samples do not tell an interval; `no_interval` says why.
    `repeats` counts the processes. `per_repeat` holds one figure per process, in the order of
    `rows` (`run id#row index`): of a ratio whose sides are paired one ratio per pair; of unpaired
    ones and of geometric means it is empty, and the figures are those of the parts.
    """

    label: str
    figure: float
    unit: str
    low: float | None
    high: float | None
    repeats: int
    per_repeat: tuple[float, ...] = ()
    rows: tuple[str, ...] = ()
    no_interval: str = ""
    coverage: float = field(default=COVERAGE, metadata=LATER)

    @property
    def extreme(self) -> bool:
        """Whether it is the least or the most of all repeats, which decides alone."""
        return self.no_interval.startswith("an extreme")


@dataclass(frozen=True)
class Exclusion:
    """A record, or with `row` one of its rows, that a judgement left out, and why."""

    run: str
    row: int | None
    why: str


@dataclass(frozen=True)
class Sensitivity:
    """The least effect that a comparison of this size would find; `least` 0.02 is a ratio of 1.02.

    `least` is None where `reason` says why. `within`: the ratio is no further from 1 than that.
    `run` is the run of noise-floor that measured it.
    """

    least: float | None
    within: bool | None = None
    workload: str = ""
    run: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Judgement:
    """What became of one claim.

    `reason` is one or two plain sentences; `flip` says what would change the verdict; `command`
    checks the claim anew, and is empty where nothing can. `estimate` is what is held against
    `expectation` (None without valid rows, and for orderings); `parts` are the figures of the
    claim's selections, in their order, without those that were not measured. `expected_for` is the
    target whose expectation it is, or `any`. `order` lists the labels of an ordering's selections
    from the smallest figure found to the largest; the claim wants that of its selections. `device`
    and `target` are where it was measured, empty where it was not; `device_matches`: whether that
    is what the expectation is of. `bimodal` says which figures have two modes, empty where none
    has. `disagreements` name the checked facts in which records differed that were therefore not
    put together (`run / other run: fact: value / other value`).
    """

    claim: Claim
    experiment: str
    verdict: Verdict
    reason: str
    command: str
    flip: str
    estimate: Estimate | None = None
    parts: tuple[Estimate, ...] = ()
    expectation: Expectation | None = None
    expected_for: str = ""
    target: str = ""
    device: str = ""
    device_matches: bool = False
    sensitivity: Sensitivity | None = None
    bimodal: str = ""
    order: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    disagreements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A record that could not be read (truncated, foreign, newer, edited by hand), by its path."""

    path: str
    why: str


@dataclass(frozen=True)
class Occasion:
    """When and by what claims were judged. `made_utc`: seconds since the epoch.

    `replay`: stored records were judged that were not measured for it here, so that it is no
    reproduction, whatever the verdicts. `order_seed`: of the order in which `reproduce` ran; None
    where it did not. `seconds`: how long that took, with pauses; None where nothing was run.
    """

    made_utc: float
    version: str
    git: GitFacts | None
    replay: bool
    source: str
    order_seed: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Judged:
    """All judgements of one occasion, in the order of experiments and of their claims."""

    format: int
    occasion: Occasion
    judgements: tuple[Judgement, ...]
    refused: tuple[Refused, ...] = ()

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The runs that any judgement rests on, once each."""
        return tuple(dict.fromkeys(run for each in self.judgements for run in each.runs))
