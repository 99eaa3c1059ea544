"""Where a file of weights is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge_lab.shared_weights import asked_file


def test_the_experiments_own_folder_comes_first(tmp_path: Path) -> None:
    """A container has that folder, and no other of the user's."""
    (tmp_path / "net.pt").touch()

    assert asked_file("net.pt", tmp_path) == tmp_path / "net.pt"
    assert asked_file("other.pt", tmp_path) == Path("other.pt")
    assert asked_file(str(tmp_path / "net.pt"), Path("/elsewhere")) == tmp_path / "net.pt"


def test_a_home_is_written_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    assert asked_file("~/net.pt", Path("/elsewhere")) == tmp_path / "net.pt"


def test_repeats_have_files_of_their_own() -> None:
    assert asked_file("net-SEED.pt", Path("/elsewhere"), 2) == Path("net-2.pt")
    assert asked_file("SEED/net-SEED.pt", Path("/elsewhere"), 2) == Path("SEED/net-2.pt")
    assert asked_file("net-SEED.pt", Path("/elsewhere")) == Path("net-SEED.pt")


def test_an_empty_name_asks_for_none(tmp_path: Path) -> None:
    assert asked_file("", tmp_path) is None
