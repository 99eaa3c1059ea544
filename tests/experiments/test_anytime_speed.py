"""Rows of `anytime-speed` on small networks: what is recorded, and what is skipped. No figure of
these is a measurement."""

from __future__ import annotations

import dataclasses
import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Sequence, Tuple

import pytest
import torch
from one_row import CPU, Rows

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_contract.events import EventLog
from narrowgauge_contract.outcome import Row
from narrowgauge_kernels.sparse.errors import DeviceError
from narrowgauge_lab.anytime.adaptive import Adaptive
from narrowgauge_lab.anytime.deadline import StageTimes, Timely
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.graphs import CaptureError
from narrowgauge_lab.measure import Comparison

SPEED = Rows(
    "anytime-speed",
    ("net=nested", "width=0.25", "batch=4", "pairs=3", "limit_s=0.05", "deadlines=20",
     "profile_passes=5"),
)  # fmt: skip


def values(row: Row, name: str) -> List[float]:
    metric = row.metric(name)
    assert metric is not None
    return list(metric.values)


def test_heads_are_timed_beside_the_last_answer_alone(tmp_path: Path) -> None:
    row = SPEED.run(tmp_path, "measure=heads")
    assert row.validity.valid
    assert row.facts["way"] == "launch by launch: a cpu has no CUDA graphs"
    share = values(row, "heads_share")
    pairs = zip(values(row, "seconds_all_exits"), values(row, "seconds_until_last"))
    assert share == pytest.approx([whole / alone - 1 for whole, alone in pairs])
    assert 0 < row.facts["heads_macs_share"] < 0.05


def test_compaction_is_timed_beside_masking_over_the_work_that_it_saves(tmp_path: Path) -> None:
    row = SPEED.run(tmp_path, "measure=compaction", "batch=16", "share=0.5")
    assert row.validity.valid
    assert row.facts["left_at"] == [0.5, 0.25, 0.125, 0.125]
    macs = row.facts["cumulative_macs"]
    mean = sum(share * part for share, part in zip(row.facts["left_at"], macs))
    assert row.facts["macs_saved"] == pytest.approx(1 - mean / macs[-1])
    assert row.facts["exits_differ"] == 0.0
    assert "cpu has no CUDA graphs" in row.facts["way"]
    realised = values(row, "saving_realised")
    speedup = values(row, "compaction_speedup")
    saved = row.facts["macs_saved"]
    assert realised == pytest.approx([(1 - 1 / ratio) / saved for ratio in speedup])
    possible = row.facts["time_saveable"]
    assert 0 < possible < 1
    assert values(row, "saving_of_stages") == pytest.approx(
        [(1 - 1 / ratio) / possible for ratio in speedup]
    )


@pytest.mark.parametrize("policy", ["entropy-normalised", "max-probability", "margin"])
def test_every_policy_lets_the_share_leave(tmp_path: Path, policy: str) -> None:
    row = SPEED.run(tmp_path, "measure=compaction", "batch=8", "pairs=1", f"policy={policy}")
    assert row.facts["left_at"] == [0.5, 0.25, 0.125, 0.125]
    assert row.facts["policy"].startswith(f"{policy}:")


def test_where_nobody_leaves_there_is_nothing_to_save(tmp_path: Path) -> None:
    row = SPEED.run(tmp_path, "measure=compaction", "share=0")
    assert not row.validity.valid
    assert "nothing to save" in row.validity.reasons[0]
    assert row.metric("saving_realised") is None


def test_where_everybody_leaves_at_once_all_other_work_is_saved(tmp_path: Path) -> None:
    row = SPEED.run(tmp_path, "measure=compaction", "share=1", "pairs=1")
    assert row.facts["left_at"] == [1.0, 0.0, 0.0, 0.0]


def test_deadlines_are_counted_and_late_answers_are_marked(tmp_path: Path) -> None:
    row = SPEED.run(tmp_path, "measure=deadlines", "batch=1")
    assert row.validity.valid
    assert row.facts["deadline_late"] is True
    assert row.facts["deadlines"] == 20
    assert len(row.facts["stage_seconds"]) == 4
    assert values(row, "deadline_overshoot_p999") == values(row, "deadline_overshoot")
    assert -20 <= row.facts["deadline_nice"] <= 19
    misses, largest = values(row, "deadline_misses")[0], values(row, "deadline_overshoot")[0]
    assert (misses > 0) == (largest > 0)
    # Of whole deadlines: so many out of 20.
    assert misses * 20 == pytest.approx(round(misses * 20))


