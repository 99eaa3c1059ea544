"""A checkout of its own for tests that need one: real targets, one tiny experiment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launching import TINY_TOML

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny_checkout(tmp_path: Path) -> Path:
    """A folder that counts as a checkout, with what names an image, and the experiment `tiny`."""
    root = tmp_path / "checkout"
    for name in ("docker", "images"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("narrowgauge_contract", "narrowgauge_lab", "narrowgauge_kernels"):
        (root / "src" / name).mkdir(parents=True)
    (root / "experiments" / "tiny").mkdir(parents=True)
    (root / "experiments" / "tiny" / "experiment.toml").write_text(TINY_TOML)
    return root
