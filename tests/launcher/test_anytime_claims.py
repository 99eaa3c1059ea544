"""Claims of anytime experiments against rows that their READMEs' commands make, through the code
that judges and plans; and that figures of one device get no verdict from another one."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from judge_cases import record

from narrowgauge.judge.gather import Claimed, all_claims
from narrowgauge.judge.judging import judge
from narrowgauge.reproduce.planning import Here, plan_runs
from narrowgauge_contract.claims import Claim, ClaimKind, Verdict
from narrowgauge_contract.job import RowPlan, parse_overrides, resolve
from narrowgauge_contract.outcome import Metric, Row, Status, Validity
from narrowgauge_contract.record import Record

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CLAIMS = {each.name: each for each in all_claims(EXPERIMENTS)}
MVMC = tuple(sorted(name for name in CLAIMS if name.startswith("ddnn/mvmc-")))
RESNET = tuple(
    f"branchynet/{each}"
    for each in ("resnet-110-trunk", "b-resnet-110", "b-resnet-110-leaves-first")
)
#: Claims, and a word of the README's command that is for them.
PUBLISHED = [(name, "data=file") for name in MVMC] + [(name, "net=b-resnet-110") for name in RESNET]


def _commands(experiment: str) -> list[tuple[str, list[str]]]:
    """Profile and parameters of every `narrowgauge run` in the README."""
    text = (EXPERIMENTS / experiment / "README.md").read_text("utf-8").replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        if line.startswith(f"narrowgauge run {experiment}"):
            given = shlex.split(line, comments=True)
            words = [given[i + 1] for i, each in enumerate(given) if each == "-p"]
            asked = "--profile" in given
            found.append((given[given.index("--profile") + 1] if asked else "short", words))
    return found


def _words(experiment: str, word: str) -> list[str]:
    """The parameters of the README's one command of profile `paper` that has this word."""
    (only,) = [each for name, each in _commands(experiment) if name == "paper" and word in each]
    return only


def _rows(each: Claimed, words: Sequence[str], profile: str = "paper") -> tuple[RowPlan, ...]:
    overrides = parse_overrides(each.spec, words)
    return resolve(
        each.spec, overrides, profile=profile, target="cpu", seed=0, run_id="r"
    ).rows  # fmt: skip


def _wanted(claim: Claim) -> float:
    """A figure that fulfils it."""
    expected = claim.expected["any"]
    found = (expected.figure, expected.minimum, expected.maximum)
    return next(figure for figure in found if figure is not None)


def _measured(each: Claimed, words: Sequence[str], value: float, device: str = "EPYC") -> Record:
    """A record of a run by these words, each row of which has the claim's metric of this value."""
    plans = _rows(each, words)
    (name,) = {selection.metric for selection in each.claim.selections}
    metric = Metric(name, "1", "computed", (value,))
    rows = tuple(
        Row(
            plan.index, plan.repeat, plan.seed, dict(plan.parameters), Status.COMPLETE,
            Validity(True), {}, (metric,),
        )
        for plan in plans
    )  # fmt: skip
    return dataclasses.replace(
        record({"own": (1.0,)}, device=device),
        experiment=each.spec.id,
        profile="paper",
        parameters=dict(plans[0].parameters),
        rows=rows,
    )


@pytest.mark.parametrize(
    "experiment",
    [
        "branchynet",
        "class-maps",
        "ddnn",
        "ensembles",
        "feature-pyramid",
        "fundamentals",
        "iresnext",
        "pruning",
        "quantisation",
        "residual-cutting",
        "resolution-ladder",
        "sact",
    ],
)
def test_what_the_readme_says_can_be_run(experiment: str) -> None:
    commands = _commands(experiment)

    assert {profile for profile, _ in commands} == {"smoke", "short", "paper"}
    each = next(each for each in CLAIMS.values() if each.spec.id == experiment)
    for profile, words in commands:
        for word in words:  # a list along the runs' axis makes runs
            name, _, values = word.partition("=")
            for value in values.split(","):
                assert _rows(each, [f"{name}={value}"], profile)


@pytest.mark.parametrize(("name", "word"), PUBLISHED)
def test_what_the_readme_runs_is_admitted(name: str, word: str) -> None:
    each = CLAIMS[name]
    words = _words(each.spec.id, word)

    judged = judge(each.claim, each.spec, [_measured(each, words, _wanted(each.claim))])

    assert judged.verdict is Verdict.REPRODUCED, judged.reason


@pytest.mark.parametrize(("name", "word"), PUBLISHED)
def test_what_is_planned_is_what_the_readme_runs(name: str, word: str) -> None:
    each = CLAIMS[name]
    here = Here("cpu", ("EPYC",), accelerator=False)

    (step,) = plan_runs([each], here, order_seed=0, seed=0, cooldown_s=0.0).steps

    planned = [plan.parameters for plan in _rows(each, step.words, step.profile)]
    assert planned == [plan.parameters for plan in _rows(each, _words(each.spec.id, word))]


@pytest.mark.parametrize(
    ("name", "word", "left"),
    [
        ("ddnn/mvmc-cloud", "data=file", "lr=0.001"),
        (RESNET[0], "net=b-resnet-110", "batch_size=64"),
    ],
)
def test_another_training_than_the_published_one_is_not(name: str, word: str, left: str) -> None:
    each = CLAIMS[name]
    words = [other for other in _words(each.spec.id, word) if other != left]

    judged = judge(each.claim, each.spec, [_measured(each, words, _wanted(each.claim))])

    assert judged.verdict is Verdict.SKIPPED


@pytest.mark.parametrize("net", ["lenet", "alexnet", "resnet-110"])
@pytest.mark.parametrize(("kind", "own"), [("cpu", "Intel CPU of 3 GHz"), ("gpu", "TITAN X")])
def test_a_published_speed_up_gets_no_verdict_from_another_device(
    net: str, kind: str, own: str
) -> None:
    each = CLAIMS[f"branchynet/{net}-{kind}-speed-up"]
    where = {k: v for k, v in each.claim.selections[0].where.items() if k != "width"}
    words = [f"{name}={value}" for name, value in where.items()]
    other = "TITAN X" if kind == "cpu" else "Intel CPU of 3 GHz"
    figure = _wanted(each.claim)

    def verdict(device: str) -> Verdict:
        measured = _measured(each, words, figure, device)
        return judge(each.claim, each.spec, [measured]).verdict

    assert verdict(own) is Verdict.REPRODUCED
    assert verdict(other) is verdict("NVIDIA H200") is Verdict.NOT_APPLICABLE

    faster = CLAIMS[f"branchynet/{net}-is-faster"]
    for figure, wanted in ((1.2, Verdict.REPRODUCED), (0.9, Verdict.NOT_REPRODUCED)):
        measured = _measured(faster, words, figure, "NVIDIA H200")
        assert judge(faster.claim, faster.spec, [measured]).verdict is wanted


def test_a_binary_uplink_may_be_better_but_not_much_worse() -> None:
    claim = CLAIMS["ddnn/binary-uplink-costs-little"].claim

    assert claim.kind is ClaimKind.BOUND
    assert (claim.expected["any"].minimum, claim.expected["any"].maximum) == (0.99, None)


def test_the_cost_and_the_accuracy_of_sact_are_judged_on_the_same_rows() -> None:
    cost, right = (CLAIMS[f"sact/sact-91-at-60{end}"].claim for end in ("", "-accuracy"))

    assert cost.selections[0].where == right.selections[0].where
    assert cost.expected["any"].maximum == 60.0
    assert right.expected["any"].minimum == 91.0
