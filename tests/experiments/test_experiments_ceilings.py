"""The experiment `ceilings`: its declaration, its claims, and rows from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from narrowgauge_contract.claims import ClaimKind, load_claims
from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.job import parse_overrides, resolve
from narrowgauge_contract.outcome import Fold, Row
from narrowgauge_contract.spec import ExperimentSpec, load_spec
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.experiments import load_run
from narrowgauge_lab.measure.ceilings import CEILINGS

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CPU = torch.device("cpu")


def _spec() -> ExperimentSpec:
    return load_spec(EXPERIMENTS / "ceilings" / "experiment.toml")


def _run(out: Path, *words: str) -> Row:
    spec = _spec()
    job = resolve(
        spec, parse_overrides(spec, words), profile="smoke", target="native", seed=0, run_id="r"
    )
    plan = job.rows[0]
    with EventLog(out / EVENTS_FILE) as log:
        head = {"repeat": plan.repeat, "seed": plan.seed, "parameters": plan.parameters}
        log.emit(EventKind.ROW_START, plan.index, **head)
        ctx = RowContext(plan, log, out, device=CPU, profile="smoke")
        load_run(EXPERIMENTS, "ceilings")(ctx)
        ctx.finish()
        log.emit(EventKind.ROW_END, plan.index, status="complete", seconds=1.0, error=None)
    (row,) = Fold().add_all(read_events(out / EVENTS_FILE)).rows()
    return row


def test_the_parameter_offers_every_ceiling() -> None:
    assert _spec().parameters["ceiling"].choices == CEILINGS


@pytest.mark.parametrize(
    ("name", "metric", "unit"),
    [("copy", "bytes_per_second", "B/s"), ("fp32", "macs_per_second", "MAC/s")],
)
def test_a_row_keeps_its_samples_and_says_what_was_done(
    name: str, metric: str, unit: str, tmp_path: Path
) -> None:
    row = _run(tmp_path, f"ceiling={name}", "seconds=0.05")

    (found,) = row.metrics
    assert (found.name, found.unit, found.source) == (metric, unit, "monotonic")
    assert len(found.values) == row.facts["ceiling"]["samples"]
    assert max(found.values) == pytest.approx(row.facts["ceiling"]["per_second"])
    assert min(found.values) > 0
    assert row.facts["ceiling"]["library"].startswith(("torch.mm", "oneDNN", "Tensor.copy_"))
    assert "state_before" in row.facts
    assert row.validity.valid or "held back" in row.validity.reasons[0]


def test_a_ceiling_that_a_cpu_lacks_is_an_error_of_the_row(tmp_path: Path) -> None:
    with pytest.raises(NotApplicableError, match="no ceiling 'h2d' on cpu"):
        _run(tmp_path, "ceiling=h2d")


def test_the_claims_are_about_what_is_recorded() -> None:
    spec = _spec()
    claims = load_claims(EXPERIMENTS / "ceilings" / "claims.toml", spec)
    transfers = {"copy", "h2d", "d2h", "duplex", "h2d-pageable"}

    for claim in claims:
        for selection in claim.selections:
            name = selection.where["ceiling"]
            expected = "bytes_per_second" if name in transfers else "macs_per_second"
            assert selection.metric == expected
            assert name in spec.profiles[claim.profile].values["ceiling"]
    anchored = [claim for claim in claims if claim.kind is ClaimKind.VALUE]
    assert len(anchored) == 9
    assert all(claim.measured_on == "NVIDIA H200" for claim in anchored)
