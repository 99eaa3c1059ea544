"""Verdicts: each of the seven, what they rest on, and that nothing unlike is put together."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from judge_cases import (
    FAST,
    SLOW,
    both,
    bound_claim,
    changed_row,
    changed_sample,
    claim,
    invalid,
    race,
    record,
    row,
    skipped,
    value_claim,
)
from result_cases import host

from narrowgauge.judge.bars import Unmeasured
from narrowgauge.judge.judging import judge
from narrowgauge.judge.model import Estimate, Judgement
from narrowgauge.judge.rows import departures_of
from narrowgauge.judge.words import estimate_words
from narrowgauge_contract.claims import Claim, Expectation, Verdict
from narrowgauge_contract.outcome import Metric, Status, Validity
from narrowgauge_contract.record import Hashes, ImageFacts, Record
from narrowgauge_contract.spec import ExperimentSpec


def judged(one: Claim, *records: Record, **more: Any) -> Judgement:
    return judge(one, race(), records, **more)


def test_a_ratio_within_its_tolerance_is_reproduced() -> None:
    found = judged(claim(), both())

    assert found.verdict is Verdict.REPRODUCED
    assert found.estimate is not None
    assert found.estimate.figure == pytest.approx(2.0, rel=0.02)
    assert found.estimate.low is not None
    assert found.estimate.high is not None
    assert found.estimate.low < found.estimate.figure < found.estimate.high
    assert found.estimate.repeats == len(found.estimate.per_repeat) == 6
    assert found.estimate.rows[0] == "20261121T100000Z-race-aaaaaa#0"
    assert [part.label for part in found.parts] == ["time{engine=eager}", "time{engine=own}"]
    assert (found.target, found.device, found.device_matches) == ("cpu", "EPYC", True)
    assert found.runs == ("20261121T100000Z-race-aaaaaa",)
    assert found.command == "narrowgauge reproduce race/twice"
    assert "1.8 to 2.2" in found.reason


def test_a_ratio_beyond_its_tolerance_is_not() -> None:
    found = judged(claim(expected={"any": {"figure": 3.0, "tolerance": 0.1}}), both())

    assert found.verdict is Verdict.NOT_REPRODUCED
    assert "2.7 to 3.3" in found.reason
    assert "2.7 to 3.3" in found.flip


def test_an_interval_across_the_edge_is_unstable() -> None:
    wild = (1.0, 1.6, 0.7, 1.1, 1.4, 0.8)

    found = judged(claim(), both(own=wild))

    assert found.verdict is Verdict.UNSTABLE
    assert "more repeats" in found.flip


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ((1.0, 1.05, 0.95), Verdict.REPRODUCED),
        ((1.0, 1.05, 1.2), Verdict.UNSTABLE),
        ((1.3, 1.2, 1.25), Verdict.NOT_REPRODUCED),
    ],
)
def test_three_repeats_have_no_interval_and_decide_together(
    own: tuple[float, ...], verdict: Verdict
) -> None:
    found = judged(value_claim(), record({"own": own}))

    assert found.verdict is verdict
    assert found.estimate is not None
    assert found.estimate.low is None
    assert "fewer than 6" in found.estimate.no_interval


@pytest.mark.parametrize(
    ("expected", "verdict"),
    [
        ({"maximum": 1.1}, Verdict.REPRODUCED),
        ({"minimum": 0.9}, Verdict.REPRODUCED),
        ({"minimum": 1.1}, Verdict.NOT_REPRODUCED),
        ({"maximum": 1.0}, Verdict.UNSTABLE),
        ({"minimum": 0.5, "maximum": 1.5}, Verdict.REPRODUCED),
    ],
)
def test_a_bound(expected: dict[str, float], verdict: Verdict) -> None:
    assert judged(bound_claim(**expected), both()).verdict is verdict


def test_equivalence_is_not_the_lack_of_a_difference() -> None:
    def equal(tolerance: float) -> Claim:
        expected = {"any": {"tolerance": tolerance}}
        return claim(kind="equivalence", expected=expected, minimum_repeats=6)

    same = both(eager=tuple(v * 1.001 for v in reversed(FAST)))

    assert judged(equal(0.2), same).verdict is Verdict.REPRODUCED
    assert judged(equal(0.001), same).verdict is Verdict.UNSTABLE
    assert judged(equal(0.2), both()).verdict is Verdict.NOT_REPRODUCED
    estimate = judged(equal(0.2), same).estimate
    assert estimate is not None
    assert estimate.coverage == 0.90  # two one-sided tests at 5 %
    assert "(90 % interval " in judged(equal(0.2), same).reason
    assert "(95 % interval " in judged(claim(), both()).reason


def test_too_few_processes_tell_no_equivalence() -> None:
    """By the parser there are six; a claim that was made otherwise gets no verdict for less."""
    expected = {"any": {"tolerance": 0.2}}
    ratio = {"operator": "ratio", "of": ["time{engine=eager}", "time{engine=own}"]}
    six = claim(kind="equivalence", expected=expected, minimum_repeats=6, metric=ratio)
    few = dataclasses.replace(six, minimum_repeats=3)

    for eager in (FAST, SLOW):
        found = judged(few, both(eager=eager[:5], own=tuple(reversed(FAST[:5]))))
        assert found.verdict is Verdict.UNSTABLE
        assert "fewer than 6" in found.reason
        assert "do not tell that figures agree" in found.reason
        assert found.flip == "enough repeats for an interval"
    # An extreme has none, however many there are.
    metric = {**ratio, "statistic": "max"}
    extreme = claim(kind="equivalence", expected=expected, minimum_repeats=6, metric=metric)
    found = judged(extreme, both(eager=tuple(reversed(FAST))))
    assert found.verdict is Verdict.UNSTABLE
    assert "only an interval tells that figures agree" in found.reason
    # That six do not differ at all is no lack of an interval.
    assert judged(six, both(eager=(1.0,) * 6, own=(1.0,) * 6)).verdict is Verdict.REPRODUCED


def test_a_claim_that_allows_any_figure_is_not_judged() -> None:
    anything = dataclasses.replace(bound_claim(minimum=1.0), expected={"any": Expectation()})

    found = judged(anything, both())

    assert (found.verdict, found.reason) == (Verdict.INVALID, "the claim allows any figure")


def test_a_mean_is_that_of_a_processs_samples() -> None:
    metric = {"operator": "value", "of": ["time{engine=own}"], "statistic": "mean"}
    one = record({"own": (1.0, 1.0, 1.0)})
    for each in one.rows:
        samples = dataclasses.replace(each.metrics[0], values=(1.0, 1.0, 4.0))
        one = changed_row(one, each.index, metrics=(samples,))
    warm = one
    for each in one.rows:
        epochs = dataclasses.replace(each.metrics[0], index="epoch", values=(9.0, 1.0, 1.0, 4.0))
        warm = changed_row(warm, each.index, metrics=(epochs,))

    for found in (judged(value_claim(2.0, metric=metric), r) for r in (one, warm)):
        assert found.verdict is Verdict.REPRODUCED
        assert found.estimate is not None
        assert found.estimate.per_repeat == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("figure", "verdict"), [(3.0, Verdict.REPRODUCED), (0.5, Verdict.NOT_REPRODUCED)]
)
def test_a_trend_asks_for_the_side_only(figure: float, verdict: Verdict) -> None:
    assert judged(claim(kind="trend", expected={"any": {"figure": figure}}), both()).verdict is (
        verdict
    )


def _ordering(*engines: str) -> Claim:
    of = [f"time{{engine={engine}}}" for engine in engines]
    return claim(kind="ordering", metric={"operator": "order", "of": of}, expected={"any": {}})


def test_an_ordering_rises() -> None:
    three = record({"eager": SLOW, "graph": tuple(v + 1 for v in SLOW), "own": FAST})

    good = judged(_ordering("own", "eager", "graph"), three)
    bad = judged(_ordering("own", "graph", "eager"), three)

    assert good.verdict is Verdict.REPRODUCED
    assert good.order == ("time{engine=own}", "time{engine=eager}", "time{engine=graph}")
    assert bad.verdict is Verdict.NOT_REPRODUCED
    assert "time{engine=eager} does not lie above time{engine=graph}" in bad.reason
    assert bad.estimate is None


def test_an_ordering_that_repeats_do_not_agree_on_is_unstable() -> None:
    mixed = record({"eager": (1.0, 1.2, 0.9), "own": (1.1, 1.0, 1.1)})

    assert judged(_ordering("own", "eager"), mixed).verdict is Verdict.UNSTABLE


def test_equal_figures_do_not_rise() -> None:
    same = record({"eager": FAST, "own": FAST})

    assert judged(_ordering("own", "eager"), same).verdict is Verdict.NOT_REPRODUCED


def test_a_geometric_mean_is_over_every_figure() -> None:
    of = ["time{engine=eager}", "time{engine=own}"]
    mean = value_claim(2**0.5, 0.05, metric={"operator": "geomean", "of": of})

    found = judged(mean, both())

    assert found.verdict is Verdict.REPRODUCED
    assert found.estimate is not None
    assert found.estimate.figure == pytest.approx(2**0.5, rel=0.01)
    assert len(found.estimate.per_repeat) == 6


@pytest.mark.parametrize(
    ("statistic", "figure"), [("min", 0.98), ("max", 1.02), ("mean", 1.0), ("last", 1.0)]
)
def test_statistics(statistic: str, figure: float) -> None:
    metric = {"operator": "value", "of": ["time{engine=own}"], "statistic": statistic}

    found = judged(value_claim(figure, 0.05, metric=metric), both())

    assert found.verdict is Verdict.REPRODUCED
    assert found.estimate is not None
    assert found.estimate.figure == pytest.approx(figure)


def test_an_extreme_decides_alone() -> None:
    """The least of all has to hold a bound; that most lie above says nothing."""
    metric = {"operator": "value", "of": ["time{engine=own}"], "statistic": "min"}
    bound = claim(kind="bound", metric=metric, expected={"any": {"minimum": 0.99}})

    found = judged(bound, both())
    assert found.verdict is Verdict.NOT_REPRODUCED
    assert found.flip == "a repeat beyond all of these that is at least 0.99"
    held = claim(kind="bound", metric=metric, expected={"any": {"maximum": 0.99}})
    assert judged(held, both()).flip == "a repeat beyond all of these that is not at most 0.99"


# What keeps a verdict from being REPRODUCED, or from being at all.


def test_nothing_measured_is_skipped_and_says_how_to_measure() -> None:
    found = judged(claim())

    assert found.verdict is Verdict.SKIPPED
    assert (found.flip, found.command) == ("a run of it", "narrowgauge reproduce race/twice")
    assert (found.estimate, found.runs) == (None, ())


def test_whoever_planned_the_runs_knows_why_there_is_none() -> None:
    known = Unmeasured(Verdict.SKIPPED, "no time was left")

    assert judged(claim(), unmeasured=known).reason == "no time was left"
    # But what was measured counts.
    assert judged(claim(), both(), unmeasured=known).verdict is Verdict.REPRODUCED


def test_what_the_host_lacks_is_skipped_with_its_words() -> None:
    found = judged(claim(), skipped(both()))

    assert found.verdict is Verdict.SKIPPED
    assert found.reason == "TensorRT is not here: no module named tensorrt"


def test_one_side_alone_is_skipped_and_named() -> None:
    found = judged(claim(), record({"own": FAST}))

    assert found.verdict is Verdict.SKIPPED
    assert found.reason == "no run has measured time{engine=eager}"


def test_a_side_whose_rows_are_all_invalid_is_invalid_and_not_skipped() -> None:
    eager = [r.index for r in both().rows if r.parameters["engine"] == "eager"]

    found = judged(claim(), invalid(both(), *eager))

    assert found.verdict is Verdict.INVALID
    assert found.reason == "no valid row of time{engine=eager}: 6 rows are INVALID"
    # An invalid row of the side that was measured is no reason for the other to lack.
    assert judged(claim(), invalid(record({"own": FAST}), 0)).verdict is Verdict.SKIPPED


def test_a_claim_that_nothing_can_be_held_against() -> None:
    found = judged(claim(not_comparable="it is of another protocol"), both())

    assert (found.verdict, found.reason) == (Verdict.NOT_APPLICABLE, "it is of another protocol")


def test_invalid_rows_do_not_count_and_are_named() -> None:
    found = judged(claim(minimum_repeats=6), invalid(both(), 0))

    assert found.verdict is Verdict.INVALID
    assert "5 valid repeats of the 6" in found.reason
    assert found.exclusions[0].why == "INVALID: it throttled"
    assert found.exclusions[0].row == 0


def test_only_invalid_rows() -> None:
    found = judged(value_claim(), invalid(record({"own": (1.0, 1.0)}), 0, 1))

    assert found.verdict is Verdict.INVALID
    assert "it throttled" in found.reason


def cut_off(before: Record, *indices: int) -> Record:
    for index in indices:
        before = changed_row(
            before, index, status=Status.INTERRUPTED, metrics=(),
            validity=Validity(False, ("the row did not complete: interrupted",)),
        )  # fmt: skip
    return before


BUDGET = Unmeasured(Verdict.SKIPPED, "the budget was spent before its run")


@pytest.mark.parametrize("rows", [(0,), (0, 1)])
def test_rows_that_the_budget_cut_off_are_skipped_and_not_invalid(rows: tuple[int, ...]) -> None:
    """Alone, and beside valid ones that are too few."""
    run = record({"own": (1.0, 1.0)})
    found = judged(value_claim(minimum_repeats=2), cut_off(run, *rows), unmeasured=BUDGET)

    assert found.verdict is Verdict.SKIPPED
    assert found.reason == BUDGET.reason


def test_a_row_that_is_wrong_beside_one_cut_off_is_invalid() -> None:
    run = invalid(cut_off(record({"own": (1.0, 1.0)}), 0), 1)
    assert judged(value_claim(), run, unmeasured=BUDGET).verdict is Verdict.INVALID


def test_rows_cut_off_without_a_reason_from_outside_are_invalid() -> None:
    """Of stored records nobody knows who ended them."""
    run = cut_off(record({"own": (1.0, 1.0)}), 0, 1)
    assert judged(value_claim(), run).verdict is Verdict.INVALID


def test_enough_valid_rows_are_judged_whatever_was_cut_off() -> None:
    run = cut_off(record({"own": (1.0, 1.0, 1.0)}), 2)
    found = judged(value_claim(minimum_repeats=2), run, unmeasured=BUDGET)
    assert found.verdict not in (Verdict.SKIPPED, Verdict.INVALID)


def test_too_few_repeats_are_invalid() -> None:
    found = judged(claim(minimum_repeats=7), both())

    assert found.verdict is Verdict.INVALID
    assert "6 valid repeats of the 7" in found.reason


def test_a_figure_without_a_logarithm_is_invalid() -> None:
    assert judged(claim(), both(own=(0.0, *FAST[1:]))).verdict is Verdict.INVALID


def test_what_is_not_a_number_is_not_reproduced() -> None:
    diverged = record({"own": (1.0, math.nan, 1.0)})

    assert judged(value_claim(), diverged).verdict is Verdict.NOT_REPRODUCED
    assert judged(_ordering("own", "eager"), both(eager=(math.nan,) * 6)).verdict is (
        Verdict.NOT_REPRODUCED
    )


def test_without_a_host_it_is_never_reproduced() -> None:
    found = judged(claim(), dataclasses.replace(both(), host=None))

    assert found.verdict is Verdict.REPRODUCED_TREND
    assert "nobody recorded the host" in found.reason
    assert "a run that the launcher starts could make it REPRODUCED" in found.flip


def test_a_stand_in_is_never_reproduced() -> None:
    image = ImageFacts("narrowgauge/cpu:local", "sha256:aa", "busybox", None, "tag", stand_in=True)

    found = judged(claim(), both(facts=host(image=image)))

    assert found.verdict is Verdict.REPRODUCED_TREND
    assert "stand-in" in found.reason


def test_on_other_hardware_only_the_direction_is_asked_for() -> None:
    jetson = claim(device="Jetson AGX Xavier", expected={"any": {"figure": 9.0, "tolerance": 0.1}})

    found = judged(jetson, both())

    assert found.verdict is Verdict.REPRODUCED_TREND
    assert not found.device_matches
    assert "more than 1" in found.reason
    against = judged(jetson, both(eager=FAST, own=SLOW))
    assert against.verdict is Verdict.NOT_REPRODUCED
    assert "Jetson AGX Xavier" in against.reason


def test_an_absolute_figure_of_other_hardware_is_not_applicable() -> None:
    found = judged(value_claim(device="NVIDIA H200"), both())

    assert found.verdict is Verdict.NOT_APPLICABLE
    assert "EPYC" in found.reason
    assert judged(value_claim(device="epyc"), both()).verdict is Verdict.REPRODUCED


@pytest.mark.parametrize(
    ("own", "verdict"),
    [((1.5, 1.6, 1.4), Verdict.REPRODUCED_TREND), ((0.5, 0.6, 0.4), Verdict.NOT_REPRODUCED)],
)
def test_a_ratio_that_was_measured_as_one_has_a_direction(
    own: tuple[float, ...], verdict: Verdict
) -> None:
    """As `times_gemm`, of two kernels in turns in one row."""
    elsewhere = value_claim(3.1, 0.25, kind="ratio", device="Tesla V100")

    assert judged(elsewhere, record({"own": own})).verdict is verdict


@pytest.mark.parametrize(
    ("ran_on", "device", "same"),
    [
        ("NVIDIA GeForce GTX 1080", "GeForce GTX 1080", True),
        ("NVIDIA GeForce GTX 1080 Ti", "GeForce GTX 1080", False),
        ("NVIDIA GeForce GTX 1080 with Max-Q Design", "GeForce GTX 1080 with Max-Q", True),
        ("NVIDIA GeForce RTX 2080 SUPER", "RTX 2080", False),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090", False),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090", False),
        ("NVIDIA GeForce RTX 4090 Desktop", "RTX 4090", True),
        ("Tesla V100-SXM2-16GB", "tesla v100", True),
        ("NVIDIA H200", "NVIDIA H20", False),
    ],
)
def test_a_device_is_named_by_whole_words(ran_on: str, device: str, *, same: bool) -> None:
    assert judged(claim(device=device), both(device=ran_on)).device_matches is same


def test_what_ran_on_the_cpu_is_no_figure_of_the_hosts_gpu() -> None:
    facts = host()
    gpus = ({"name": "NVIDIA H200"},)
    facts = dataclasses.replace(facts, machine=dataclasses.replace(facts.machine, gpus=gpus))
    one = both(facts=facts)

    assert judged(value_claim(device="NVIDIA H200"), one).verdict is Verdict.NOT_APPLICABLE
    # Where nobody looked from inside, the one GPU of the host is what it was; of two, who knows.
    blind = dataclasses.replace(one, inside=None)
    assert judged(claim(device="NVIDIA H200"), blind).device_matches
    machine = dataclasses.replace(facts.machine, gpus=gpus * 2)
    two = dataclasses.replace(blind, host=dataclasses.replace(facts, machine=machine))
    assert not judged(claim(device="NVIDIA H200"), two).device_matches


def test_a_target_without_an_expectation_gets_the_shape_of_another() -> None:
    desktop = claim(expected={"desktop": {"figure": 2.0, "tolerance": 0.1}})

    assert judged(desktop, both()).verdict is Verdict.REPRODUCED_TREND
    assert judged(desktop, both(target="desktop")).verdict is Verdict.REPRODUCED
    assert judged(desktop, both()).expected_for == "desktop"


def test_made_up_data_and_played_energy_do_not_count() -> None:
    made_up = dataclasses.replace(both(), synthetic=True)
    played = both()
    for each in played.rows:
        metrics = (dataclasses.replace(each.metrics[0], source="replay"),)
        played = changed_row(played, each.index, metrics=metrics)

    for bad, word in ((made_up, "made up"), (played, "played from a recording")):
        found = judged(claim(), bad)
        assert found.verdict is Verdict.SKIPPED
        assert word in found.reason


# Nothing unlike is put together.


def _two(**changes: Any) -> tuple[Record, Record]:
    slow, fast = (tuple(v + 0.001 for v in values[:3]) for values in (SLOW, FAST))
    older = both(run_id="20261121T100000Z-race-aaaaaa", eager=slow, own=fast)
    return older, both(run_id="20261122T100000Z-race-bbbbbb", **changes)


def test_records_that_agree_are_put_together() -> None:
    found = judged(claim(minimum_repeats=9), *_two())

    assert found.verdict is Verdict.REPRODUCED
    assert found.estimate is not None
    assert found.estimate.repeats == 9
    assert found.runs == ("20261122T100000Z-race-bbbbbb", "20261121T100000Z-race-aaaaaa")
    assert found.disagreements == ()


def test_a_copy_of_a_run_is_no_further_repeat() -> None:
    copy = dataclasses.replace(both(), run_id="20261122T100000Z-race-bbbbbb")

    found = judged(claim(minimum_repeats=7), both(), copy)

    assert found.verdict is Verdict.INVALID
    assert "6 valid repeats of the 7" in found.reason
    assert found.runs == (copy.run_id,)
    assert {each.why for each in found.exclusions} == {f"the same samples are in {copy.run_id}"}


def test_a_figure_without_a_clock_counts_once_per_seed() -> None:
    def accuracies(run_id: str, *values: float) -> Record:
        one = record({"own": values}, run_id=run_id)
        for each in one.rows:
            metric = dataclasses.replace(each.metrics[0], unit="%", source="count")
            one = changed_row(one, each.index, metrics=(metric,))
        return one

    older = accuracies("20261121T100000Z-race-aaaaaa", 1.0, 1.1, 1.2, 1.3)
    newer = accuracies("20261122T100000Z-race-bbbbbb", 1.01, 1.1, 1.2)

    found = judged(value_claim(1.1, 0.3), older, newer)

    assert found.estimate is not None
    assert found.estimate.per_repeat == (1.01, 1.1, 1.2, 1.3)
    assert {(each.run, each.row, each.why) for each in found.exclusions} == {
        (older.run_id, i, f"the same seed was measured in {newer.run_id}") for i in range(3)
    }


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"device": "Xeon"}, "device: Xeon / EPYC"),
        ({"target": "desktop"}, "target: desktop / cpu"),
        ({"limit": 5.0}, "parameter limit: 5.0 / 2.0"),
    ],
)
def test_records_that_differ_in_a_checked_fact_are_not_and_it_is_named(
    changes: dict[str, Any], fact: str
) -> None:
    found = judged(claim(minimum_repeats=9), *_two(**changes))

    assert found.verdict is Verdict.INVALID  # 6 repeats and 3 are not 9
    assert found.runs == ("20261122T100000Z-race-bbbbbb",)
    assert found.disagreements == (
        f"20261122T100000Z-race-bbbbbb / 20261121T100000Z-race-aaaaaa: {fact}",
    )


def test_a_newer_run_of_one_side_alone_does_not_unseat_an_older_one_of_both() -> None:
    older = both(run_id="20261121T100000Z-race-aaaaaa")
    alone = record({"own": SLOW}, run_id="20261122T100000Z-race-bbbbbb", limit=5.0)

    found = judged(claim(), alone, older)

    assert (found.verdict, found.runs) == (Verdict.REPRODUCED, (older.run_id,))
    assert [(each.run, each.why) for each in found.exclusions if each.row is None] == [
        (alone.run_id, f"it differs from {older.run_id} in parameter limit")
    ]
    # What only one of them has is asked of the newest.
    assert judged(value_claim(2.0), alone, older).runs == (alone.run_id,)


def test_a_newer_run_of_too_few_repeats_does_not_unseat_one_of_enough() -> None:
    older = both(run_id="20261121T100000Z-race-aaaaaa")
    few = both(run_id="20261122T100000Z-race-bbbbbb", eager=SLOW[:2], own=FAST[:2], limit=5.0)

    found = judged(claim(), few, older)

    assert (found.verdict, found.runs) == (Verdict.REPRODUCED, (older.run_id,))
    assert [(each.run, each.why) for each in found.exclusions if each.row is None] == [
        (few.run_id, f"it differs from {older.run_id} in parameter limit")
    ]
    # Enough rows of which too few may be used are no reason to look for older ones; and where none
    # has enough, the newest counts.
    enough = both(run_id=few.run_id, limit=5.0)
    eager = [each.index for each in enough.rows if each.parameters["engine"] == "eager"]
    assert judged(claim(), invalid(enough, *eager[2:]), older).verdict is Verdict.INVALID
    assert judged(claim(minimum_repeats=9), few, older).runs == (few.run_id,)
    # Of rows that were cut off nothing is wrong, and the older run is whole.
    found = judged(claim(), cut_off(enough, *eager[2:]), older)
    assert (found.verdict, found.runs) == (Verdict.REPRODUCED, (older.run_id,))


def test_runs_by_different_placement_plans_stand_beside_each_other_where_the_claim_names_them() -> (
    None
):
    slow = dataclasses.replace(record({"eager": SLOW}), plan={"eager": {"a": 1}})
    fast = dataclasses.replace(
        record({"own": FAST}, run_id="20261122T100000Z-race-bbbbbb"), plan={"own": {"a": 2}}
    )

    found = judged(claim(), slow, fast)

    assert (found.verdict, set(found.runs)) == (Verdict.REPRODUCED, {slow.run_id, fast.run_id})
    # One name for two plans, or a plan that no selection speaks of, keeps them apart.
    for plan in ({"own": {"a": 2}, "eager": {"a": 9}}, {"own": {"a": 2}, "graph": {"a": 3}}):
        other = dataclasses.replace(fast, plan=plan)
        assert judged(claim(), slow, other).verdict is Verdict.SKIPPED


def test_a_newer_run_on_another_device_does_not_unseat_one_on_the_claims_own() -> None:
    own = both(run_id="20261121T100000Z-race-aaaaaa", device="Xeon 8")
    newer = both(run_id="20261122T100000Z-race-bbbbbb")

    found = judged(claim(device="Xeon"), newer, own)

    assert (found.verdict, found.runs) == (Verdict.REPRODUCED, (own.run_id,))
    # Not even by being right where the device's own run was not.
    slow = both(eager=FAST, run_id=own.run_id, device="Xeon 8")
    assert judged(claim(device="Xeon"), newer, slow).verdict is Verdict.NOT_REPRODUCED
    assert judged(claim(device="Xeon"), newer).verdict is Verdict.REPRODUCED_TREND
    assert judged(claim(), newer, own).runs == (newer.run_id,)


def test_a_newer_run_whose_other_side_went_wrong_is_not_passed_over() -> None:
    newer = both(run_id="20261122T100000Z-race-bbbbbb", limit=5.0)
    eager = [r.index for r in newer.rows if r.parameters["engine"] == "eager"]
    rows = zip(newer.rows, skipped(newer).rows, strict=True)
    lacking = dataclasses.replace(
        newer, rows=tuple(gone if r.index in eager else r for r, gone in rows)
    )

    assert judged(claim(), invalid(newer, *eager), both()).verdict is Verdict.INVALID
    assert judged(claim(), lacking, both()).verdict is Verdict.SKIPPED


def test_every_checked_fact_is_checked() -> None:
    one = both()
    inside = one.inside
    assert inside is not None
    joules = tuple(
        dataclasses.replace(r, metrics=(*r.metrics, Metric("energy", "J", "nvml-counter", (1.0,))))
        for r in one.rows
    )
    facts = host()
    mode = dataclasses.replace(facts, machine=dataclasses.replace(facts.machine, power_mode="15W"))
    others = {
        "torch": dataclasses.replace(one, inside=dataclasses.replace(inside, torch="1.8.0")),
        "kernels_build": dataclasses.replace(
            one, inside=dataclasses.replace(inside, kernels_build="k")
        ),
        "measurement": dataclasses.replace(one, inside=dataclasses.replace(inside, measurement=2)),
        "power_mode": dataclasses.replace(one, host=mode),
        "energy_source": dataclasses.replace(one, rows=joules),
        "plan": dataclasses.replace(one, plan={"p": {"a": 1}}),
        "source": dataclasses.replace(one, hashes=Hashes(None, "d" * 64, "c" * 64)),
        "experiment_code": dataclasses.replace(one, hashes=Hashes(None, "b" * 64, "d" * 64)),
    }
    for fact, other in others.items():
        later = dataclasses.replace(other, run_id="20261122T100000Z-race-bbbbbb")
        (line,) = judged(claim(), one, later).disagreements
        assert f": {fact}: " in line


def test_rows_of_other_settings_than_the_profiles_do_not_count() -> None:
    found = judged(claim(), both(epochs=1))

    assert found.verdict is Verdict.SKIPPED
    assert "epochs is 1, and the claim's profile has 4 or 9" in found.reason
    # A larger profile's setting does, and so does a longer measurement of the same.
    assert judged(claim(), both(epochs=9)).verdict is Verdict.REPRODUCED
    assert judged(claim(), both(limit=60.0)).verdict is Verdict.REPRODUCED


@pytest.mark.parametrize("unit", ["", "1", "MAC"])
def test_of_a_plain_number_no_unit_is_written_however_large(unit: str) -> None:
    for figure in (2.5, 2.5e7):
        words = estimate_words(Estimate("median", figure, unit, None, None, 1))

        assert words == f"{figure:.4g}{' MAC' if unit == 'MAC' else ''} (1 repeat)"


def test_an_empty_value_is_seen_in_what_a_row_or_run_departs_by() -> None:
    cut = row(0, 0, (1.0,), cut="layer4", form="")
    (selection, *_) = claim().selections

    departures = list(departures_of(cut, selection, {"cut": ("",), "form": ("own",)}))

    assert departures == [
        "cut is layer4, and the claim's profile has ''",
        "form is '', and the claim's profile has own",
    ]
    (line,) = judged(claim(), both(cut=["", "layer4"]), _two(cut="")[1]).disagreements
    assert line.endswith(": parameter cut: '' / '',layer4")


def test_another_recipe_shows_a_claim_as_a_trend_and_says_so() -> None:
    found = judged(claim(), both(lr=0.3))

    assert found.verdict is Verdict.REPRODUCED_TREND
    assert "lr is 0.3, and the claim's profile has 0.1" in found.reason
    assert "a run of the profile short" in found.flip


def test_one_side_of_the_profiles_recipe_does_not_hide_both_of_another() -> None:
    both_quick = both(lr=0.3)
    alone = record({"own": FAST}, run_id="20261122T100000Z-race-bbbbbb")

    found = judged(claim(), alone, both_quick)

    assert (found.verdict, found.runs) == (Verdict.REPRODUCED_TREND, (both_quick.run_id,))
    # What went wrong with the profile's own is not passed over.
    spoiled = both(run_id="20261122T100000Z-race-bbbbbb")
    eager = [r.index for r in spoiled.rows if r.parameters["engine"] == "eager"]
    assert judged(claim(), invalid(spoiled, *eager), both_quick).verdict is Verdict.INVALID


@pytest.mark.parametrize("eager", [FAST, (1.0, 3.0, 1.0, 3.0, 1.0, 3.0)], ids=["beside", "across"])
def test_another_recipe_refutes_nothing(eager: tuple[float, ...]) -> None:
    found = judged(claim(), both(eager=eager, lr=0.3))

    assert found.verdict is Verdict.SKIPPED
    assert "neither shows nor refutes it: lr is 0.3" in found.reason
    few = judged(claim(), both(eager=SLOW[:2], own=FAST[:2], lr=0.3))
    assert few.verdict is Verdict.SKIPPED
    assert few.reason.startswith("2 valid repeats of the 3 that it needs, of another recipe: lr is")


def test_an_order_by_another_recipe() -> None:
    order = claim(
        kind="ordering", expected={"any": {}},
        metric={"operator": "order", "of": ["time{engine=own}", "time{engine=eager}"]},
    )  # fmt: skip
    assert judged(order, both(lr=0.3)).verdict is Verdict.REPRODUCED_TREND
    found = judged(order, both(eager=FAST, own=SLOW, lr=0.3))
    assert found.verdict is Verdict.SKIPPED
    assert "the order of another recipe neither shows nor refutes it" in found.reason


def test_the_profiles_own_recipe_goes_before_a_newer_run_of_another() -> None:
    own = both(eager=FAST)
    other = both(run_id="20261122T100000Z-race-bbbbbb", lr=0.3)

    assert judged(claim(), own, other).verdict is Verdict.NOT_REPRODUCED
    # And what is no recipe is never another one.
    assert judged(claim(), both(lr=0.3, epochs=1)).verdict is Verdict.SKIPPED


def _batches(*batches: int) -> ExperimentSpec:
    """The race, whose short profile has these batches."""
    spec = race()
    short = dataclasses.replace(spec.profiles["short"], values={"batch": batches})
    return dataclasses.replace(spec, profiles={**spec.profiles, "short": short})


def _both_batches(**second: Any) -> Record:
    """Twelve rows at batch 1, and twelve at batch 8."""
    one, other = both(), both(batch=8, **second)
    rows = tuple(dataclasses.replace(r, index=i) for i, r in enumerate((*one.rows, *other.rows)))
    return dataclasses.replace(one, rows=rows, parameters={**one.parameters, "batch": [1, 8]})


def test_of_settings_that_the_claim_leaves_open_the_worst_counts() -> None:
    found = judge(claim(), _batches(1, 8), [_both_batches(eager=FAST)])

    assert found.verdict is Verdict.NOT_REPRODUCED
    assert "at batch=8, the worst of 2 settings" in found.reason


def test_a_setting_whose_rows_are_all_invalid_is_not_passed_over() -> None:
    spoiled = invalid(_both_batches(), *range(12, 24))

    found = judge(claim(), _batches(1, 8), [spoiled])

    assert (found.verdict, found.reason) == (Verdict.INVALID, "no valid row at batch=8")
    assert found.estimate is None
    # A run that makes it good makes the claim good.
    later = dataclasses.replace(
        both(batch=8), run_id="20261122T100000Z-race-bbbbbb", parameters=spoiled.parameters
    )
    assert judge(claim(), _batches(1, 8), [spoiled, later]).verdict is Verdict.REPRODUCED
    # What was lost on another host says nothing of this one.
    elsewhere = dataclasses.replace(spoiled, target="desktop")
    both_here = dataclasses.replace(_both_batches(), run_id="20261122T100000Z-race-bbbbbb")
    assert judge(claim(), _batches(1, 8), [elsewhere, both_here]).verdict is Verdict.REPRODUCED


def test_one_side_of_a_setting_that_is_invalid_loses_the_setting() -> None:
    eager = [r.index for r in _both_batches().rows[12:] if r.parameters["engine"] == "eager"]

    found = judge(claim(), _batches(1, 8), [invalid(_both_batches(), *eager)])

    assert (found.verdict, found.reason) == (Verdict.INVALID, "no valid row at batch=8")


def test_a_setting_that_was_never_attempted_keeps_it_from_being_reproduced() -> None:
    found = judge(claim(), _batches(1, 8, 64), [_both_batches()])

    assert found.verdict is Verdict.REPRODUCED_TREND
    assert "2 of 3 settings of the profile were measured" in found.reason
    assert "a run of the whole profile short" in found.flip
    # One that does not exist here was attempted.
    some = _both_batches()
    for each in skipped(both(batch=64)).rows:
        rows = (*some.rows, dataclasses.replace(each, index=len(some.rows)))
        some = dataclasses.replace(some, rows=rows)
    assert judge(claim(), _batches(1, 8, 64), [some]).verdict is Verdict.REPRODUCED


def test_a_larger_profile_that_was_measured_whole_is_enough() -> None:
    spec = _batches(1, 8)
    paper = dataclasses.replace(spec.profiles["paper"], values={"epochs": (4,), "batch": (64, 256)})
    spec = dataclasses.replace(spec, profiles={**spec.profiles, "paper": paper})
    one, other = both(batch=64), both(batch=256)
    rows = tuple(dataclasses.replace(r, index=i) for i, r in enumerate((*one.rows, *other.rows)))

    assert judge(claim(), spec, [dataclasses.replace(one, rows=rows)]).verdict is Verdict.REPRODUCED


def test_an_invalid_row_of_a_setting_nobody_asked_for_costs_nothing() -> None:
    spoiled = invalid(_both_batches(), *range(12, 24))

    assert judge(claim(), _batches(1), [spoiled]).verdict is Verdict.REPRODUCED


def test_a_selection_that_names_less_than_another_is_no_repeat() -> None:
    spec = _batches(1, 8)
    one = both()
    for each in one.rows:
        batch = 8 if each.parameters["engine"] == "eager" and each.repeat > 2 else 1
        one = changed_row(one, each.index, parameters={**each.parameters, "batch": batch})
    of = ["time{engine=eager}", "time{engine=own, batch=1}"]

    found = judge(claim(metric={"operator": "ratio", "of": of}), spec, [one])

    assert found.verdict is Verdict.INVALID
    assert found.reason == "time{engine=eager} leaves batch open, and the rows differ in it"


# Two modes.


def _bimodal(low: float, high: float) -> Record:
    """Rows whose samples lie half near `low`, half near `high`."""
    samples = tuple(v * (1 + 0.0001 * i) for i in range(30) for v in (low, high))
    one = record({"own": (1.0, 1.0, 1.0)})
    for each in one.rows:
        metric = dataclasses.replace(each.metrics[0], values=samples)
        one = changed_row(one, each.index, metrics=(metric,))
    return one


def test_two_modes_that_decide_the_verdict_make_it_unstable() -> None:
    found = judged(bound_claim(maximum=1.7), _bimodal(1.0, 2.0))

    assert found.verdict is Verdict.UNSTABLE
    assert "two modes in 3 of 3 rows" in found.bimodal
    assert "one mode" in found.flip


def test_two_modes_that_do_not_are_told_of_and_no_more() -> None:
    found = judged(bound_claim(maximum=9.0), _bimodal(1.0, 2.0))

    assert found.verdict is Verdict.REPRODUCED
    assert "two modes" in found.bimodal


def test_of_settings_the_one_whose_modes_decide_is_worse_than_one_that_is_inside() -> None:
    """Although the other's figure lies nearer to the edge."""
    modal, near = _bimodal(1.0, 2.0), record({"own": (1.69, 1.69, 1.69)}, batch=8)
    rows = tuple(dataclasses.replace(r, index=i) for i, r in enumerate((*modal.rows, *near.rows)))
    mixed = dataclasses.replace(modal, rows=rows, parameters={**modal.parameters, "batch": [1, 8]})

    found = judge(bound_claim(maximum=1.7), _batches(1, 8), [mixed])

    assert found.verdict is Verdict.UNSTABLE
    assert "at batch=1, the worst of 2 settings" in found.reason
    assert "two modes" in found.bimodal


