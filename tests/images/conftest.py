"""A scratch checkout, so that no test writes into the true one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from board import Board, make_board

from narrowgauge.targets import TARGETS_FILE, Target, load_targets

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def targets() -> dict[str, Target]:
    return load_targets(ROOT / TARGETS_FILE)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of everything that an image is made of."""
    root = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "build", "*.whl")
    for name in ("docker", "images", "experiments", "src"):
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    shutil.copy2(ROOT / "compose.yaml", root)
    return root


@pytest.fixture(params=["dash", "busybox"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return make_board(request.param, tmp_path)


@pytest.fixture
def dash(tmp_path: Path) -> Board:
    """For what does not depend on the shell."""
    return make_board("dash", tmp_path)
