"""Threads of the CPU for a while."""

from __future__ import annotations

import pytest
import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.cpu_threads import cpu_threads


@pytest.mark.skipif(not torch_compat.threads_may_change(), reason="torch before 2.0")
def test_threads_are_changed_and_put_back_after_an_error_too() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with cpu_threads(before + 1) as running:
            assert running == torch.get_num_threads() == before + 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == before


def test_none_asked_for_leaves_them_as_they_are() -> None:
    before = torch.get_num_threads()
    with cpu_threads(0) as running:
        assert running == torch.get_num_threads() == before


def test_where_they_may_not_change_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat, "threads_may_change", lambda: False)
    before = torch.get_num_threads()
    with cpu_threads(before + 1) as running:
        assert running == torch.get_num_threads() == before
