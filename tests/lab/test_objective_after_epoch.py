"""What an objective measures after each epoch is a metric of the epoch, of a resumed row too."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Tuple

import pytest
import torch
from anytime_cases import EXITS, AnytimeCase, ThreeExits, recipe
from torch import nn

from narrowgauge_lab.anytime.objective import ExitLosses


class _Weighing(ExitLosses):
    """Measures how large the first layer's weights are, which differs from epoch to epoch."""

    def metrics(self) -> Dict[str, Tuple[str, str]]:
        return {**super().metrics(), "first_layer_norm": ("1", "computed")}

    def after_epoch(self, model: nn.Module) -> Dict[str, float]:
        assert isinstance(model, ThreeExits)
        return {"first_layer_norm": float(next(model.convs.parameters()).detach().norm())}


def test_it_is_recorded_of_each_epoch(tmp_path: Path) -> None:
    case = AnytimeCase(tmp_path)
    trained = case.run(recipe(_Weighing(EXITS)), net=ThreeExits())

    found = case.values("first_layer_norm")

    assert len(set(found)) == 3
    assert isinstance(trained, ThreeExits)
    last = float(next(trained.convs.parameters()).detach().norm())
    assert found[-1] == pytest.approx(last, rel=1e-6)


def test_a_resumed_row_has_that_of_the_epochs_before(tmp_path: Path) -> None:
    whole = AnytimeCase(tmp_path / "whole")
    torch.manual_seed(1)
    whole.run(recipe(_Weighing(EXITS)), net=ThreeExits())
    cut = AnytimeCase(tmp_path / "cut")
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        cut.run(recipe(_Weighing(EXITS)), net=ThreeExits(fail_at=13))
    cut.run(recipe(_Weighing(EXITS)), net=ThreeExits(), resume=True)

    assert cut.row().facts["resumed_after_epoch"] in (1, 2)
    assert len(cut.values("first_layer_norm")) == 3
    assert cut.values("first_layer_norm") == whole.values("first_layer_norm")


def test_an_objective_need_not_measure_anything(tmp_path: Path) -> None:
    assert ExitLosses(EXITS).after_epoch(ThreeExits()) == {}
