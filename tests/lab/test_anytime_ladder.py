"""Static variants and ensembles as ladders that are scored as exits are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np
import pytest
import torch
from anytime_cases import CLASSES, splits
from torch import nn
from toys import row_of

from narrowgauge_contract.errors import BadValueError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog
from narrowgauge_contract.job import RowPlan
from narrowgauge_contract.outcome import Row
from narrowgauge_lab.anytime import scores
from narrowgauge_lab.anytime.costs import ExitCosts
from narrowgauge_lab.anytime.ladder import Rung, score_ladder
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.context import RowContext
from narrowgauge_scores.side_file import read_logits

SPLITS = splits()
ABOUT = About("toys", "of tests")


def _always(number: int) -> Any:
    """Logits that are sure of one class, whatever the image."""

    def forward(images: torch.Tensor) -> torch.Tensor:
        logits = images.new_zeros((len(images), CLASSES))
        logits[:, number] = 2.0
        return logits

    return forward


def _row(
    out: Path, rungs: Sequence[Rung], *, cumulative: bool = False, passes: int = 0, **given: Any
) -> Row:
    plan = RowPlan(index=0, repeat=0, seed=4, parameters={})
    log = EventLog(out / EVENTS_FILE)
    log.emit(EventKind.ROW_START, 0, repeat=0, seed=4, parameters={})
    ctx = RowContext(plan, log, out, device=torch.device("cpu"), profile="smoke")
    about = given.pop("about", ABOUT)
    score_ladder(ctx, rungs, SPLITS, about, cumulative=cumulative, passes=passes, **given)
    ctx.finish()
    return row_of(log, plan)


def _value(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None, f"no metric {name}"
    return metric.values[0]


def _file(out: Path) -> Any:
    return read_logits(out / "row-0" / "logits.npz")


def _share(number: int) -> float:
    return 100.0 * float((SPLITS.test.labels == number).double().mean())


def test_rungs_become_exits_cheapest_first(tmp_path: Path) -> None:
    row = _row(tmp_path, [Rung("8 bits", 700, _always(1)), Rung("2 bits", 200, _always(0))])

    run = _file(tmp_path)
    assert run.names() == ("2 bits", "8 bits")
    assert (run.family, run.variant, run.seed) == ("toys", "of tests", 4)
    assert _value(row, "exit0_accuracy") == pytest.approx(_share(0))
    assert _value(row, "exit1_accuracy") == pytest.approx(_share(1))
    np.testing.assert_array_equal(run.test.samples, SPLITS.test_samples)
    np.testing.assert_array_equal(run.val.samples, SPLITS.validation_samples)
    np.testing.assert_array_equal(run.val.labels, SPLITS.validation.labels.numpy())
    assert row.facts["split"]["validation"] == 20
    assert run.latency is None
    assert row.facts["ladder"]["rungs"] == 2


@pytest.mark.parametrize(("cumulative", "interrupted"), [(False, 900), (True, 700)])
def test_only_a_cumulative_ladder_goes_on_with_what_it_has(
    tmp_path: Path, cumulative: bool, interrupted: int
) -> None:
    rungs = [Rung("one", 200, _always(0)), Rung("two", 700, _always(1))]

    row = _row(tmp_path, rungs, cumulative=cumulative)

    assert [_value(row, f"exit{k}_macs") for k in (0, 1)] == [200, 700]
    assert [_value(row, f"exit{k}_cumulative_macs") for k in (0, 1)] == [200, interrupted]


def test_scores_are_those_of_the_common_code(tmp_path: Path) -> None:
    row = _row(tmp_path, [Rung("one", 200, _always(0)), Rung("two", 700, _always(1))])

    other = tmp_path / "other"
    other.mkdir()
    plan = RowPlan(index=0, repeat=0, seed=4, parameters={})
    log = EventLog(other / EVENTS_FILE)
    log.emit(EventKind.ROW_START, 0, repeat=0, seed=4, parameters={})
    ctx = RowContext(plan, log, other, device=torch.device("cpu"), profile="smoke")
    scores.record(ctx, _file(tmp_path))
    expected = row_of(log, plan)
    assert {each.name: each.values for each in row.metrics} == {
        each.name: each.values for each in expected.metrics
    }


def test_a_rung_may_cost_what_its_image_asks_for(tmp_path: Path) -> None:
    looking = Rung("two looks", None, _looking)
    row = _row(tmp_path, [looking, Rung("one look", 200, _always(0))])

    run = _file(tmp_path)
    bright = _bright(SPLITS.test)
    assert 0 < bright.sum() < len(bright)
    np.testing.assert_array_equal(run.test.macs[0], 200.0)
    np.testing.assert_array_equal(run.test.macs[1], np.where(bright, 1200.0, 500.0))
    np.testing.assert_array_equal(run.val.macs[1], np.where(_bright(SPLITS.validation), 1200, 500))
    mean = float(np.where(bright, 1000.0, 300.0).mean())
    assert _value(row, "exit1_macs") == pytest.approx(mean, abs=1.0)
    assert _value(row, "exit1_cumulative_macs") == pytest.approx(200 + mean)


def test_costs_of_images_are_of_both_splits_where_they_differ_in_one(tmp_path: Path) -> None:
    """No validation image asks for more, and the mean of the test images is not what they cost."""
    looks = []

    def looking(images: torch.Tensor) -> Any:
        macs = torch.full((len(images),), 300.0, dtype=torch.float64)
        if not looks:  # the test images come first
            macs[:3] = 1000.0
        looks.append(len(images))
        return _always(1)(images), macs

    _row(tmp_path, [Rung("looking", None, looking)])

    run = _file(tmp_path)
    assert run.test.macs[0, :4].tolist() == [1000.0] * 3 + [300.0]
    assert run.val.macs is not None
    np.testing.assert_array_equal(run.val.macs, 300.0)


def test_a_cumulative_ladder_runs_in_the_order_of_its_costs(tmp_path: Path) -> None:
    rungs = [Rung("two", 700, _always(1)), Rung("one", 200, _always(0))]

    with pytest.raises(BadValueError, match="'one' costs less than 'two' before it"):
        _row(tmp_path, rungs, cumulative=True)

    assert not (tmp_path / "row-0" / "logits.npz").exists()


def _bright(feed: Any) -> Any:
    images, _ = feed.batch(torch.arange(len(feed)))
    return (images.mean((1, 2, 3)) > images.new_zeros(())).numpy()


def _looking(images: torch.Tensor) -> Any:
    bright = images.mean((1, 2, 3)) > 0
    macs = torch.full((len(images),), 300.0, dtype=torch.float64)
    macs[bright] = 1000.0
    return _always(1)(images), macs


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(1.0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.drop(_always(2)(images))


def test_a_module_is_asked_in_eval_mode_and_left_as_it_was(tmp_path: Path) -> None:
    module = _Dropping()

    row = _row(tmp_path, [Rung("dropping", 5, module)], passes=2)

    assert _value(row, "exit0_accuracy") == pytest.approx(_share(2))
    assert module.training
    assert module.drop.training


def test_seconds_are_of_each_rung_alone(tmp_path: Path) -> None:
    row = _row(tmp_path, [Rung("a", 5, _always(0)), Rung("b", 6, _always(1))], passes=3)

    assert _file(tmp_path).latency.shape == (2, 3)
    assert row.facts["latency_images"] == 3
    assert row.facts["ladder"]["seconds"] == "each alone"


def test_the_plain_network_is_named_as_for_exits(tmp_path: Path) -> None:
    def base_macs(costs: ExitCosts) -> int:
        return costs.direct[-1]

    def base_accuracy() -> Optional[float]:
        return 12.5

    about = About("toys", "", base_accuracy=base_accuracy, base_macs=base_macs)
    _row(tmp_path, [Rung("a", 5, _always(0)), Rung("b", 6, _always(1))], about=about)

    assert (_file(tmp_path).base_accuracy, _file(tmp_path).base_macs) == (12.5, 6)


def _nan(images: torch.Tensor) -> torch.Tensor:
    return _always(0)(images) / 0.0 * 0.0


@pytest.mark.parametrize(
    ("rungs", "words"),
    [
        ([], "without rungs"),
        ([Rung("a", 5, _always(0)), Rung("a", 6, _always(0))], "two rungs are called 'a'"),
        ([Rung("a", 0, _always(0))], "'a' costs 0"),
        ([Rung("good", 5, _always(0)), Rung("bad", 6, _nan)], "'bad' answers with NaN"),
        ([Rung("a", 5, lambda images: images)], r"'a' gives \[40, 3, 8, 8\] of 40 images"),
        ([Rung("a", 5, lambda images: _always(0)(images)[:3])], r"'a' gives \[3, 4\]"),
        ([Rung("a", 5, lambda images: _always(0)(images)[:, :3])], "'a' tells 3 classes"),
        ([Rung("a", 5, _looking)], "what it costs twice"),
        ([Rung("a", None, _always(0))], "what it costs nowhere"),
        ([Rung("a", None, lambda images: (_always(0)(images), images))], "gives MACs"),
    ],
)
def test_what_is_no_ladder_is_refused_by_its_name(
    tmp_path: Path, rungs: Sequence[Rung], words: str
) -> None:
    with pytest.raises(BadValueError, match=words):
        _row(tmp_path, rungs)

    assert not (tmp_path / "row-0" / "logits.npz").exists()
