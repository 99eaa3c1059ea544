"""Claims of `pruning` against rows that its README's commands make, by the code that judges."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
from judge_cases import record

from narrowgauge.judge.gather import Claimed, all_claims
from narrowgauge.judge.judging import judge
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.job import RowPlan, parse_overrides, resolve
from narrowgauge_contract.outcome import Metric, Row, Status, Validity

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CLAIMS = {
    each.claim.id: each for each in all_claims(EXPERIMENTS) if each.spec.id == "pruning"
}  # fmt: skip
PAIRED = "quantisation-is-better"


def _commands() -> list[tuple[str, list[str]]]:
    """Profile and parameters of every `narrowgauge run pruning` in the README."""
    found = []
    for line in (EXPERIMENTS / "pruning" / "README.md").read_text("utf-8").splitlines():
        if line.startswith("narrowgauge run pruning"):
            given = shlex.split(line, comments=True)
            words = [given[i + 1] for i, each in enumerate(given) if each == "-p"]
            profile = given[given.index("--profile") + 1] if "--profile" in given else "short"
            found.append((profile, words))
    return found


def _rows(each: Claimed, words: list[str], profile: str) -> tuple[RowPlan, ...]:
    overrides = parse_overrides(each.spec, words)
    return resolve(
        each.spec, overrides, profile=profile, target="cpu", seed=0, run_id="r"
    ).rows  # fmt: skip


def _verdict(each: Claimed, words: list[str], value: float, unit: str = "1") -> Verdict:
    """Of a run of the paper profile, each row of which has the claim's metric of this value."""
    plans = _rows(each, words, "paper")
    (name,) = {selection.metric for selection in each.claim.selections}
    rows = tuple(
        Row(
            plan.index, plan.repeat, plan.seed, dict(plan.parameters), Status.COMPLETE,
            Validity(True), {}, (Metric(name, unit, "computed", (value,)),),
        )
        for plan in plans
    )  # fmt: skip
    measured = dataclasses.replace(
        record({"own": (1.0,)}, device="EPYC"), experiment="pruning", profile="paper",
        parameters=dict(plans[0].parameters), rows=rows,
    )  # fmt: skip
    return judge(each.claim, each.spec, [measured]).verdict


def test_what_the_readme_says_can_be_run() -> None:
    commands = _commands()

    assert {profile for profile, _ in commands} == {"smoke", "short", "paper"}
    for profile, words in commands:
        assert _rows(CLAIMS[PAIRED], words, profile)


@pytest.mark.parametrize(
    ("name", "holds", "fails", "told_by"),
    [
        ("channels-are-faster", 1.5, 1.4, "ratios=0.5,0.6"),
        ("channels-cost-a-point", 1.0, 1.2, "ratios=0.5,0.6"),
        ("zeros-are-not-faster", 1.01, 1.2, ""),
    ],
)
def test_a_run_that_the_readme_names_is_what_claims_ask_for(
    name: str, holds: float, fails: float, told_by: str
) -> None:
    (words,) = [w for p, w in _commands() if p == "paper" and (told_by in w if told_by else not w)]

    assert _verdict(CLAIMS[name], words, holds) is Verdict.REPRODUCED
    assert _verdict(CLAIMS[name], words, fails) is Verdict.NOT_REPRODUCED


def test_the_pair_is_judged_where_both_runs_exist_and_nowhere_else() -> None:
    each = CLAIMS[PAIRED]
    (words,) = [words for _, words in _commands() if any("against=" in word for word in words)]

    assert _verdict(each, words, 0.4) is Verdict.REPRODUCED
    assert _verdict(each, words, -0.4) is Verdict.NOT_REPRODUCED
    # No quantised run was named.
    assert _verdict(each, ["schedule=iterative"], 0.4) is Verdict.SKIPPED
    # Another exit of it was, such as a coarser rung.
    others = [word for word in words if not word.startswith("against_exit")]
    assert _verdict(each, [*others, "against_exit=2 bits"], 0.4) is Verdict.SKIPPED