# One sample.


def test_one_sample_flips_the_verdict_that_it_should_and_no_other() -> None:
    claims = {
        "own": value_claim(),
        "eager": value_claim(2.0, metric={"operator": "value", "of": ["time{engine=eager}"]}),
        "order": _ordering("own", "eager"),
    }
    before = record({"eager": SLOW[:3], "own": FAST[:3]})
    after = changed_sample(before, 1, 1.5)  # the first repeat of `own`

    first = {name: judged(each, before).verdict for name, each in claims.items()}
    second = {name: judged(each, after).verdict for name, each in claims.items()}

    assert set(first.values()) == {Verdict.REPRODUCED}
    assert second == {**first, "own": Verdict.UNSTABLE}


@settings(max_examples=30, deadline=None)
@example(eager=[1.0], own=[5e-324])
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8),
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8),
)
def test_any_samples_get_a_verdict(eager: list[float], own: list[float]) -> None:
    some = record({"eager": tuple(eager), "own": tuple(own)})

    for each in (
        claim(minimum_repeats=1),
        value_claim(minimum_repeats=1),
        _ordering("own", "eager"),
    ):
        found = judged(each, some)
        assert found.verdict in Verdict
        assert found.reason
        assert found.flip
        if any(map(math.isnan, own)):
            assert found.verdict is not Verdict.REPRODUCED
