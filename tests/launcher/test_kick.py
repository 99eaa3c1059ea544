"""The first try: short claims of any hardware, without a data set or a GPU, and a report."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from test_reproduce_run import CLAIM, Reproduce, ng

from narrowgauge.judge.gather import all_claims
from narrowgauge.reproduce.carrying import Carried, Means, carry_out
from narrowgauge.reproduce.journal import Journal
from narrowgauge.reproduce.kicking import kick_claims
from narrowgauge.reproduce.planning import Here, ReproducePlan
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.errors import ExitCode

__all__ = ["ng"]
ROOT = Path(__file__).parents[2]
LAPTOP = Here("cpu", ("a laptop's CPU",), accelerator=False)


def _without_data(ng: Reproduce) -> None:
    path = ng.root / "experiments" / "tiny" / "experiment.toml"
    path.write_text(path.read_text().replace('[data]\nparameter = "data"\n', ""))


def test_it_ends_in_verdicts_a_report_and_its_own_time(ng: Reproduce) -> None:
    _without_data(ng)
    claims = ng.root / "experiments" / "tiny" / "claims.toml"
    long = CLAIM.format(name="long", width=0, figure=1.0).replace("minutes = 0.1", "minutes = 9")
    claims.write_text(CLAIM.format(name="good", width=0, figure=1.0) + long)

    code, told = ng("kick", "--executor", "native")

    assert code == ExitCode.OK, told
    assert ng.verdicts == {"good": Verdict.REPRODUCED}
    report = Path(ng.out.strip().splitlines()[-1])
    assert report == ng.results / "report.html"
    assert "tiny" in report.read_text()
    assert "kick took" in told
    assert "of 30 min 0 s" in told


def test_a_claim_that_needs_data_is_no_first_try(ng: Reproduce) -> None:
    assert kick_claims(ng.root / "experiments", LAPTOP) == ()
    _without_data(ng)
    assert len(kick_claims(ng.root / "experiments", LAPTOP)) == 3


def test_this_checkout_has_some_for_a_laptop() -> None:
    chosen = kick_claims(ROOT / "experiments", LAPTOP)

    assert {"multipliers/ama5-errors", "noise-floor/a-equals-a"} <= {e.name for e in chosen}
    assert len(chosen) < len(all_claims(ROOT / "experiments"))
    for each in chosen:
        assert each.claim.minutes <= 3
        assert not each.spec.requires_accelerator


def test_time_is_kept_for_judging_and_what_was_stopped_has_its_report_too(
    ng: Reproduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_data(ng)
    claims = ng.root / "experiments" / "tiny" / "claims.toml"
    claims.write_text(CLAIM.format(name="good", width=0, figure=1.0))
    limits: list[float | None] = []

    def stopped(
        plan: ReproducePlan, journal: Journal, means: Means, *, limit_s: float | None = None
    ) -> Carried:
        limits.append(limit_s)
        done = carry_out(plan, journal, means, limit_s=limit_s)
        return dataclasses.replace(done, stopped=True)

    monkeypatch.setattr("narrowgauge.reproduce.carrying.carry_out", stopped)
    code, told = ng("kick", "--executor", "native")

    assert code == ExitCode.INTERRUPTED, told
    assert limits[0] is not None
    assert 27 * 60 < limits[0] <= 30 * 60 - 60
    assert "tiny" in (ng.results / "report.html").read_text()
    assert "kick took" in told
