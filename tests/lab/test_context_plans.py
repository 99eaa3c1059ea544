"""A placement plan on its way from `-p plan=…` into a row, in the lab's own runs and from a job."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional

import pytest
import torch
from toys import fold, request, write_toy

from narrowgauge_contract.errors import (
    DamagedRecordError,
    ExitCode,
    PlanFileError,
    UsageError,
)
from narrowgauge_contract.events import EVENTS_FILE, EventLog
from narrowgauge_contract.job import RowPlan
from narrowgauge_contract.placement import BUILTIN, parse_plan, plan_value
from narrowgauge_contract.record import load_record
from narrowgauge_lab import session
from narrowgauge_lab.cli import main
from narrowgauge_lab.context import RowContext

_PARAMETER = """
[parameters.plan]
type = "plan"
axis = "row"
default = "none"
help = "where passes run"
"""
_MINE = """
[plan]
name = "mine"
elsewhere = "cpu"
[passes]
device = "accelerator"
precision = "int8"
[layers."z.*"]
precision = "bf16"
[layers."*.conv"]
precision = "fp16"
"""
_BODY = """
value = ctx.parameters["plan"]
if value != "none":
    ctx.fact("precision", ctx.plan(value).placement("z.conv").forward.precision)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The toy with a parameter `plan` is there, and so is the file of a plan."""
    write_toy(tmp_path / "experiments", _BODY, extra=_PARAMETER)
    path = tmp_path / "mine.toml"
    path.write_text(_MINE)
    return path


@pytest.mark.usefixtures("mine")
def test_a_row_has_the_plan_of_its_file(tmp_path: Path) -> None:
    outcome = session.run(request(tmp_path, "plan=none,mine.toml,hetero-int8"))

    rows = fold(tmp_path / "out").rows()
    assert outcome.exit_code == 0, outcome.error
    assert [row.facts.get("precision") for row in rows] == [None, "fp16", "int8"]
    record = load_record(tmp_path / "out" / "record.json")
    assert record.plan is not None
    assert list(record.plan) == ["hetero-int8", rows[1].parameters["plan"]]
    assert rows[1].parameters["plan"].startswith("mine@")


def test_a_job_needs_no_file_and_a_resumed_run_its_own_copy(tmp_path: Path, mine: Path) -> None:
    assert session.run(request(tmp_path, "plan=mine.toml")).exit_code == 0
    job = tmp_path / "job.json"
    job.write_bytes((tmp_path / "out" / "job.json").read_bytes())
    value = json.loads(job.read_text())["parameters"]["plan"]
    mine.write_text(_MINE.replace("fp16", "fp32"))

    with pytest.raises(UsageError, match=r"holds another run(.|\n)*its plan differ"):
        session.run(request(tmp_path, "plan=mine.toml", resume=True))
    mine.unlink()
    with pytest.raises(PlanFileError, match=f"its own copy, given as: {value}"):
        session.run(request(tmp_path, "plan=mine.toml", resume=True))
    assert session.run(request(tmp_path, f"plan={value}", resume=True)).exit_code == 0
    anew = dataclasses.replace(request(tmp_path), out=tmp_path / "anew", experiment="", job=job)
    assert session.run(anew).exit_code == 0
    assert [row.facts["precision"] for row in fold(tmp_path / "anew").rows()] == ["fp16"]


@pytest.mark.usefixtures("mine")
def test_a_file_that_a_container_does_not_see_is_told_with_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = ["--experiments", str(tmp_path / "experiments"), "--out", str(tmp_path / "out")]

    code = main(["run", "toy", "-p", "plan=plans/theirs.toml", *place])

    said = capfd.readouterr().err
    assert code == ExitCode.USAGE
    assert "there is no placement plan 'plans/theirs.toml'" in said
    assert "built in: cpu, accelerator," in said
    assert "docker compose run -v $PWD/my.toml:/plan.toml:ro … -p plan=/plan.toml" in said
    assert not (tmp_path / "out" / "job.json").exists()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path / EVENTS_FILE) as log:
        yield log


def _context(log: EventLog, plans: Optional[Mapping[str, Any]]) -> RowContext:
    plan = RowPlan(0, 0, 0, {})
    folder = log.path.parent
    return RowContext(plan, log, folder, device=torch.device("cpu"), profile="smoke", plans=plans)


def test_a_row_has_no_plan_but_those_of_its_run(log: EventLog) -> None:
    ctx = _context(log, {"hetero-fp32": BUILTIN["hetero-fp32"]})

    assert ctx.plan("hetero-fp32") == parse_plan(BUILTIN["hetero-fp32"], "x")
    for value in ("none", "cpu", "mine@3fa9c1d2"):
        with pytest.raises(UsageError, match=f"no placement plan '{value}'(.|\n)*has: hetero-fp32"):
            ctx.plan(value)
    with pytest.raises(UsageError, match="it has: none"):
        _context(log, None).plan("cpu")


def test_a_plan_that_was_changed_in_the_job_is_not_used(log: EventLog) -> None:
    document: Dict[str, Any] = json.loads(json.dumps(BUILTIN["hetero-fp32"]))
    value = plan_value(parse_plan(document, "x"))
    assert _context(log, {value: document}).plan(value).name == "hetero-fp32"

    document["transfer"]["policy"] = "pinned"
    with pytest.raises(DamagedRecordError, match=f"the run's plan '{value}' is another"):
        _context(log, {value: document}).plan(value)
    document["transfer"]["policy"] = "pined"
    with pytest.raises(PlanFileError, match="did you mean 'pinned'"):
        _context(log, {value: document}).plan(value)
