"""What claims are expected on: targets that there are, as far as they say one."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.targets import load_targets
from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.spec import load_spec

ROOT = Path(__file__).parents[2]
TARGETS = load_targets(ROOT / "docker" / "targets.toml")
CLAIMED = sorted(path.parent.name for path in ROOT.glob("experiments/*/claims.toml"))


@pytest.mark.parametrize("name", CLAIMED)
def test_expectations_name_targets(name: str) -> None:
    folder = ROOT / "experiments" / name
    claims = load_claims(folder / "claims.toml", load_spec(folder / "experiment.toml"))

    assert claims
    for claim in claims:
        assert set(claim.expected) <= {"any", *TARGETS}, claim.id