def test_the_priority_is_as_before_where_it_may_be_had_and_where_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_of_all, now = SPEED.module("deadlines")._first_of_all, [3]
    monkeypatch.setattr(os, "getpriority", lambda *given: now[0])
    monkeypatch.setattr(os, "setpriority", lambda which, who, nice: now.__setitem__(0, nice))
    with first_of_all() as nice:
        assert nice == now[0] == -20
    assert now == [3]

    def refuses(which: int, who: int, nice: int) -> None:
        if nice < 3:
            raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuses)
    with first_of_all() as nice:
        assert nice == 3


TIMES = StageTimes(1, (0.010, 0.020, 0.010, 0.010), (0.010, 0.040, 0.010, 0.010))


def told_deadlines(monkeypatch: pytest.MonkeyPatch, stop_at: int = 0) -> List[float]:
    """Deadlines whose fourth each is 5 ms late, with an answer at the second exit, and the limits
    that were asked for [s]; with `stop_at` the row ends in the call of that number."""
    module, limits = SPEED.module("deadlines"), []

    def told(net: object, images: object, ms: float, times: StageTimes) -> Timely:
        limits.append(ms / 1e3)
        if len(limits) == stop_at:
            raise KeyboardInterrupt
        late = 0.005 if len(limits) % 4 == 0 else -0.001
        return Timely(torch.zeros(1, 2), 1, ms == 0, ms / 1e3 + late, ms / 1e3)

    monkeypatch.setattr(module, "deadline", told)
    monkeypatch.setattr(module, "measure_stages", lambda *given, **named: TIMES)
    monkeypatch.setattr(module, "_WINDOW", 8)
    return limits


def test_misses_and_overshoot_are_of_what_was_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = told_deadlines(monkeypatch)
    row = SPEED.run(tmp_path, "measure=deadlines", "batch=1")
    assert values(row, "deadline_misses") == [pytest.approx(5 / 20)]
    # 5 ms over the 20 that the longest stage typically takes, not over the 40 that it once took.
    assert values(row, "deadline_overshoot") == [pytest.approx(0.25)]
    reached = [sum(until <= limit for until in TIMES.until) for limit in limits[:20]]
    answered = sum(2 / max(1, each) for each in reached) / 20
    assert values(row, "deadline_answered") == [pytest.approx(answered)]
    assert row.facts["deadline_missed"] == [2, 2, 1]
    assert row.facts["deadline_stages"].startswith("launch by launch: "), "no graphs on a CPU"
    assert [f"window{number}_windows_discarded" in row.facts for number in range(4)] == [
        True, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(("way", "kept"), [("as it was", 16), ("another way", 0)])
def test_a_row_that_was_killed_goes_on_after_its_last_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, kept: int
) -> None:
    """Times and answers of stages that ran another way are of something else."""
    module = SPEED.module("deadlines")
    plan = SPEED.job("net=nested", "measure=deadlines", "deadlines=20", "quantile=0.75").rows[0]
    wanted = module.spans(TIMES, 20, plan.seed)
    said: List[dict] = []

    def row(resume: bool) -> RowContext:
        ctx = RowContext(plan, log, tmp_path, device=CPU, profile="smoke", resume=resume)
        monkeypatch.setattr(ctx, "metric", lambda name, value, **more: said.append({name: value}))
        return ctx

    subject = SimpleNamespace(net=None, images=torch.zeros(1))
    monkeypatch.setattr(module, "replayed_or_why", lambda net, images: (net, "as it was"))
    with EventLog(tmp_path / "events.jsonl") as log:
        first = told_deadlines(monkeypatch, stop_at=19)
        monkeypatch.setattr(module, "steadily", spoilt)
        with pytest.raises(KeyboardInterrupt):
            module.deadlines(row(resume=False), subject)
        assert first == pytest.approx(wanted[:19])
        second = told_deadlines(monkeypatch)
        monkeypatch.setattr(module, "replayed_or_why", lambda net, images: (net, way))
        passes: List[Tuple[int, float, bool]] = []

        def timed(net: None, images: torch.Tensor, count: int, quantile: float) -> StageTimes:
            passes.append((count, quantile, gc.isenabled()))
            return TIMES

        monkeypatch.setattr(module, "measure_stages", timed)
        ctx, again = row(resume=True), []
        monkeypatch.setattr(ctx, "invalid", again.append)
        monkeypatch.setattr(module, "steadily", lambda ctx, measure, *given, **named: measure())
        module.deadlines(ctx, subject)
    # Two windows of eight were kept; the third is done anew, and 0 is the last one asked for.
    assert second == pytest.approx([*wanted[kept:], 0.0])
    assert passes == [(1 if kept else plan.parameters["profile_passes"], 0.75, False)]
    assert {"deadline_misses": 5 / 20} in said
    assert again == (["spoilt", "spoilt"] if kept else []), "what was spoilt stays so"
    state = ctx.checkpoints.load()
    assert state is not None
    assert tuple(state["results"].shape) == (20, 3)


