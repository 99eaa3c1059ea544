"""`approx-train`: rows from end to end, stages kept apart, and the same start for every policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import DataCorruptError, DataUnavailableError, UnknownNameError
from narrowgauge_contract.events import EventLog
from narrowgauge_contract.outcome import Row
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.history import EPOCH_METRICS
from narrowgauge_lab.networks.cifar import ResNet

NAME = "approx-train"
#: No figure of these tests is a measurement.
QUICK = (
    "data=synthetic", "depth=8", "train_limit=8", "test_limit=16", "batch_size=4", "epochs=1",
    "finetune_epochs=1", "lr=0.01", "limit_s=0.01", "pairs=1",
)  # fmt: skip
_ROWS = Rows(NAME, QUICK)


def _last(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None, name
    return metric.values[-1]


def test_a_row_records_what_it_promises(tmp_path: Path) -> None:
    row = _ROWS.run(tmp_path, "policy=exact_fp32")

    assert row.validity.valid, row.validity.reasons
    recorded = {metric.name for metric in row.metrics}
    assert recorded == {
        "accuracy_exact", "accuracy_before", "accuracy_lost", "accuracy_after", "accuracy_missing",
        "step_exact", "step", "step_ratio", *EPOCH_METRICS,
        *(f"exact_{name}" for name in EPOCH_METRICS),
    }  # fmt: skip
    spec = _ROWS.spec()
    assert set(spec.headline) <= recorded
    files = {Path(side_file.path).name for side_file in row.side_files}
    for drawing in spec.drawings:
        assert set(drawing.metrics) <= recorded
        assert not drawing.side_file or drawing.side_file in files
    for claim in load_claims(EXPERIMENTS / NAME / "claims.toml", spec):
        assert {each.metric for each in claim.selections} <= recorded
    # The control: the same products, so the same answers.
    assert _last(row, "accuracy_before") == _last(row, "accuracy_exact")
    assert _last(row, "accuracy_exact") == _last(row, "exact_test_accuracy")
    assert _last(row, "accuracy_after") == _last(row, "test_accuracy")
    (ratio,) = row.metric("step_ratio").values
    assert ratio == pytest.approx(_last(row, "step") / _last(row, "step_exact"))
    assert row.facts["step_images"] == 4
    assert row.facts["layers_left_alone"] == {}
    assert {each["policy"] for each in row.facts["choices"]} == {"exact_fp32"}
    assert not list((tmp_path / "checkpoints").rglob("*.pt"))


def test_rows_of_a_run_start_from_the_same_weights(tmp_path: Path) -> None:
    first = _ROWS.run(tmp_path, "policy=axfpm")
    before = torch.load(str(tmp_path / "weights-0.pt"))
    (tmp_path / "events.jsonl").unlink()
    second = _ROWS.run(tmp_path, "policy=exact_int8")

    assert first.facts["weights_from"] == "trained in this row"
    assert second.facts["weights_from"] == "an earlier row of this run"
    assert first.facts["weights_sha256"] == second.facts["weights_sha256"]
    assert _last(first, "accuracy_exact") == _last(second, "accuracy_exact")
    assert second.metric("exact_train_loss") is None
    # Neither timing nor fine-tuning changes what others start from.
    ResNet(8).load_state_dict(before)
    assert first.facts["precision_ran"] == "fp32"
    assert second.facts["precision_ran"] == "fp32+int8"
    for row in (first, second):
        assert row.validity.valid, row.validity.reasons


def test_both_gradients_train(tmp_path: Path) -> None:
    losses = {}
    weights = tmp_path / "weights.pt"
    torch.manual_seed(0)
    torch.save(ResNet(8).state_dict(), str(weights))
    for gradient in ("straight-through", "local"):
        words = (f"weights={weights}", f"gradient={gradient}", "policy=lut8x8:ama5-4x4")
        row = _ROWS.run(tmp_path / gradient, *words)
        assert row.validity.valid, row.validity.reasons
        assert row.facts["weights_from"] == "the file weights.pt"
        assert {each["gradient"] for each in row.facts["choices"]} == {gradient}
        losses[gradient] = _last(row, "train_loss")
    first, second = losses.values()
    assert first != second, "the gradient that was asked for is not what trained"


@pytest.mark.parametrize("word", ["policy=axfmp", "gradient=locla"])
def test_a_name_that_is_not_there_costs_no_training(tmp_path: Path, word: str) -> None:
    with pytest.raises(UnknownNameError):
        _ROWS.run(tmp_path, word)
    assert not (tmp_path / "weights-0.pt").exists()


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(ResNet(20).state_dict(), str(weights))
    with pytest.raises(DataCorruptError, match="does not hold weights of this ResNet"):
        _ROWS.run(tmp_path, f"weights={weights}")
    with pytest.raises(DataUnavailableError, match="no weights in"):
        _ROWS.run(tmp_path, f"weights={tmp_path / 'none.pt'}")


def test_profiles_have_what_claims_need() -> None:
    spec = _ROWS.spec()
    for claim in load_claims(EXPERIMENTS / NAME / "claims.toml", spec):
        rows = _ROWS.job(profile=claim.profile).rows
        for selection in claim.selections:
            met = [r for r in rows if selection.where.items() <= dict(r.parameters).items()]
            assert len(met) >= claim.minimum_repeats, claim.id


def test_a_stages_checkpoints_are_its_own(tmp_path: Path) -> None:
    """Both trainings have the row's seed and parameters, so nothing else would tell them apart."""
    plan = _ROWS.job(*QUICK).rows[0]
    log = EventLog(tmp_path / "events.jsonl")
    ctx = RowContext(plan, log, tmp_path, device=CPU, profile="smoke", resume=True)
    stage = ctx.for_stage("exact")
    stage.checkpoints.save({"epoch": 1})

    assert ctx.checkpoints.load() is None
    found = stage.checkpoints.load()
    assert found is not None
    assert found["epoch"] == 1
    ctx.checkpoints.save({"epoch": 7})
    stage.checkpoints.clear()
    assert stage.checkpoints.load() is None
    assert ctx.checkpoints.load() == {"epoch": 7}, "whoever is done with the stage clears its own"
    stage.checkpoints.save({"epoch": 1})
    ctx.checkpoints.clear()
    assert stage.checkpoints.load() is None, "a row that is done leaves none"
