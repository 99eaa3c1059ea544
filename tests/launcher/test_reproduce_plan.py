"""Which runs claims need: each once, no more than they need, in a blocked random order."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_cases import SPEC, claim, race, value_claim

from narrowgauge.judge.gather import Claimed, all_claims, choose_claims
from narrowgauge.judge.judging import judge
from narrowgauge.reproduce.needs import Need, needs_of
from narrowgauge.reproduce.planning import Here, ReproducePlan, plan_runs, unmeasured_of
from narrowgauge.reproduce.show import plan_lines
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.codec import decode, encode
from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_contract.job import parse_overrides, resolve_all
from narrowgauge_contract.spec import parse_spec

ROOT = Path(__file__).parents[2]
LAPTOP = Here("cpu", ("EPYC",), accelerator=False)


def _claimed(*claims: Any) -> list[Claimed]:
    return [Claimed(race(), each) for each in claims]


def _value(name: str, where: str, **changes: Any) -> Any:
    metric = {"operator": "value", "of": [f"time{{{where}}}"]}
    return value_claim(id=name, metric=metric, **changes)


def _plan(claims: list[Claimed], here: Here = LAPTOP, **changes: Any) -> ReproducePlan:
    options: dict[str, Any] = {"order_seed": 1, "seed": 0, "cooldown_s": 10.0, **changes}
    return plan_runs(claims, here, **options)


def _words(needs: tuple[Need, ...]) -> list[tuple[str, ...]]:
    return [need.words(race()) for need in needs]


def test_the_sides_of_a_ratio_are_measured_in_one_run() -> None:
    (need,) = needs_of(_claimed(claim()))

    assert need.words(race()) == ("engine=eager,own",)
    assert (need.profile, need.minutes, need.claims) == ("short", 1.0, ("race/twice",))


def test_claims_of_the_same_settings_share_a_run() -> None:
    same = [claim(), claim(id="other", minutes=2), _value("part", "engine=own")]

    (need,) = needs_of(_claimed(*same))

    assert need.claims == ("race/twice", "race/other", "race/part")
    assert need.minutes == 2.0  # one run, as long as the longest of them


def test_runs_that_differ_in_one_parameter_of_rows_are_joined() -> None:
    needs = needs_of(_claimed(_value("a", "batch=8"), _value("b", "batch=16")))

    assert _words(needs) == [("batch=16,8",)]
    assert needs[0].minutes == 2.0


def test_a_parameter_of_runs_makes_a_run_each() -> None:
    across = claim(
        metric={"operator": "ratio", "of": ["time{epochs=1}", "time{epochs=2}"]}, minutes=4
    )
    needs = needs_of(_claimed(across, _value("c", "epochs=3")))

    assert sorted(_words(needs)) == [("epochs=1",), ("epochs=2",), ("epochs=3",)]
    assert sum(need.minutes for need in needs) == 5.0


def test_long_runs_are_not_joined() -> None:
    long = [_value("a", "batch=8", minutes=20), _value("b", "batch=16", minutes=20)]

    assert len(needs_of(_claimed(*long))) == 2


def test_profiles_are_runs_of_their_own() -> None:
    needs = needs_of(
        _claimed(_value("a", "engine=own"), _value("b", "engine=own", profile="paper"))
    )

    assert [need.profile for need in needs] == ["short", "paper"]


def test_a_whole_profile_costs_what_the_profile_says() -> None:
    body = {**SPEC, "profiles": {"short": {"minutes": 7, "disk_gb": 0.5}}}
    whole = Claimed(parse_spec(body), _value("a", "engine=eager"))

    (need,) = needs_of([whole])

    assert (need.words(whole.spec), need.minutes, need.disk_gb) == ((), 7, 0.5)


WHERES = st.lists(
    st.tuples(
        st.sampled_from(["eager", "graph", "own"]),
        st.sampled_from([1, 8, 16]),
        st.sampled_from([1, 2]),
        st.integers(1, 25),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=30, deadline=None)
@given(WHERES)
def test_every_claim_gets_its_rows(wheres: list[tuple[str, int, int, int]]) -> None:
    claims = _claimed(
        *(
            _value(f"c{i}", f"engine={e}, batch={b}, epochs={n}", minutes=m)
            for i, (e, b, n, m) in enumerate(wheres)
        )
    )
    plan = _plan(claims)

    rows: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for step in plan.steps:
        jobs = resolve_all(
            race(), parse_overrides(race(), step.words), profile=step.profile, target="cpu", seed=0
        )
        assert len(jobs) == 1  # a step is one run
        for name in step.claims:
            rows[name] += [row.parameters for row in jobs[0].rows]
    for each in claims:
        (selection,) = each.claim.selections
        assert any(
            all(row[name] == value for name, value in selection.where.items())
            for row in rows[each.name]
        )
    settings_of = [(s.experiment, s.profile, s.words) for s in plan.steps]
    assert len(set(settings_of)) == len(settings_of)  # each once


def test_the_order_is_that_of_the_seed() -> None:
    claims = all_claims(ROOT / "experiments")

    plans = [_plan(list(claims), order_seed=seed) for seed in (1, 1, 2)]

    assert plans[0] == plans[1]
    assert plans[0].steps != plans[2].steps
    assert sorted(plans[0].steps, key=repr) == sorted(plans[2].steps, key=repr)
    left = collections.Counter(step.experiment for step in plans[0].steps)
    first = [step.experiment for step in plans[0].steps[: len(left)]]
    assert len(set(first)) == len(left)  # a block has one run of each experiment


def test_what_this_host_cannot_answer_gets_no_run() -> None:
    needs_gpu = {**SPEC, "requires": {"accelerator": True}}
    claims = [
        *_claimed(value_claim(id="h200", device="NVIDIA H200")),
        *_claimed(claim(id="shape", device="NVIDIA H200")),
        *_claimed(value_claim(id="jetson", expected={"jetson": {"figure": 1, "tolerance": 0.1}})),
        *_claimed(claim(id="never", not_comparable="another protocol")),
        Claimed(parse_spec(needs_gpu), claim(id="gpu")),
    ]

    plan = _plan(claims)

    assert [step.claims for step in plan.steps] == [("race/shape",)]
    why = unmeasured_of(plan)
    assert why["race/h200"].verdict is Verdict.NOT_APPLICABLE
    assert why["race/jetson"].verdict is Verdict.NOT_APPLICABLE
    assert why["race/gpu"].verdict is Verdict.SKIPPED
    assert "race/never" not in why  # its own reason is the judge's
    there = _plan(claims, Here("jetson", ("NVIDIA H200",), accelerator=True))
    assert not there.left_out


def test_a_claim_that_is_measured_by_hand_gets_no_run_and_names_the_commands() -> None:
    steps = "narrowgauge run race; narrowgauge run race -p limit=what it found"
    by_hand = claim(id="chain", by_hand=steps)
    plan = _plan([*_claimed(by_hand), *_claimed(claim(id="plain"))])

    assert [step.claims for step in plan.steps] == [("race/plain",)]
    why = unmeasured_of(plan)["race/chain"]
    assert why.verdict is Verdict.SKIPPED
    assert steps in why.reason
    found = judge(by_hand, race(), ())
    assert found.command == steps
    assert steps not in found.flip


def test_over_a_budget_the_cheapest_are_taken() -> None:
    claims = _claimed(
        _value("long", "epochs=1", minutes=20),
        _value("short", "epochs=2", minutes=1),
        _value("middle", "epochs=3", minutes=3),
    )

    plan = _plan(claims, budget_s=5 * 60.0)

    assert sorted(step.claims for step in plan.steps) == [("race/middle",), ("race/short",)]
    assert plan.seconds == 4 * 60.0 + 10.0
    (left,) = plan.left_out
    assert (left.claim, left.verdict) == ("race/long", Verdict.SKIPPED)
    assert "budget of 5 min" in left.reason


def test_a_claim_of_two_runs_is_taken_whole_or_not() -> None:
    across = claim(
        metric={"operator": "ratio", "of": ["time{epochs=1}", "time{epochs=2}"]}, minutes=8
    )

    plan = _plan(_claimed(across), budget_s=5 * 60.0)

    assert plan.steps == ()
    assert [each.claim for each in plan.left_out] == ["race/twice"]


def test_a_plan_is_shown_with_time_and_disk_first_and_reads_back() -> None:
    plan = _plan(_claimed(claim(), value_claim(id="h200", device="NVIDIA H200")), budget_s=600.0)

    lines = list(plan_lines(plan))

    assert "1 run: about 1 min 0 s" in lines[0]
    assert "at most 10 min" in lines[0]
    assert "0.1 GB of disk" in lines[0]
    assert "seed 1" in lines[1]
    assert lines[2].endswith("narrowgauge run race --profile short -p engine=eager,own")
    assert "race/h200" in lines[3]
    assert decode(ReproducePlan, encode(plan), "plan") == plan


def test_claims_are_named_by_id_by_both_or_by_experiment() -> None:
    known = all_claims(ROOT / "experiments")

    (one,) = choose_claims(known, ["mnist-fp32-accuracy"])
    assert choose_claims(known, ["mnist/mnist-fp32-accuracy"]) == (one,)
    assert len(choose_claims(known, ["mnist", "mnist-fp32-accuracy"])) == sum(
        each.spec.id == "mnist" for each in known
    )
    assert choose_claims(known, []) == known
    with pytest.raises(UnknownNameError, match="mnist-fp32-accuracy"):
        choose_claims(known, ["mnist-fp32-acuracy"])


@pytest.mark.parametrize(
    ("name", "planned"),
    [("NVIDIA GeForce GTX 1080", 1), ("NVIDIA GeForce GTX 1080 Ti", 0)],
)
def test_another_product_of_a_name_is_not_the_device(name: str, planned: int) -> None:
    claims = _claimed(value_claim(device="GeForce GTX 1080"))
    here = Here("cpu", ("EPYC", name), accelerator=True)

    plan = plan_runs(claims, here, order_seed=1, seed=0, cooldown_s=0.0)

    assert len(plan.steps) == planned
