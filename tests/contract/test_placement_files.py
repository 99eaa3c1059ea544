"""A placement plan as a parameter: read from its file once, then part of the Job and of nothing
else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
from contract_cases import document

from narrowgauge_contract import placement
from narrowgauge_contract.agreement import disagreements
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.errors import (
    BadValueError,
    ExperimentFileError,
    PlanFileError,
    UnknownNameError,
)
from narrowgauge_contract.job import Job, load_job, parse_overrides, resolve, resolve_all
from narrowgauge_contract.outcome import Fold, Status, fold_outcome
from narrowgauge_contract.placement import BUILTIN, parse_plan, plan_document
from narrowgauge_contract.placement_files import PlanWords, load_plan, read_plans
from narrowgauge_contract.record import compose
from narrowgauge_contract.spec import ExperimentSpec, parse_spec

_TOML = """
[plan]
name = "{name}"
elsewhere = "cpu"
[passes]
device = "accelerator"
precision = "{precision}"
[layers."z.*"]
device = "cpu"
[layers."a.*"]
precision = "fp16"
"""


def _spec(**plan: Any) -> ExperimentSpec:
    table = document()
    body = {"type": "plan", "default": "none", "axis": "row", "help": "Where passes run.", **plan}
    table["parameters"]["plan"] = {**body, "aliases": ["placement"]}
    return parse_spec(table)


def _write(path: Path, precision: str = "bf16", name: str = "mine") -> Path:
    path.write_text(_TOML.format(name=name, precision=precision))
    return path


def _read(folder: Path, *words: str, spec: Optional[ExperimentSpec] = None) -> PlanWords:
    return read_plans(spec or _spec(), words, folder)


def _job(read: PlanWords, spec: Optional[ExperimentSpec] = None) -> Job:
    toy = spec or _spec()
    overrides = parse_overrides(toy, read.words)
    return resolve(
        toy, overrides, profile="smoke", target="cpu", seed=0, run_id="r", plans=read.documents
    )


def _named(read: PlanWords) -> List[str]:
    return read.words[0].partition("=")[2].split(",")


def test_a_job_holds_the_documents_of_its_rows_plans(tmp_path: Path) -> None:
    _write(tmp_path / "my.toml")

    job = _job(_read(tmp_path, "plan=none,hetero-int8,my.toml"))

    value = job.parameters["plan"][2]
    assert value.startswith("mine@")
    assert [row.parameters["plan"] for row in job.rows] == ["none", "hetero-int8", value]
    assert job.plan is not None
    assert list(job.plan) == ["hetero-int8", value]
    assert job.plan["hetero-int8"] == BUILTIN["hetero-int8"]
    assert job.plan[value] == plan_document(load_plan(tmp_path / "my.toml"))


def test_the_order_of_patterns_survives_the_jobs_file(tmp_path: Path) -> None:
    job = _job(_read(tmp_path, f"plan={_write(tmp_path / 'my.toml')}"))
    (tmp_path / "job.json").write_text(dumps(job))

    loaded = load_job(tmp_path / "job.json")

    assert loaded == job
    assert loaded.plan is not None
    plan = parse_plan(loaded.plan[loaded.parameters["plan"]], "job")
    assert plan == load_plan(tmp_path / "my.toml")
    assert [pattern for pattern, _ in plan.layers] == ["z.*", "a.*"]
    assert loaded.experiment_spec() == _spec()


def test_without_a_plan_a_job_is_what_it_always_was(tmp_path: Path) -> None:
    job = _job(_read(tmp_path))
    without = json.loads(dumps(job))
    del without["plan"]
    (tmp_path / "job.json").write_text(json.dumps(without))

    assert job.plan is None
    assert job.parameters["plan"] == "none"
    assert load_job(tmp_path / "job.json") == job


def test_plans_along_runs_are_each_in_their_own_job(tmp_path: Path) -> None:
    toy = _spec(axis="run", default="cpu")
    read = _read(tmp_path, f"plan=cpu,{_write(tmp_path / 'my.toml')}", spec=toy)

    overrides = parse_overrides(toy, read.words)
    jobs = resolve_all(toy, overrides, profile="smoke", target="cpu", seed=0, plans=read.documents)

    assert [list(job.plan or ()) for job in jobs] == [["cpu"], _named(read)[1:]]


def test_files_that_differ_are_never_called_the_same(tmp_path: Path) -> None:
    for name, precision in (("a", "bf16"), ("b", "fp16"), ("same", "bf16")):
        _write(tmp_path / f"{name}.toml", precision)
    _write(tmp_path / "as-built-in.toml", name="hetero-int8")

    named = _named(_read(tmp_path, "plan=a.toml,b.toml,same.toml,as-built-in.toml"))

    assert named[0] != named[1]
    assert named[0] == named[2]
    assert named[3].startswith("hetero-int8@")
    assert len(_job(_read(tmp_path, "plan=a.toml,b.toml,same.toml")).rows) == 2


def test_words_for_other_parameters_stay_as_they_are(tmp_path: Path) -> None:
    words = ("note=cpu,my.toml", "width=4", "nonsense", "plan= cpu , none")

    read = _read(tmp_path, *words)

    assert read.words == (*words[:3], "plan= cpu,none".replace(" ", ""))
    assert read.documents == {}
    with pytest.raises(UnknownNameError, match="unknown parameter 'plam'"):
        _read(tmp_path, "plam=my.toml")


def test_an_alias_takes_a_file_too(tmp_path: Path) -> None:
    read = _read(tmp_path, f"placement={_write(tmp_path / 'my.toml')}")

    assert _job(read) == _job(_read(tmp_path, "plan=my.toml"))


def test_a_file_read_once_is_not_needed_again(tmp_path: Path) -> None:
    path = _write(tmp_path / "my.toml")
    read = _read(tmp_path, "plan=my.toml")
    job = _job(read)
    path.unlink()

    again = read_plans(_spec(), read.words, tmp_path, kept=job.plan)

    overrides = parse_overrides(_spec(), again.words)
    resumed = resolve(
        _spec(), overrides, profile="smoke", target="cpu", seed=0, run_id="r", plans=job.plan
    )
    assert resumed == job
    with pytest.raises(PlanFileError, match=f"its own copy, given as: {_named(read)[0]}"):
        read_plans(_spec(), ["plan=my.toml"], tmp_path, kept=job.plan)
    with pytest.raises(
        BadValueError, match=r"asks for the placement plan 'mine@\w+', which is not"
    ):
        _job(PlanWords(read.words, {}))


def test_a_plan_that_is_nowhere_is_told_with_the_nearest_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError) as caught:
        read_plans(_spec(), ["plan=hetero-in8"], tmp_path, hint="mount it")

    said = str(caught.value)
    assert "there is no placement plan 'hetero-in8'" in said
    assert f"{tmp_path / 'hetero-in8'} is not there" in said
    assert "did you mean 'hetero-int8'?" in said
    assert "built in: cpu, accelerator," in said
    assert said.endswith("mount it")
    with pytest.raises(BadValueError, match="does not take ''"):
        _job(_read(tmp_path, "plan="))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[plan", "my.toml is not valid TOML"),
        (b"\xff\xfe", "my.toml is not valid TOML"),
        (b"", r"my.toml lacks the table \[plan\]"),
        (_TOML.format(name="a b", precision="fp32").encode(), "cannot be a plan's name"),
        (None, "my.toml cannot be read"),
    ],
)
def test_a_file_that_is_no_plan_is_a_named_error(
    tmp_path: Path, content: Optional[bytes], message: str
) -> None:
    path = tmp_path / "my.toml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)

    with pytest.raises(PlanFileError, match=message):
        _read(tmp_path, "plan=my.toml")


def test_a_name_too_long_for_a_file_is_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="there is no placement plan"):
        _read(tmp_path, f"plan={'x' * 5000}")


def test_the_declaration_names_what_is_built_in() -> None:
    said = _spec().parameter("plan").declaration()

    assert said.startswith("plan (or placement): a plan's TOML file, or one of cpu, accelerator,")
    assert all(name in said for name in BUILTIN)
    with pytest.raises(BadValueError, match="did you mean 'hetero-fp8'"):
        _spec().parameter("plan").parse("hetro-fp8")


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ({"default": "hetero-int9"}, BadValueError, "did you mean 'hetero-int8'"),
        ({"default": "plans/my.toml"}, BadValueError, "not a known value"),
        ({"default": 3}, BadValueError, "not of type plan"),
        ({"default": True}, BadValueError, "not of type plan"),
        ({"choices": ["cpu"]}, ExperimentFileError, "'choices' and type = \"choice\""),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(
    body: Dict[str, Any], kind: type, message: str
) -> None:
    with pytest.raises(kind, match=message):
        _spec(**body)


def test_runs_of_other_plans_are_not_put_into_one_statistic(tmp_path: Path) -> None:
    records = []
    for precision in ("bf16", "fp16", "bf16"):
        _write(tmp_path / "my.toml", precision)
        job = _job(_read(tmp_path, "plan=my.toml,cpu"))
        records.append(compose(job, fold_outcome(job, Fold(), Status.COMPLETE, 0), (), None))

    named = [line.partition(":")[0] for line in disagreements(records[0], records[1])]
    assert named == ["parameters", "plan"]
    assert disagreements(records[0], records[2]) == []
    # A later version of ours that means something else by a built-in plan's name.
    plans = {**(records[0].plan or {}), "cpu": BUILTIN["hetero-fp32"]}
    later = dataclasses.replace(records[0], plan=plans)
    assert [line.partition(":")[0] for line in disagreements(records[0], later)] == ["plan"]


PAGE = Path(__file__).parents[2] / "docs" / "placement.md"


def test_the_page_has_every_word_that_a_plan_may_have() -> None:
    words = [
        *placement.PASSES, *placement.DEVICES, *placement.ELSEWHERE, *placement.ELSEWHERE_BY,
        *placement.PRECISIONS, *placement.BACKENDS, *placement.POLICIES, *placement.WEIGHTS,
        *placement.WIRES, *placement.TENSORS,
    ]  # fmt: skip
    said = PAGE.read_text(encoding="utf-8")
    assert [word for word in words if f"`{word}`" not in said] == []


def test_the_page_has_a_plan_that_says_what_its_sentences_say(tmp_path: Path) -> None:
    said = PAGE.read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(said.partition("```toml\n")[2].partition("```")[0])

    plan = load_plan(tmp_path / "mine.toml")

    assert plan.name in said.partition("## A plan")[2]
    assert {pass_: plan.default.of(pass_).precision for pass_ in placement.PASSES} == {
        "forward": "bf16", "input_grad": "fp8", "weight_grad": "bf16",
    }  # fmt: skip
    first = plan.placement("conv1")
    assert {first.of(pass_).precision for pass_ in placement.PASSES} == {"fp32"}
