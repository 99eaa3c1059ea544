"""`robustness`: rows from end to end, what they record, and that masked gradients show."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple

import pytest
import torch
from one_row import EXPERIMENTS, Rows
from torch import nn

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_contract.outcome import Row
from narrowgauge_lab.networks.manual_mnist import ManualNet

NAME = "robustness"
#: No figure of these tests is a measurement. So little training is enough for made-up digits.
QUICK = (
    "data=synthetic", "train_limit=1500", "epochs=3", "lr=0.1", "images=24", "steps=2",
    "epsilon=0.05",
)  # fmt: skip
_ROWS = Rows(NAME, QUICK)


def _last(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None, name
    return metric.values[-1]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Row, Path]:
    """A row of exact products under PGD, and the weights that it trained."""
    out = tmp_path_factory.mktemp("control")
    return _ROWS.run(out, "policy=exact_fp32", "attack=pgd"), out / "weights-0.pt"


def test_exact_products_are_attacked_as_exactly_as_torchs(control: Tuple[Row, Path]) -> None:
    """The control: one network, formed in two ways."""
    row, _ = control

    assert row.validity.valid, row.validity.reasons
    assert _last(row, "agreement") == 100.0
    assert _last(row, "clean_accuracy_exact") == _last(row, "clean_accuracy") > 50.0
    assert _last(row, "attacked_accuracy") <= _last(row, "clean_accuracy")
    assert _last(row, "transfer_success") > 90.0
    assert row.facts["transfer_success_images"] > 0
    assert 0.0 < _last(row, "distortion_linf") <= 0.05 + 1e-6
    recorded = {metric.name for metric in row.metrics}
    spec = _ROWS.spec()
    assert set(spec.headline) <= recorded
    for drawing in spec.drawings:
        assert set(drawing.metrics) <= recorded
    for claim in load_claims(EXPERIMENTS / NAME / "claims.toml", spec):
        assert {each.metric for each in claim.selections} <= recorded
    assert {side_file.path for side_file in row.side_files} >= {"weights-0.pt"}


def test_rows_of_a_run_attack_the_same_weights(tmp_path: Path) -> None:
    brief = ("train_limit=200", "epochs=1")
    first = _ROWS.run(tmp_path, "policy=axfpm", *brief)
    (tmp_path / "events.jsonl").unlink()
    second = _ROWS.run(tmp_path, "policy=lut8x8:ama5-4x4", "gradient=local", *brief)

    assert first.facts["weights_from"] == "trained in this row"
    assert second.facts["weights_from"] == "an earlier row of this run"
    assert first.facts["weights_sha256"] == second.facts["weights_sha256"]
    assert second.metric("exact_train_loss") is None
    for name in ("clean_accuracy_exact", "attacked_accuracy_exact", "psnr_exact"):
        assert _last(first, name) == _last(second, name)
    assert second.facts["calibration_images"] == 200
    worst = min(_last(second, f"{name}_accuracy") for name in ("attacked", "surrogate"))
    assert _last(second, "worst_accuracy") <= worst
    masked = _last(second, "attacked_accuracy") - _last(second, "worst_accuracy")
    assert _last(second, "masked") == pytest.approx(masked)


class _Staircase(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grads[0])


class _Masked(nn.Module):
    """The same network, whose gradient is 0 everywhere."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Staircase.apply(self.model(images))
        return result


def test_a_masked_gradient_is_no_robustness(
    control: Tuple[Row, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that only hides its gradient withstands its own, and not the exact one's."""
    monkeypatch.setattr(
        _ROWS.module("run"), "approximate", lambda _ctx, exact, _set: _Masked(exact)
    )
    row = _ROWS.run(tmp_path, "epsilon=0.2", f"weights={control[1]}")

    assert _last(row, "attacked_accuracy") == _last(row, "clean_accuracy") > 50.0
    assert _last(row, "unchanged") == 100.0
    assert _last(row, "surrogate_accuracy") == _last(row, "attacked_accuracy_exact")
    assert _last(row, "masked") > 20.0
    assert _last(row, "worst_accuracy") == _last(row, "attacked_accuracy_exact")
    assert row.metric("psnr") is None


def test_the_exact_gradient_is_that_of_the_surrogate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = tmp_path / "some.pth"
    torch.save(ManualNet().state_dict(), str(weights))
    row = _ROWS.run(tmp_path, f"weights={weights}", "gradient=exact", "policy=mitchell")

    assert row.facts["weights_from"] == "the file some.pth"
    assert _last(row, "attacked_accuracy") == _last(row, "surrogate_accuracy")


@pytest.mark.parametrize("word", ["policy=axfmp", "gradient=locla"])
def test_a_name_that_is_not_there_costs_no_training(tmp_path: Path, word: str) -> None:
    with pytest.raises(UnknownNameError):
        _ROWS.run(tmp_path, word)
    assert not (tmp_path / "weights-0.pt").exists()


def test_pixels_are_normalised_behind_the_attack() -> None:
    """The network gets what training gave it: black is -1 and white is 1."""
    normalised = _ROWS.module("subjects").Normalised(nn.Identity())
    assert normalised(torch.tensor([0.0, 0.5, 1.0])).tolist() == [-1.0, 0.0, 1.0]


def test_profiles_have_what_claims_need() -> None:
    spec = _ROWS.spec()
    for claim in load_claims(EXPERIMENTS / NAME / "claims.toml", spec):
        rows = _ROWS.job(profile=claim.profile).rows
        for selection in claim.selections:
            met = [r for r in rows if selection.where.items() <= dict(r.parameters).items()]
            assert len(met) >= claim.minimum_repeats, claim.id
