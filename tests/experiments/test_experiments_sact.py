"""`sact`: a row from end to end, what it records, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

import numpy as np
import pytest
import torch
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import BadValueError
from narrowgauge_contract.outcome import Row
from narrowgauge_lab import precision, torch_compat
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet
from narrowgauge_lab.errors import DataUnavailableError
from narrowgauge_lab.measure.cost import count
from narrowgauge_scores.side_file import read_logits

NAME = "sact"
#: No figure of these tests is a measurement.
QUICK = (
    "data=synthetic", "train_limit=64", "test_limit=32", "validation=32", "limit_s=0.01",
    "save_weights=true", "maps=4",
)  # fmt: skip
_ROWS = Rows(NAME, QUICK)


def _last(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None, name
    return metric.values[-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Row, Path]:
    """A row of kind `sact`, and its folder."""
    out = tmp_path_factory.mktemp("sact")
    return _ROWS.run(out), out / "row-0"


def test_a_row_records_what_spec_and_claims_name(trained: Tuple[Row, Path]) -> None:
    row, folder = trained

    assert row.validity.valid, row.validity.reasons
    recorded = {metric.name for metric in row.metrics}
    spec = _ROWS.spec()
    assert set(spec.headline) <= recorded
    for drawing in spec.drawings:
        assert set(drawing.metrics) <= recorded
    for claim in load_claims(EXPERIMENTS / NAME / "claims.toml", spec):
        # Other batches have the same figures; here there is time for one image.
        asked = {each.metric.replace("batch256_", "batch1_") for each in claim.selections}
        assert asked <= recorded
    assert {path.name for path in folder.iterdir()} >= {"logits.npz", "ponder.png", "weights.pt"}
    assert row.facts["variant"] == "sact, 2 units, tau 0.01, twin of width 0.25"


def test_the_cost_of_each_image_is_kept_and_summed_up(trained: Tuple[Row, Path]) -> None:
    row, folder = trained
    run = read_logits(folder / "logits.npz")

    macs = run.test.macs
    assert macs is not None
    assert np.asarray(macs).shape[-1] == 32
    assert float(np.mean(macs)) == pytest.approx(_last(row, "needed_macs"))
    assert float(np.std(macs)) == pytest.approx(_last(row, "needed_macs_sd"))
    plain = AdaptiveResNet("plain", 2, 4).eval()
    whole = count(lambda x: plain(x), torch.zeros(1, 3, 32, 32)).macs
    assert _last(row, "share_of_plain") == pytest.approx(100 * float(np.mean(macs)) / whole)


def test_sparse_is_checked_and_timed(trained: Tuple[Row, Path]) -> None:
    row, _ = trained

    assert _last(row, "batch1_difference") < 1e-3
    for name in ("batch1_speedup_over_plain", "batch1_speedup_over_masked"):
        metric = row.metric(name)
        assert metric is not None
        assert metric.source == "process-cpu-time"
        assert all(value > 0 for value in metric.values)
    assert 0 <= _last(row, "batch1_block0_break_even") <= 100
    shares = row.metric("active_share")
    assert shares is not None
    assert len(shares.values) == 6
    assert shares.values[0] == 100.0
    sizes = row.metric("resolution_macs")
    assert sizes is not None
    assert sizes.values[0] < sizes.values[1] == pytest.approx(_last(row, "needed_macs"))


def test_the_clock_says_what_it_timed(trained: Tuple[Row, Path]) -> None:
    facts = trained[0].facts

    assert facts["clock_images"] == [min(batch, 32) for batch in facts["clock_batches"]]
    if torch_compat.threads_may_change():
        assert facts["clock_threads"] == 1
    for share, block in zip(facts["batch1_dense_from"], range(3)):
        measured = _last(trained[0], f"batch1_block{block}_break_even") / 100.0
        assert share == 2.0 or share == pytest.approx(measured)


def test_the_clock_counts_images_and_computes_in_full_precision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More than there are cannot be timed; and answers in TF32 would not agree."""
    if "bf16" not in precision.available(torch.device("cpu")):
        pytest.skip("no autocast to bf16 here")
    clock = _ROWS.module("clock")
    entered: List[str] = []
    enter = precision.enter

    def noting(name: str, device: torch.device) -> precision.Mode:
        entered.append(name)
        return enter(name, device)

    monkeypatch.setattr(clock.precision, "enter", noting)
    before = torch.get_num_threads()

    row = _ROWS.run(tmp_path, "clock_batch=40", "resolutions=", "maps=0", "precision=bf16")

    assert row.facts["clock_batches"] == [40]
    assert row.facts["clock_images"] == [32]
    assert entered[-2:] == ["fp32", "bf16"]
    assert torch.get_num_threads() == before


def test_weights_of_a_row_are_taken_by_another(trained: Tuple[Row, Path], tmp_path: Path) -> None:
    row, folder = trained

    again = _ROWS.run(
        tmp_path, f"weights={folder / 'weights.pt'}", "clock_batch=", "resolutions=", "maps=0",
        "save_weights=false",
    )  # fmt: skip

    assert again.metric("train_loss") is None
    assert _last(again, "needed_macs") == _last(row, "needed_macs")
    assert _last(again, "exit0_accuracy") == _last(row, "exit0_accuracy")
    assert again.metric("sparse_speedup") is None
    assert not (tmp_path / "row-0" / "ponder.png").exists()


@pytest.mark.parametrize("kind", ["plain", "act"])
def test_other_kinds_are_rows_too(kind: str, tmp_path: Path) -> None:
    row = _ROWS.run(tmp_path, f"kind={kind}", "resolutions=", "save_weights=false")

    assert row.validity.valid, row.validity.reasons
    share, units = _last(row, "share_of_plain"), row.metric("active_share")
    assert units is not None
    if kind == "plain":
        assert (share, set(units.values)) == (100.0, {100.0})
    else:
        # Two of three blocks' units run for all images; heads are counted beside what is needed.
        assert max(units.values) == 100.0
        assert sum(units.values) / len(units.values) - 1 < share < 110.0
    assert (row.metric("ponder_loss") is None) == (kind == "plain")
    assert row.metric("sparse_speedup") is None


@pytest.mark.parametrize(
    ("word", "message"),
    [("resolutions=30", "resolutions cannot be 30"), ("resolutions=x", "does not take"),
     ("clock_batch=0", "clock_batch cannot be 0")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_training(
    word: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadValueError, match=message):
        _ROWS.run(tmp_path, word)


def test_cifar100_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match="'cifar100' is not here"):
        _ROWS.run(tmp_path / "out", "data=cifar100", data=tmp_path)


def test_diverged_training_makes_the_row_invalid(tmp_path: Path) -> None:
    row = _ROWS.run(tmp_path, "lr=100", "epochs=3", "weight_decay=1.0")

    assert not row.validity.valid
    assert any("diverged" in reason for reason in row.validity.reasons)
