"""What every format of the report shows: `Judged` and the runs' cards as texts, in order.

Pure. Every text in a `Report` is clean (`text.clean`); formats add their own escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from narrowgauge.judge.model import Estimate, Judged, Judgement
from narrowgauge.report.cards import RunCard
from narrowgauge.report.text import clean, label
from narrowgauge.report.words import (
    coverage_words,
    duration,
    estimate_words,
    interval_words,
    paper_words,
    percent_words,
    told_apart,
    when,
)
from narrowgauge_contract.claims import MetricOperator, Verdict

__all__ = ["ClaimView", "Floor", "PartView", "Report", "RunLink", "build", "measured"]

#: In which order verdicts are counted and, first of all, sorted.
ORDER = (
    Verdict.REPRODUCED,
    Verdict.REPRODUCED_TREND,
    Verdict.NOT_REPRODUCED,
    Verdict.UNSTABLE,
    Verdict.INVALID,
    Verdict.SKIPPED,
    Verdict.NOT_APPLICABLE,
)
MEANING = {
    Verdict.REPRODUCED: "the figure holds on the hardware that it is of",
    Verdict.REPRODUCED_TREND: "it holds, on other hardware or with no host on record",
    Verdict.NOT_REPRODUCED: "measured, and it does not hold",
    Verdict.UNSTABLE: "the samples do not tell",
    Verdict.INVALID: "measured, but the numbers must not be used",
    Verdict.SKIPPED: "not measured here, or not as claimed, which neither shows nor refutes it",
    Verdict.NOT_APPLICABLE: "nothing here can measure it",
}
#: What the columns of intervals are called; an equivalence has another coverage, and says so.
INTERVAL = "95 % interval"
#: Verdicts that no measurement stands behind.
UNMEASURED = (Verdict.SKIPPED, Verdict.NOT_APPLICABLE)
REPLAY = "Replay: stored records were judged, nothing was measured for this. It is no reproduction."


@dataclass(frozen=True)
class PartView:
    """A figure that a claim was judged by."""

    label: str
    figure: str
    interval: str
    coverage: str
    repeats: int

    @property
    def spread(self) -> str:
        """The interval, with its coverage where that is not what the column says."""
        return _spread(self.interval, self.coverage)


@dataclass(frozen=True)
class RunLink:
    """A run that a judgement rests on; `anchor` is empty where its record is not here."""

    run_id: str
    anchor: str


@dataclass(frozen=True)
class ClaimView:
    """One claim, as texts. `judgement` keeps the numbers, for pictures, sorting and CSV.

    `coverage` names the interval (`90 % interval`), empty where there is none.
    """

    judgement: Judgement
    anchor: str
    id: str
    experiment: str
    text: str
    source: str
    kind: str
    verdict: Verdict
    reason: str
    flip: str
    command: str
    paper: str
    here: str
    interval: str
    coverage: str
    no_interval: str
    repeats: int
    minimum_repeats: int
    device: str
    target: str
    measured_on: str
    sensitivity: str
    bimodal: str
    selections: tuple[str, ...]
    order: tuple[str, ...]
    parts: tuple[PartView, ...]
    runs: tuple[RunLink, ...]
    exclusions: tuple[str, ...]
    disagreements: tuple[str, ...]
    cost: str

    @property
    def measured(self) -> bool:
        return self.verdict not in UNMEASURED

    @property
    def spread(self) -> str:
        """The interval as tables show it: with its coverage where that is not the column's."""
        return _spread(self.interval, self.coverage)

    @property
    def rank(self) -> int:
        """By which verdicts are sorted."""
        return ORDER.index(self.verdict)


@dataclass(frozen=True)
class Floor:
    """What comparisons of a size could have found, as a run of noise-floor measured it."""

    least: str
    workload: str
    run_id: str
    claims: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Report:
    """`counts` has every verdict, in `ORDER`. `missing` are runs without a record, and why."""

    title: str
    made: str
    version: str
    commit: str
    source: str
    replay: bool
    order_seed: int | None
    seconds: float | None
    counts: tuple[tuple[Verdict, int], ...]
    claims: tuple[ClaimView, ...]
    floors: tuple[Floor, ...]
    runs: tuple[tuple[str, RunCard], ...]
    missing: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def measured(self) -> tuple[ClaimView, ...]:
        return measured(self.claims)

    @property
    def summary(self) -> str:
        """`12 REPRODUCED, 3 NOT-REPRODUCED, 479 SKIPPED`."""
        return ", ".join(f"{count} {verdict.value}" for verdict, count in self.counts if count)


def measured(claims: Iterable[ClaimView]) -> tuple[ClaimView, ...]:
    """Those with a measurement behind the verdict."""
    return tuple(each for each in claims if each.measured)