def spoilt(ctx: Any, measure: Callable[[], Any], *given: object, **named: object) -> Any:
    found = measure()
    ctx.invalid("spoilt")
    return found


def test_a_decision_is_skipped_on_a_cpu_with_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="no decision on a device") as error:
        SPEED.run(tmp_path, "measure=decision")
    assert "12.4" in error.value.next_step


@pytest.mark.parametrize(
    "error",
    [
        CaptureError("stage 1 could not be captured", why="told"),
        DeviceError("refused", why="told"),
        NotApplicableError("none here", why="told"),
    ],
)
def test_a_device_without_such_nodes_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    decision = SPEED.module("decision")

    def refuses(*given: object) -> None:
        raise error

    monkeypatch.setattr(decision, "CapturedStages", refuses)
    ctx = SimpleNamespace(
        device=torch.device("cuda"), parameters={"policy": "entropy", "measure": "decision"}
    )
    subject = SimpleNamespace(net=None, images=None, costs=None)
    with pytest.raises(SkippedError, match=str(error.what)) as skipped:
        decision.decision(ctx, subject)
    assert skipped.value.why == "told"


def test_a_decision_is_what_it_adds_for_each_exit_but_the_last() -> None:
    def samples(*seconds: float) -> SimpleNamespace:
        return SimpleNamespace(seconds=seconds)

    beside = Comparison(samples(1.0, 2.0), samples(1.3, 2.6))
    assert SPEED.module("decision").per_decision(beside, 3) == pytest.approx([0.1, 0.2])


def decided(monkeypatch: pytest.MonkeyPatch, added: Sequence[float]) -> Dict[str, Any]:
    """What `decision` records where the device's one decision adds these seconds to 1 s, pair by
    pair, and the host's 8 ms."""
    module = SPEED.module("decision")

    def beside(extra: Sequence[float]) -> Comparison:
        def samples(seconds: List[float]) -> SimpleNamespace:
            return SimpleNamespace(seconds=seconds)

        return Comparison(samples([1.0] * len(extra)), samples([1.0 + each for each in extra]))

    both = beside(added), beside([0.008] * len(added))
    kept: Dict[str, Any] = {"invalid": []}
    for name in ("CapturedStages", "ConditionalExits", "SteppedExits", "all_stages"):
        monkeypatch.setattr(module, name, lambda *given: SimpleNamespace(description="node"))
    monkeypatch.setattr(module, "steadily", lambda *given: both)
    monkeypatch.setattr(
        module,
        "record_samples",
        lambda ctx, name, samples, given=None, unit="s": kept.update({name: given}),
    )
    ctx = SimpleNamespace(
        device=torch.device("cuda"), parameters={"policy": "entropy"},
        fact=lambda name, value: kept.update({name: value}), invalid=kept["invalid"].append,
    )  # fmt: skip
    module.decision(ctx, SimpleNamespace(net=SimpleNamespace(exits=2), images=None, costs=None))
    return kept


def test_a_decision_is_valid_where_its_interval_is_above_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Ten pairs: the interval is from the second to the ninth.
    kept = decided(monkeypatch, [-0.001, *[0.002] * 9])
    assert kept["invalid"] == []
    assert kept["decision_device_least"] == pytest.approx(0.002)
    assert kept["decision_times"] == pytest.approx([4.0] * 10)


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        ([-0.001, -0.001, *[0.002] * 8], "may take no time"),
        ([0.002] * 5, "5 pairs are too few"),
    ],
)
def test_a_decision_that_may_be_nothing_is_invalid_though_its_median_is_not(
    monkeypatch: pytest.MonkeyPatch, added: List[float], reason: str
) -> None:
    kept = decided(monkeypatch, added)
    assert len(kept["invalid"]) == 1
    assert reason in kept["invalid"][0]
    assert "decision_times" not in kept
    assert kept["decision_device"] == pytest.approx(added)


