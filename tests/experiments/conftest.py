"""Small networks on a machine that others use too: one thread is faster than threads that wait."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Every test here."""
