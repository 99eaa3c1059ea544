"""benchmarks/reference/planned.py: from a run of costs to a plan that is measured."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from planner_cases import LAYERS, costs, recorded
from result_cases import host

from narrowgauge.judge.evidence import evidence_for
from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.job import parse_overrides, resolve
from narrowgauge_contract.outcome import InsideFacts, Metric, Row, Status, Validity
from narrowgauge_contract.placement_files import load_plan, read_plans
from narrowgauge_contract.record import Hashes, Record, load_record
from narrowgauge_contract.spec import ExperimentSpec, load_spec

ROOT = Path(__file__).parents[2]
#: A Python with torch: the suite names its own; `scripts/test.sh` keeps one here.
_LAB = os.environ.get("NARROWGAUGE_TEST_LAB_PYTHON", str(ROOT / ".test/lab311/bin/python"))


@pytest.fixture(scope="module")
def planned() -> ModuleType:
    folder = ROOT / "benchmarks" / "reference"
    sys.path.insert(0, str(folder))  # as where it is run as a script
    spec = importlib.util.spec_from_file_location("reference_planned", folder / "planned.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's folder."""
    folder = tmp_path / "jobs" / "planned"
    monkeypatch.setenv("OUT", str(folder))
    return folder


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """In the lab's place: writes down what it was called with."""
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "open(os.environ['OUT'] + '/words.json', 'w').write(json.dumps(sys.argv[1:]))\n"
        "sys.exit(7)\n"
    )
    path.chmod(0o755)
    return path


def _words(out: Path) -> list[str]:
    found: list[str] = json.loads((out / "words.json").read_text())
    return found


def _parameters(words: list[str]) -> dict[str, str]:
    given = [words[at + 1] for at, word in enumerate(words) if word == "-p"]
    return dict(each.split("=", 1) for each in given)


def test_the_lab_gets_the_plan_and_what_it_takes(
    planned: ModuleType, out: Path, lab: Path, tmp_path: Path
) -> None:
    run = recorded(tmp_path / "results", costs())

    words = [str(run.path), "cpu", "--python", str(lab), "-p", "exhaustive=true"]
    assert planned.main(words) == 7

    given = _words(out)
    assert given[:4] == ["-m", "narrowgauge_lab", "run", "hetero-plan"]
    assert given[given.index("--profile") + 1] == "paper"
    assert "--resume" not in given
    assert "--host-facts" not in given
    parameters = _parameters(given)
    assert parameters.pop("plan") == str(out / "plan.toml")
    predicted = float(parameters.pop("predicted"))
    assert 0 < float(parameters.pop("bound")) <= predicted
    assert parameters.pop("accelerator_step") == "0", "nobody measured such a step"
    assert parameters == {
        "network": "made-up", "batch": "32", "elsewhere": "cpu", "exhaustive": "true",
    }  # fmt: skip
    plan = load_plan(out / "plan.toml")
    assert (plan.name, plan.elsewhere) == ("solved", "cpu")
    page = (out / "solved.txt").read_text()
    assert "predicted step:" in page
    assert "Resources" in page
    assert all(layer.name in page for layer in LAYERS)


def test_what_was_cut_off_goes_on_with_the_same_plan(
    planned: ModuleType, out: Path, lab: Path, tmp_path: Path
) -> None:
    run = recorded(tmp_path / "results", costs())
    words = [str(run.path), "free", "--python", str(lab)]
    planned.main(words)
    before = _parameters(_words(out)), (out / "plan.toml").read_bytes()
    (out / "job.json").write_text("{}")
    (out.parent / "host.json").write_text("{}")

    planned.main(words)

    again = _words(out)
    assert again[-3:] == ["--host-facts", str(out.parent / "host.json"), "--resume"]
    assert (_parameters(again), (out / "plan.toml").read_bytes()) == before
    assert before[0]["elsewhere"] == "free"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_claim_is_judged_on_its_own_plan(
    order: tuple[int, ...], planned: ModuleType, out: Path, lab: Path, tmp_path: Path
) -> None:
    """Whichever of the runs that the list asks for is the newest."""
    spec = load_spec(ROOT / "experiments" / "hetero-plan" / "experiment.toml")
    claims = load_claims(ROOT / "experiments" / "hetero-plan" / "claims.toml", spec)
    run = str(recorded(tmp_path / "results", costs()).path)
    asked = [(run, "cpu"), (run, "free"), (run, "cpu", "-p", "exhaustive=true")]
    claimed = {
        "prediction": 0, "step-near-its-bound": 0, "elsewhere-as-torch": 0,
        "never-slower-than-all-on-the-accelerator": 1, "as-fast-as-exhaustive-search": 2,
    }  # fmt: skip
    assert set(claimed) == {each.id for each in claims}
    records = []
    for number, words in enumerate(asked):
        planned.main([*words, "--python", str(lab)])
        given = _parameters(_words(out))
        given["network"] = "small" if "exhaustive" in given else "resnet20"
        records.append(_record(spec, given, f"2026112{order[number]}T100000Z-x"))

    for name, number in claimed.items():
        record = records[number]
        (claim,) = (each for each in claims if each.id == name)
        found = evidence_for(claim, spec, records)
        assert [each.run_id for each in found.records] == [record.run_id]
        assert not found.lacking
        assert not found.ambiguous
        ((side, *_),) = (case.sides for case in found.cases)
        assert len(side) == claim.minimum_repeats
        assert not found.departures, "no profile can name a plan that is made from costs"