def answers(logits: float = 0.0, macs: float = 0.0) -> Adaptive:
    """Of three images, the last one's with that much added to its logits and its MACs."""
    base = torch.tensor([[1.0, 2.0], [3.0, -4.0], [1.0, 1.0 + logits]])
    return Adaptive(base, torch.tensor([0, 1, 1]), torch.tensor([1.0, 5.0, 5.0 + macs]).double())


def test_answers_are_held_beside_each_other_where_exits_agree() -> None:
    beside = SPEED.module("shares").beside
    assert beside(answers(), answers()) == (0.0, 0.0)
    assert beside(answers(logits=0.4), answers())[0] == pytest.approx(0.1)
    assert beside(answers(macs=1.0), answers())[1] == pytest.approx(1 / 3)
    assert beside(answers(logits=float("nan")), answers())[0] == float("inf")
    elsewhere = dataclasses.replace(answers(0.4, 1.0), exits=torch.tensor([0, 1, 0]))
    assert beside(elsewhere, answers()) == (0.0, 0.0)
    nobody = dataclasses.replace(answers(), exits=torch.tensor([3, 3, 3]))
    assert beside(nobody, answers()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("wrong", "reason"), [("logits", "of the largest away"), ("macs", "count other MACs")]
)
def test_sides_that_answer_otherwise_at_the_same_exits_are_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, reason: str
) -> None:
    module = SPEED.module("shares")
    real = module.masked

    def other(*given: Any) -> Adaptive:
        answer = real(*given)
        return dataclasses.replace(answer, **{wrong: getattr(answer, wrong) * 1.01})

    monkeypatch.setattr(module, "masked", other)
    row = SPEED.run(tmp_path, "measure=compaction", "pairs=1")
    assert not row.validity.valid
    assert any(reason in each for each in row.validity.reasons)
    assert row.facts["exits_differ"] == 0.0


def test_networks_that_share_no_backbone_have_no_heads_to_time(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="no heads to set apart"):
        SPEED.run(tmp_path, "measure=heads", "net=iresnext-shared", "blocks=1")


@pytest.mark.parametrize("net", ["b-lenet", "b-alexnet", "iresnext-incremental"])
def test_the_other_networks_run_too(tmp_path: Path, net: str) -> None:
    row = SPEED.run(tmp_path, "measure=compaction", f"net={net}", "blocks=1", "pairs=1")
    assert row.validity.valid
    assert 0 < row.facts["macs_saved"] < 1


def test_kept_deadlines_are_x() -> None:
    module = SPEED.module("deadlines")
    times = StageTimes(1, (0.010, 0.020), (0.012, 0.024))

    result = module.Result
    found = module.kept([result(0, 0.010, 0.015), result(1, 0.048, 0.036)], times)
    assert found.misses == 0.5
    assert found.overshoot == pytest.approx([0.0, 0.6])
    many = module.Kept(0.001, [0.7, *[0.0] * 999], 1.0)
    assert (many.within(0.999), many.within(0.9995)) == (0.0, 0.7)
    # 15 ms reach the first of both, 36 ms the second.
    assert found.answered == pytest.approx(1.0)
    drawn = module.spans(times, 100, seed=3)
    assert min(drawn) >= 0.012
    assert 1.2 * 0.030 < max(drawn) <= 1.2 * 0.036
    # Where plans are far longer than what is typical, there is something to decide all the same.
    planned = StageTimes(1, (0.010, 0.020), (0.100, 0.050))
    assert {limit < 0.150 for limit in module.spans(planned, 100, seed=3)} == {True, False}
    assert drawn == module.spans(times, 100, seed=3)
    assert drawn != module.spans(times, 100, seed=4)


@pytest.mark.parametrize("kind", ["entropy", "max-probability"])
def test_nobody_stands_on_a_threshold(kind: str) -> None:
    """Another batch size sums in another order: who is as sure as the threshold would waver."""
    nets = SPEED.module("nets")
    found = nets.subject({"net": "b-lenet", "width": 1.0, "blocks": 1}, CPU, 0, 64)
    policy = found.leaving(kind, 0.5)
    with torch.no_grad():
        measured = policy.measure(found.net(found.images)[0]).double()
    limit = policy.thresholds[0]

    assert int((measured < limit).sum()) == 32
    assert float((measured - limit).abs().min()) > 1e-7
