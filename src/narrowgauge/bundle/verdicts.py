"""The verdicts of a bundle: from its own records and claims, so that anybody gets them again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from narrowgauge.judge.gather import Records, all_claims, judge_records
from narrowgauge.judge.model import Judged, Occasion
from narrowgauge.noise import EXPERIMENT as NOISE_FLOOR
from narrowgauge.noise import Floors
from narrowgauge_contract import __version__
from narrowgauge_contract.record import GitFacts, Record

__all__ = ["differing", "judge_runs"]

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
    """The claims that two occasions judge unlike, each with both verdicts."""
    one, other = _verdicts(said), _verdicts(found)
    return tuple(
        f"{name}: {one.get(name, 'none')} was said, records give {other.get(name, 'none')}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    )


def _verdicts(judged: Judged) -> dict[str, str]:
    return {f"{each.experiment}/{each.claim.id}": each.verdict.value for each in judged.judgements}
