"""A real Slurm, once for all tests of this folder, and what they share with the launcher's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_site import SlurmSite

sys.path.insert(0, str(Path(__file__).parents[1] / "launcher"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def site() -> Iterator[SlurmSite]:
    """Where Slurm is not installed this fails: only --no-cluster leaves these tests out."""
    site = SlurmSite()
    try:
        site.start()
        yield site
    finally:
        site.stop()


@pytest.fixture
def slurm(site: SlurmSite, monkeypatch: pytest.MonkeyPatch) -> SlurmSite:
    """The site, as the cluster of this process: submitit asks the process's own environment."""
    monkeypatch.setenv("SLURM_CONF", site.environment["SLURM_CONF"])
    return site
