"""Judges what a plan's runs measured, and keeps that beside them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from narrowgauge.checkout import Checkout
from narrowgauge.errors import results_unwritable
from narrowgauge.judge.bars import Unmeasured
from narrowgauge.judge.gather import (
    Claimed,
    Records,
    all_claims,
    choose_claims,
    judge_records,
    occasion_of,
    read_stored,
)
from narrowgauge.judge.model import Judged
from narrowgauge.noise import Floors
from narrowgauge.reproduce.carrying import Carried
from narrowgauge.reproduce.planning import ReproducePlan, unmeasured_of
from narrowgauge.store import Store
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.codec import dumps, write_json_atomic
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import Record

__all__ = ["JUDGED_FOLDER", "LATEST_JUDGED", "claims_of", "conclude", "keep"]

JUDGED_FOLDER = "judged"
LATEST_JUDGED = "latest.json"


def claims_of(plan: ReproducePlan, checkout: Checkout) -> tuple[Claimed, ...]:
    """The claims that a plan is of. Raises UnknownNameError where the checkout lost one."""
    # Without a word, every claim is chosen, and a plan may be of none.
    if not plan.claims:
        return ()
    return choose_claims(all_claims(checkout.experiments), plan.claims)


def conclude(
    plan: ReproducePlan,
    chosen: Sequence[Claimed],
    carried: Carried,
    checkout: Checkout,
    store: Store,
) -> Judged:
    """Judge a plan's claims by the plan's runs alone: what was measured before does not count.

    `chosen`: `claims_of` the plan, asked for before its runs.
    """
    experiments = {each.spec.id for each in chosen}
    # Without a run, no run id is asked for, and none may be taken instead.
    runs = tuple(carried.steps)
    records = _one_of_each(read_stored(store, experiments if runs else (), runs), carried.steps)
    occasion = dataclasses.replace(
        occasion_of(checkout, str(store.root), time.time(), replay=False),
        order_seed=plan.order_seed,
        seconds=carried.seconds,
    )
    why = {**unmeasured_of(plan), **_of_steps(plan, carried)}
    return judge_records(chosen, records, occasion, Floors.in_store(store), why)


def _one_of_each(records: Records, steps: Mapping[str, int]) -> Records:
    """Of what a step was tried for several times, the newest complete record, else the newest."""
    return dataclasses.replace(
        records,
        by_experiment={
            name: tuple(_newest_of_each(found, steps))
            for name, found in records.by_experiment.items()
        },
    )


def _newest_of_each(records: Sequence[Record], steps: Mapping[str, int]) -> Iterator[Record]:
    tries: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        # A step of several runs has each by its parameters.
        what = (steps[record.run_id], dumps(record.parameters))
        tries.setdefault(what, []).append(record)
    for same in tries.values():
        yield max(same, key=lambda each: (each.status is Status.COMPLETE, each.run_id))


def keep(judged: Judged, results: Path, name: str) -> Path:
    """Write what was judged, and a copy as the latest. Raises ResultsUnwritable."""
    folder = results / JUDGED_FOLDER
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, judged)
        write_json_atomic(folder / LATEST_JUDGED, judged)
    except OSError as error:
        raise results_unwritable(results, error.strerror or str(error)) from error
    return path


def _of_steps(plan: ReproducePlan, carried: Carried) -> dict[str, Unmeasured]:
    """Why the claims of steps that came to nothing were not measured."""
    found: dict[str, Unmeasured] = {}
    for number, step in enumerate(plan.steps):
        reason = carried.problems.get(number, "")
        if number in carried.over_budget:
            reason = "the budget was spent before its run"
        elif carried.stopped and not reason:
            reason = "its run was not reached before somebody stopped"
        if reason:
            found.update({name: Unmeasured(Verdict.SKIPPED, reason) for name in step.claims})
    return found
