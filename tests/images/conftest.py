"""A scratch checkout, so that no test writes into the true one."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
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


@pytest.fixture(params=["dash", pytest.param("busybox", marks=pytest.mark.slow)])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    if request.param == "busybox" and not _takes_programs_of_the_path():
        pytest.skip("this busybox prefers its own programs to those of the PATH: busybox-static")
    return make_board(request.param, tmp_path)


@functools.lru_cache(maxsize=1)
def _takes_programs_of_the_path() -> bool:
    """A board's programs are made up: a shell has to find them."""
    with tempfile.TemporaryDirectory() as folder:
        fake = Path(folder, "uname")
        fake.write_text("#!/bin/sh\necho made up\n", encoding="utf-8")
        fake.chmod(0o755)
        words = ["busybox", "sh", "-c", f"PATH={folder}:$PATH; uname"]
        return subprocess.run(words, capture_output=True, text=True).stdout == "made up\n"


@pytest.fixture
def dash(tmp_path: Path) -> Board:
    """For what does not depend on the shell."""
    return make_board("dash", tmp_path)