def _record(spec: ExperimentSpec, given: dict[str, str], run_id: str) -> Record:
    """What a run with these parameters leaves, with every metric in every row."""
    read = read_plans(spec, [f"{name}={value}" for name, value in given.items()], ROOT)
    where: dict[str, Any] = {"target": "native", "seed": 0, "run_id": run_id}
    chosen = parse_overrides(spec, read.words)
    job = resolve(spec, chosen, profile="paper", plans=read.documents, **where)
    names = ["predicted_step", "step"]
    if "exhaustive" in given:
        names.append("best_step")
    else:
        names += ["step.accelerator", "step_over_bound"]
    if "exhaustive" not in given and given["elsewhere"] == "cpu":
        names += ["elsewhere.plan", "elsewhere.torch"]
    rows = tuple(
        Row(plan.index, plan.repeat, plan.seed, plan.parameters, Status.COMPLETE, Validity(True),
            metrics=tuple(Metric(name, "s", "monotonic", (1.0,)) for name in names))
        for plan in job.rows
    )  # fmt: skip
    return Record(
        format=1, run_id=run_id, experiment=spec.id, profile="paper", target="native", seed=0,
        parameters=job.parameters, synthetic=False, data_sets=(), status=Status.COMPLETE,
        exit_code=0, hashes=Hashes(None, "b" * 64, "c" * 64), rows=rows, host=host(),
        inside=InsideFacts("3.12", "Linux", torch="2.11.0", accelerator="H200"),
        started_utc=1e9, ended_utc=1e9 + 1, seconds=1.0, spec={}, plan=job.plan,
    )  # fmt: skip


def test_a_run_without_costs_is_said_and_nothing_runs(
    planned: ModuleType, out: Path, lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path / "results")

    assert planned.main([str(run.path), "cpu", "--python", str(lab)]) == 2

    assert "has no costs" in capsys.readouterr().err
    assert not (out / "words.json").exists()


def test_costs_of_this_machine_are_solved_and_measured(
    planned: ModuleType, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lab's part too, where there is a Python with torch; no figure of it is a measurement."""
    if not Path(_LAB).exists():
        pytest.skip(f"no Python with torch: {_LAB}; name one: NARROWGAUGE_TEST_LAB_PYTHON")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    earlier = out.parent / "costs"
    given = [_LAB, "-m", "narrowgauge_lab", "run", "hetero-plan", "--profile", "smoke"]
    quick = ["-p", "batch=2", "-p", "seconds=0.001"]
    subprocess.run([*given, "--out", str(earlier), *quick], cwd=ROOT, check=True, timeout=120)
    (earlier / "ended.json").write_text("{}")

    words = [str(earlier), "cpu", "--profile", "smoke", "--python", _LAB]
    assert planned.main(words) == 0

    (row,) = load_record(out / "record.json").rows
    assert row.parameters["network"] == "small"
    assert row.parameters["batch"] == 2
    assert row.parameters["elsewhere"] == "cpu"
    assert row.facts["plan"]["plan"]["name"] == "solved"
    metrics = {metric.name: metric.values for metric in row.metrics}
    assert metrics["predicted_step"] == (row.parameters["predicted"],)
    assert len(metrics["step"]) == len(metrics["step.accelerator"]) == 2
