"""Rows of `anytime-speed` on small networks: what is recorded, and what is skipped. No figure of
these is a measurement."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import List

import pytest
import torch
from one_row import Rows

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_contract.outcome import Row
from narrowgauge_kernels.sparse.errors import DeviceError
from narrowgauge_lab.anytime.deadline import StageTimes, Timely
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
    assert 0.0 <= values(row, "deadline_misses")[0] <= 1.0
    assert values(row, "deadline_overshoot")[0] >= 0.0
    assert 0.0 < values(row, "deadline_answered")[0] <= 4.0
    assert len(row.facts["stage_seconds"]) == 4


def test_a_decision_is_skipped_on_a_cpu_with_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="no decision on a device") as error:
        SPEED.run(tmp_path, "measure=decision")
    assert "12.4" in error.value.next_step


@pytest.mark.parametrize(
    "error", [DeviceError("refused", why="told"), NotApplicableError("none here", why="told")]
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


def test_networks_that_share_no_backbone_have_no_heads_to_time(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="no heads to set apart"):
        SPEED.run(tmp_path, "measure=heads", "net=iresnext-shared", "blocks=1")


@pytest.mark.parametrize("net", ["b-lenet", "b-alexnet", "iresnext-incremental"])
def test_the_other_networks_run_too(tmp_path: Path, net: str) -> None:
    row = SPEED.run(tmp_path, "measure=compaction", f"net={net}", "blocks=1", "pairs=1")
    assert row.validity.valid
    assert 0 < row.facts["macs_saved"] < 1


def test_kept_deadlines_are_shares_in_longest_stages() -> None:
    module = SPEED.module("deadlines")
    times = StageTimes(1, (0.010, 0.020), (0.012, 0.024))

    def result(exit: int, seconds: float, limit: float) -> Timely:
        return Timely(torch.zeros(1, 2), exit, False, seconds, limit)

    found = module.kept([result(0, 0.010, 0.015), result(1, 0.048, 0.036)], times)
    assert found.misses == 0.5
    assert found.overshoot == pytest.approx([0.0, 0.5])
    # 15 ms reach the first of both, 36 ms the second.
    assert found.answered == pytest.approx(1.0)
    drawn = module.spans(times, 100, seed=3)
    assert min(drawn) >= 0.012
    assert max(drawn) <= 1.2 * 0.030
    assert drawn == module.spans(times, 100, seed=3)
    assert drawn != module.spans(times, 100, seed=4)
