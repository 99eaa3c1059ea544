"""A model that is looked at in eval mode is afterwards as it was, module by module."""

from __future__ import annotations

import pytest
from torch import nn

from narrowgauge_lab.evalmode import in_eval_mode


def test_each_module_gets_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.Dropout()))
    model.train()
    model[1].eval()  # kept as it is while the others train

    with in_eval_mode(model):
        assert not any(module.training for module in model.modules())

    modes = [module.training for module in model.modules()]
    assert modes == [True, True, False, True, True]


def test_after_an_error_too() -> None:
    model = nn.Dropout()
    with pytest.raises(RuntimeError), in_eval_mode(model):
        raise RuntimeError
    assert model.training