def build(judged: Judged, cards: Iterable[tuple[str, RunCard | str]]) -> Report:
    """The view of what was judged. `cards`: for each run, in order, its card or why it has none."""
    taken: set[str] = set()
    anchors: dict[str, str] = {}
    runs, missing = [], []
    for run_id, card in cards:
        if isinstance(card, str):
            missing.append((label(run_id), clean(card)))
        else:
            anchors[run_id] = _anchor(("run", run_id), taken)
            runs.append((anchors[run_id], card))
    claims = tuple(_claim(each, anchors, taken) for each in judged.judgements)
    occasion = judged.occasion
    git = occasion.git
    return Report(
        title=f"Verdicts on {len(claims)} claims",
        made=when(occasion.made_utc),
        version=clean(occasion.version),
        commit=clean(git.commit + (" (changed)" if git.dirty else "")) if git else "",
        source=clean(occasion.source),
        replay=occasion.replay,
        order_seed=occasion.order_seed,
        seconds=occasion.seconds,
        counts=tuple(
            (verdict, sum(each.verdict is verdict for each in claims)) for verdict in ORDER
        ),
        claims=claims,
        floors=_floors(claims),
        runs=tuple(runs),
        missing=tuple(missing),
        refused=tuple((clean(each.path), clean(each.why)) for each in judged.refused),
    )


def _claim(judgement: Judgement, anchors: Mapping[str, str], taken: set[str]) -> ClaimView:
    claim, estimate = judgement.claim, judgement.estimate
    ordered = claim.operator is MetricOperator.ORDER
    return ClaimView(
        judgement=judgement,
        anchor=_anchor(("claim", judgement.experiment, claim.id), taken),
        id=label(claim.id),
        experiment=label(judgement.experiment),
        text=clean(claim.text),
        source=clean(claim.paper),
        kind=claim.kind.value,
        verdict=judgement.verdict,
        reason=clean(judgement.reason),
        flip=clean(judgement.flip),
        command=clean(judgement.command, lines=True),
        paper=clean(paper_words(judgement)),
        here=clean(
            " < ".join(told_apart(judgement.order)) if ordered else estimate_words(estimate)
        ),
        interval=clean(interval_words(estimate)),
        coverage=coverage_words(estimate),
        no_interval=clean(estimate.no_interval if estimate else ""),
        repeats=_repeats(judgement),
        minimum_repeats=claim.minimum_repeats,
        device=label(judgement.device),
        target=label(judgement.target),
        measured_on=clean(claim.measured_on or claim.device),
        sensitivity=clean(_sensitivity(judgement)),
        bimodal=clean(judgement.bimodal),
        selections=tuple(clean(str(each)) for each in claim.selections),
        order=tuple(label(each) for each in judgement.order),
        parts=tuple(_part(each) for each in judgement.parts),
        runs=tuple(RunLink(label(each), anchors.get(each, "")) for each in judgement.runs),
        exclusions=tuple(
            clean(f"{each.run}{'' if each.row is None else f' row {each.row}'}: {each.why}")
            for each in judgement.exclusions
        ),
        disagreements=tuple(clean(each) for each in judgement.disagreements),
        cost=f"{duration(60 * claim.minutes)}, {claim.disk_gb:g} GB",
    )


def _spread(interval: str, coverage: str) -> str:
    return f"{interval} ({coverage})" if coverage and coverage != INTERVAL else interval


def _part(estimate: Estimate) -> PartView:
    return PartView(
        label(estimate.label),
        clean(estimate_words(estimate)),
        clean(interval_words(estimate)),
        coverage_words(estimate),
        estimate.repeats,
    )


def _repeats(judgement: Judgement) -> int:
    """The processes behind the verdict: of several figures, of that with the fewest."""
    if judgement.estimate is not None:
        return judgement.estimate.repeats
    return min((each.repeats for each in judgement.parts), default=0)


def _sensitivity(judgement: Judgement) -> str:
    found = judgement.sensitivity
    if found is None:
        return ""
    if found.least is None:
        return found.reason
    words = f"an effect of {percent_words(found.least)} would have been found"
    return words + ("; the ratio is within it" if found.within else "")


def _floors(claims: Iterable[ClaimView]) -> tuple[Floor, ...]:
    grouped: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for each in claims:
        found = each.judgement.sensitivity
        if found is not None and found.least is not None:
            key = (percent_words(found.least), label(found.workload), label(found.run))
            grouped.setdefault(key, []).append((each.anchor, f"{each.experiment}/{each.id}"))
    return tuple(Floor(*key, tuple(named)) for key, named in grouped.items())


def _anchor(words: Iterable[str], taken: set[str]) -> str:
    """A place's name in a page: letters, digits and hyphens, the same for the same words."""
    slug = "-".join(filter(None, (re.sub(r"[^a-z0-9]+", "-", w.lower()).strip("-") for w in words)))
    name, number = slug, 2
    while name in taken:
        name, number = f"{slug}-{number}", number + 1
    taken.add(name)
    return name
