"""Whether verdicts rest on runs that were made for them, and what is the newest that was judged."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import report_cases as cases

from narrowgauge.reproduce.occasions import labelled, latest_judged, occasions_in, rests_on
from narrowgauge_contract.codec import dumps, encode

MEASURED = dataclasses.replace(
    cases.judged(), occasion=dataclasses.replace(cases.judged().occasion, replay=False)
)


def _kept(results: Path, name: str, content: str) -> Path:
    path = results / "judged" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_what_one_occasion_rests_on_keeps_its_label(tmp_path: Path) -> None:
    assert labelled(MEASURED, occasions_in(tmp_path)).occasion.replay
    _kept(tmp_path, "20261121T1-aa.json", dumps(MEASURED))

    assert labelled(MEASURED, occasions_in(tmp_path)) == MEASURED


def test_runs_of_two_occasions_were_made_for_neither(tmp_path: Path) -> None:
    first, *others = (each for each in MEASURED.judgements if each.runs)
    apart = [
        dataclasses.replace(MEASURED, judgements=(dataclasses.replace(first, runs=(run,)),))
        for run in ("one", "two")
    ]
    for number, each in enumerate(apart):
        _kept(tmp_path, f"20261121T{number}-aa.json", dumps(each))
    both = dataclasses.replace(MEASURED, judgements=tuple(j for e in apart for j in e.judgements))

    assert others
    assert labelled(both, occasions_in(tmp_path)).occasion.replay
    assert not labelled(apart[1], occasions_in(tmp_path)).occasion.replay


@pytest.mark.parametrize("content", ["{", "[]", "null", "{}", '{"occasion": 1}', "\xff"])
def test_an_occasion_that_cannot_be_read_vouches_for_nothing(content: str, tmp_path: Path) -> None:
    path = _kept(tmp_path, "20261121T1-aa.json", "")
    path.write_bytes(content.encode("latin-1"))

    assert labelled(MEASURED, occasions_in(tmp_path)).occasion.replay


def test_nothing_measured_is_no_replay(tmp_path: Path) -> None:
    nothing = dataclasses.replace(MEASURED, judgements=())

    assert labelled(nothing, occasions_in(tmp_path)) == nothing


def test_a_replay_vouches_for_nothing() -> None:
    document: Any = encode(MEASURED)
    assert rests_on(document, MEASURED.run_ids)
    for replay in (True, 0, None):
        occasion = {**document["occasion"], "replay": replay}
        assert not rests_on({**document, "occasion": occasion}, MEASURED.run_ids)


def test_the_latest_counts_until_a_record_or_a_claim_is_newer(tmp_path: Path) -> None:
    results, experiments = tmp_path / "results", tmp_path / "experiments"
    record = results / "toy" / "a-run" / "record.json"
    claims = experiments / "toy" / "claims.toml"
    for path in (record, claims):
        path.parent.mkdir(parents=True)
        path.touch()
    assert latest_judged(results, experiments) is None
    latest = _kept(results, "latest.json", "{}")
    for path in (record, claims):
        for other in (record, claims):
            os.utime(other, (100, 100))
        os.utime(latest, (200, 200))
        assert latest_judged(results, experiments) == latest
        os.utime(path, (300, 300))
        assert latest_judged(results, experiments) is None
