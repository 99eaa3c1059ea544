"""Small networks on a machine that others use too: one thread is faster than threads that wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from narrowgauge_lab.torch_compat import threads_may_change


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    if not threads_may_change():  # a convolution of the same shape in a later test might crash
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
