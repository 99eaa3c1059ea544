"""Launches are hidden where they can be, and shown where not."""

from __future__ import annotations

import pytest
import torch

from narrowgauge_lab.errors import ClockError, HeldTooLongError
from narrowgauge_lab.measure import TimingPlan, with_hidden_launches


def taken(device, error=None):
    asked = []

    def take(plan):
        asked.append(plan.hide_launches)
        if error is not None and (plan.hide_launches or not isinstance(error, HeldTooLongError)):
            raise error
        return plan.limit_s

    assert with_hidden_launches(take, torch.device(device), TimingPlan(limit_s=0.25)) == 0.25
    return asked


def test_they_are_hidden_on_cuda_alone():
    assert taken("cuda") == [True]
    assert taken("cpu") == [False]


def test_what_cannot_be_queued_is_measured_with_its_launches():
    assert taken("cuda", HeldTooLongError("held for 5 s")) == [True, False]


def test_other_errors_pass():
    with pytest.raises(ClockError):
        taken("cuda", ClockError("it stands still"))
