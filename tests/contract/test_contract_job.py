"""From overrides to Jobs: what multiplies rows, what multiplies runs, and that it is pure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, List, Tuple

import pytest
from contract_cases import document, spec
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge_contract.codec import decode, dumps, write_json_atomic
from narrowgauge_contract.errors import (
    BadValueError,
    DamagedRecordError,
    ExperimentFileError,
    UnknownNameError,
    UsageError,
)
from narrowgauge_contract.job import (
    Job,
    load_job,
    new_run_id,
    parse_overrides,
    resolve,
    resolve_all,
    shard_rows,
)
from narrowgauge_contract.spec import ExperimentSpec, parse_spec


def _job(words: List[str], profile: str = "short", seed: int = 5) -> Job:
    toy = spec()
    overrides = parse_overrides(toy, words)
    return resolve(toy, overrides, profile=profile, target="cpu", seed=seed, run_id="r")


def test_defaults_then_profile_then_overrides() -> None:
    assert _job([]).parameters["width"] == [4, 8]
    assert _job(["width=16"]).parameters["width"] == 16
    assert _job([], profile="smoke").parameters["width"] == 8


def test_a_list_along_rows_makes_rows_and_repeats_are_interleaved() -> None:
    rows = _job(["precision=fp32,bf16", "width=4"]).rows

    seen = [(row.index, row.repeat, row.seed, row.parameters["precision"]) for row in rows]
    assert seen == [(0, 0, 5, "fp32"), (1, 0, 5, "bf16"), (2, 1, 6, "fp32"), (3, 1, 6, "bf16")]


def test_an_alias_is_stored_under_the_true_name() -> None:
    assert parse_overrides(spec(), [" w =16"]) == {"width": (16,)}
    assert _job(["w=16"]) == _job(["width=16"])
    toy = spec()
    assert resolve(toy, {"w": (16,)}, profile="smoke", target="cpu", seed=5, run_id="r") == resolve(
        toy, {"width": (16,)}, profile="smoke", target="cpu", seed=5, run_id="r"
    )
    with pytest.raises(UsageError, match="parameter 'width' is given twice"):
        _job(["w=16", "width=8"])


def test_a_value_given_twice_is_measured_once() -> None:
    assert len(_job(["precision=fp32,fp32", "width=4"]).rows) == 2


def test_a_list_along_runs_makes_runs() -> None:
    toy = spec()
    overrides = parse_overrides(toy, ["flip=true,false", "data=mnist,cifar10"])

    jobs = resolve_all(toy, overrides, profile="smoke", target="cpu", seed=0, run_ids=["a", "b"])

    assert [(job.parameters["flip"], job.parameters["data"]) for job in jobs] == [
        (True, "mnist"), (True, "cifar10"), (False, "mnist"), (False, "cifar10"),
    ]  # fmt: skip
    assert [job.run_id for job in jobs[:2]] == ["a", "b"]
    assert len({job.run_id for job in jobs}) == 4
    with pytest.raises(UsageError, match="make 4 runs, not one"):
        resolve(toy, overrides, profile="smoke", target="cpu", seed=0, run_id="a")


@pytest.mark.parametrize(
    ("words", "sets", "synthetic"),
    [
        ([], ("mnist",), False),
        (["data=cifar10"], ("cifar10",), False),
        (["data=synthetic"], (), True),
    ],
)
def test_made_up_data_only_when_asked_for(words: List[str], sets: object, synthetic: bool) -> None:
    job = _job(words)

    assert (job.data_sets, job.synthetic) == (sets, synthetic)


def test_resolving_is_pure() -> None:
    assert _job(["width=4,16"]) == _job(["width=4,16"])


@given(
    st.lists(st.sampled_from(["fp32", "bf16", "fp16"]), min_size=1),
    st.lists(st.integers(1, 64), min_size=1, max_size=5),
    st.sampled_from(["smoke", "short", "paper"]),
    st.integers(0, 99),
)
def test_every_combination_is_there_once_per_repeat(
    precisions: List[str], widths: List[int], profile: str, seed: int
) -> None:
    words = ["precision=" + ",".join(precisions), "width=" + ",".join(map(str, widths))]

    job = _job(words, profile, seed)

    repeats = {"smoke": 1, "short": 2, "paper": 10}[profile]
    combinations = {(r.parameters["precision"], r.parameters["width"]) for r in job.rows}
    assert combinations == {(p, w) for p in precisions for w in widths}
    assert len(job.rows) == len(combinations) * repeats
    assert [row.index for row in job.rows] == list(range(len(job.rows)))
    assert all(row.seed == seed + row.repeat for row in job.rows)
    assert decode(Job, json.loads(dumps(job))) == job


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["width"], UsageError, "is not name=value"),
        (["width=4", "width=8"], UsageError, "is given twice"),
        (["widht=4"], UnknownNameError, "unknown parameter 'widht'"),
        (["width=4,x"], BadValueError, "does not take 'x'"),
        (["width="], BadValueError, "does not take ''"),
        (["=4"], UnknownNameError, "unknown parameter ''"),
    ],
)
def test_a_bad_override_is_refused(words: List[str], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        parse_overrides(spec(), words)


def test_a_text_keeps_its_commas_where_it_is_declared_to_have_any() -> None:
    assert parse_overrides(spec(), ["note=a,b"]) == {"note": ("a,b",)}

    listed = document()
    del listed["parameters"]["note"]["commas"]

    assert parse_overrides(parse_spec(listed), ["note=a,b"]) == {"note": ("a", "b")}


@pytest.mark.parametrize("text", ["", "8", "8,16", " 8, 16 "])
def test_a_text_of_a_declared_form_is_taken(text: str) -> None:
    assert parse_overrides(_with_pattern(), [f"note={text}"]) == {"note": (text.strip(),)}


@pytest.mark.parametrize("text", ["8,", ",8", "8;16", "8\nx", "8,sixteen", "-8"])
def test_a_text_of_another_form_is_refused_with_its_declaration(text: str) -> None:
    with pytest.raises(BadValueError) as error:
        parse_overrides(_with_pattern(), [f"note={text}"])

    assert "not written as it should be" in str(error.value.why)
    assert "Free text." in error.value.next_step


def _with_pattern() -> ExperimentSpec:
    listed = document()
    listed["parameters"]["note"]["pattern"] = r"\d+(,\d+)*|"
    return parse_spec(listed)


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown profile 'shrot'"):
        _job([], profile="shrot")


@given(st.integers(1, 40), st.integers(1, 8))
def test_shards_share_the_rows_out(rows: int, shards: int) -> None:
    job = _job(["width=" + ",".join(str(1 + i) for i in range(rows))], profile="smoke")

    parts = [shard_rows(job.rows, (i, shards)) for i in range(1, shards + 1)]

    assert sorted(row.index for part in parts for row in part) == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("shard", [(0, 2), (3, 2), (1, 0)])
def test_a_shard_that_is_none_is_refused(shard: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="--shard"):
        shard_rows(_job([]).rows, shard)


def test_run_ids_sort_by_time_and_never_repeat() -> None:
    early, late = new_run_id("toy", 1000.0), new_run_id("toy", 2000.0)

    assert early < late
    assert re.fullmatch(r"\d{8}T\d{6}Z-toy-[0-9a-f]{6}", early)
    assert new_run_id("toy", 1000.0) != early


def test_a_job_survives_its_file_and_knows_its_spec(tmp_path: Path) -> None:
    job = _job([])
    write_json_atomic(tmp_path / "job.json", job)

    loaded = load_job(tmp_path / "job.json")

    assert loaded == job
    assert loaded.experiment_spec() == spec()


@pytest.mark.parametrize("text", ['{"format": 99}', "[]", "3", '{"format": 1}'])
def test_a_file_that_is_no_job_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)

    with pytest.raises(DamagedRecordError):
        load_job(tmp_path / "job.json")


def _with_sets(**where: Any) -> ExperimentSpec:
    table = document()
    table["data"] = {"where": where}
    return parse_spec(table)


@pytest.mark.parametrize(
    ("words", "expected"), [([], ()), (["precision=fp16,bf16"], ("a", "b", "c"))]
)
def test_sets_are_read_where_a_parameter_has_the_value_that_needs_them(
    words: List[str], expected: Tuple[str, ...]
) -> None:
    toy = _with_sets(precision={"fp16": ["a", "b"], "bf16": ["b", "c"]})
    overrides = parse_overrides(toy, words)
    job = resolve(toy, overrides, profile="smoke", target="cpu", seed=0, run_id="r")

    assert job.data_sets == expected
    assert not job.synthetic
    assert job.experiment_spec().data_where == toy.data_where


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ()),
        (["data=cifar10"], ()),
        (["precision=fp16"], ("pictures",)),
        (["precision=fp16", "data=cifar10"], ("pictures", "labels")),
        (["precision=fp16,bf16", "data=cifar10"], ("pictures", "labels", "others")),
    ],
)
def test_sets_may_need_two_parameters(words: List[str], expected: Tuple[str, ...]) -> None:
    fp16 = {"sets": ["pictures"], "where": {"data": {"cifar10": ["labels"]}}}
    toy = _with_sets(precision={"fp16": fp16, "bf16": {"where": {"data": {"cifar10": ["others"]}}}})
    overrides = parse_overrides(toy, words)
    job = resolve(toy, overrides, profile="smoke", target="cpu", seed=0, run_id="r")

    assert job.data_sets == expected
    assert job.experiment_spec().data_where == toy.data_where


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"precision": {"fp16": {"set": ["a"]}}}, "where.precision.fp16 has the unknown key 'set'"),
        (
            {"precision": {"fp16": {"where": {"width": {"8": ["a"]}}}}},
            "where.precision.fp16 where: 'width' is no parameter of type choice",
        ),
        ({"precison": {"fp16": ["a"]}}, "'precison' is no parameter of type choice"),
        ({"width": {"8": ["a"]}}, "'width' is no parameter of type choice"),
        ({"precision": {"fp61": ["a"]}}, "unknown key 'fp61'"),
        ({"precision": {"fp16": "a"}}, "should be a list of names"),
        ({"precision": ["a"]}, "should be a table"),
    ],
)
def test_sets_for_what_does_not_exist_are_refused(where: Any, message: str) -> None:
    with pytest.raises(ExperimentFileError, match=message):
        _with_sets(**where)
