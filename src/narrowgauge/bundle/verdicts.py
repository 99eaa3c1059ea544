"""The verdicts of a bundle: from its own records and claims, so that anybody gets them again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from narrowgauge.judge.gather import Records, all_claims, judge_records
from narrowgauge.judge.model import Judged, Judgement, Occasion
from narrowgauge.noise import EXPERIMENT as NOISE_FLOOR
from narrowgauge.noise import Floors
from narrowgauge_contract import __version__
from narrowgauge_contract.record import GitFacts, Record

__all__ = ["differing", "judge_runs"]

_SAME = 1e-9
#: What a fact is called, and the fact.
_Fact = tuple[str, "str | float | None"]
_SOURCE = "the runs of this bundle"


def judge_runs(
    experiments: Path, records: Sequence[Record], *, now: float, git: GitFacts | None, replay: bool
) -> Judged:
    """The verdicts on every claim of the experiments that `records` are of, by these alone.

    Noise floors are those among the records too. Raises ClaimsError, ExperimentFileError.
    """
    names = sorted({record.experiment for record in records})
    chosen = [each for each in all_claims(experiments) if each.spec.id in names]
    by_experiment = {
        name: tuple(record for record in records if record.experiment == name) for name in names
    }
    # Run ids begin with their second: newest first, as floors are looked for.
    floors = sorted(
        by_experiment.get(NOISE_FLOOR, ()), key=lambda record: record.run_id, reverse=True
    )
    occasion = Occasion(now, __version__, git, replay, _SOURCE)
    return judge_records(chosen, Records(by_experiment), occasion, Floors(lambda: floors))


def differing(said: Judged, found: Judged) -> tuple[str, ...]:
    """The claims that two occasions judge unlike, each with what differs: the verdict, the figure,
    its interval, the runs that it rests on."""
    one, other = _by_name(said), _by_name(found)
    lines = (_difference(one.get(name), other.get(name)) for name in sorted({*one, *other}))
    return tuple(
        f"{name}: {line}" for name, line in zip(sorted({*one, *other}), lines, strict=True) if line
    )


def _by_name(judged: Judged) -> dict[str, Judgement]:
    return {f"{each.experiment}/{each.claim.id}": each for each in judged.judgements}


def _difference(said: Judgement | None, found: Judgement | None) -> str:
    for one, other in zip(_facts(said), _facts(found), strict=True):
        if not _is_same(one, other):
            return f"{_word(one)} was said, records give {_word(other)}"
    return ""


def _facts(judgement: Judgement | None) -> tuple[_Fact, ...]:
    """What two judgements are compared by, with what each is called."""
    if judgement is None:
        return (("", "none"), ("figure", None), ("low", None), ("high", None), ("runs", ""))
    estimate = judgement.estimate
    return (
        ("", judgement.verdict.value),
        ("figure", estimate.figure if estimate else None),
        ("low", estimate.low if estimate else None),
        ("high", estimate.high if estimate else None),
        ("runs", " ".join(judgement.runs)),
    )


def _is_same(one: _Fact, other: _Fact) -> bool:
    left, right = one[1], other[1]
    if isinstance(left, float) and isinstance(right, float):
        # Another numpy may sum in another order; no verdict is told apart by so little.
        return math.isclose(left, right, rel_tol=_SAME) or (left != left and right != right)
    return left == right


def _word(fact: _Fact) -> str:
    name, value = fact
    return " ".join(filter(None, (name, "none" if value in (None, "") else str(value))))
