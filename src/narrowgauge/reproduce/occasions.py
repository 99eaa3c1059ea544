"""Whether runs were made for a verdict: which occasion of `reproduce` or `kick` rests on them.

A verdict on runs that were picked afterwards is no reproduction: who may choose among runs can
choose the ones that please. So what is judged anew counts as measured for it only where one
occasion, whose claims were named before its runs, rests on all of the runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from narrowgauge.judge.model import Judged
from narrowgauge.reproduce.conclude import JUDGED_FOLDER, LATEST_JUDGED
from narrowgauge_contract.codec import read_json
from narrowgauge_contract.errors import NarrowgaugeError

__all__ = ["labelled", "latest_judged", "occasions_in", "rests_on"]


def occasions_in(results: Path) -> tuple[Path, ...]:
    """What was judged each time that `reproduce` or `kick` ran, newest first."""
    return tuple(sorted((results / JUDGED_FOLDER).glob("2*.json"), reverse=True))


def labelled(judged: Judged, occasions: Iterable[Path]) -> Judged:
    """What was judged, as a replay where no one of the occasions rests on all its runs.

    Without a run there is no doubt. Occasions that cannot be read rest on nothing.
    """
    runs = judged.run_ids
    if judged.occasion.replay or not runs or any(rests_on(_document(p), runs) for p in occasions):
        return judged
    return dataclasses.replace(judged, occasion=dataclasses.replace(judged.occasion, replay=True))


def rests_on(document: Any, run_ids: Collection[str]) -> bool:
    """Whether what was judged once, as JSON, was no replay and rests on all of these runs."""
    try:
        replay = document["occasion"]["replay"]
        found = {run for judgement in document["judgements"] for run in judgement["runs"]}
    except (KeyError, TypeError):
        return False
    return replay is False and found >= set(run_ids)


def latest_judged(results: Path, experiments: Path) -> Path | None:
    """What `reproduce` judged last; None where a record or a claim is newer than that."""
    path = results / JUDGED_FOLDER / LATEST_JUDGED
    judged = _written(path)
    if judged is None:
        return None
    newer = any((_written(each) or 0) > judged for each in _read_by_judging(results, experiments))
    return None if newer else path


def _read_by_judging(results: Path, experiments: Path) -> Iterator[Path]:
    for pattern in ("*/*/record.json", "*/record.json"):
        yield from results.glob(pattern)
    for name in ("claims.toml", "experiment.toml"):
        yield from experiments.glob(f"*/{name}")


def _written(path: Path) -> int | None:
    """When, in nanoseconds since the epoch; None where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _document(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, NarrowgaugeError):
        return None
