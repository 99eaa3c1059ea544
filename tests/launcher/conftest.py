"""A checkout of its own for tests that need one: real targets, one tiny experiment."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from launching import TINY_TOML

ROOT = Path(__file__).parents[2]
# The tiny set that the tests of data share.
sys.path.insert(0, str(ROOT / "tests" / "datasets"))


@pytest.fixture
def tiny_checkout(tmp_path: Path) -> Path:
    """A folder that counts as a checkout, with what names an image, and the experiment `tiny`."""
    root = tmp_path / "checkout"
    for name in ("docker", "images"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("contract", "data", "kernels", "lab"):
        (root / "src" / f"narrowgauge_{name}").mkdir(parents=True)
    (root / "experiments" / "tiny").mkdir(parents=True)
    (root / "experiments" / "tiny" / "experiment.toml").write_text(TINY_TOML)
    return root
