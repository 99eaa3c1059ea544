"""What the tests of the lab share. Their helper modules lie beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that trainings share, what tests train records its speed nevertheless."""
    monkeypatch.delenv("NARROWGAUGE_TURNS", raising=False)


@pytest.fixture
def quick_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking torch for devices in a child takes a while; the tests of the facts do ask."""
    from toys import INSIDE

    from narrowgauge_lab import facts

    monkeypatch.setattr(facts, "gather", lambda env: INSIDE)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a CPU, which replay what was captured."""
    from exit_cases import record_graphs

    record_graphs(monkeypatch)
