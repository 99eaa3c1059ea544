"""`profile`, the parameter that every experiment has: given, refused, absent where not asked."""

from __future__ import annotations

import pytest
from contract_cases import document, spec

from narrowgauge_contract.errors import BadValueError, ExperimentFileError, UnknownNameError
from narrowgauge_contract.job import Job, parse_overrides, resolve, resolve_all
from narrowgauge_contract.spec import parse_spec


def _resolved(*words: str) -> Job:
    overrides = parse_overrides(spec(), words)
    return resolve(spec(), overrides, profile="smoke", target="cpu", seed=0, run_id="r")


@pytest.mark.parametrize("words", [(), ("profile=none",)])
def test_without_a_profiler_a_job_is_what_it_always_was(words: tuple) -> None:  # type: ignore[type-arg]
    job = _resolved(*words)

    assert "profile" not in job.parameters
    assert all("profile" not in row.parameters for row in job.rows)


def test_with_one_it_is_a_parameter_of_the_job_and_of_every_row() -> None:
    job = _resolved("profile=torch", "width=4,8")

    assert job.parameters["profile"] == "torch"
    assert [row.parameters["profile"] for row in job.rows] == ["torch", "torch"]
    assert {k: v for k, v in job.parameters.items() if k != "profile"} == _resolved(
        "width=4,8"
    ).parameters


def test_a_list_makes_runs_so_that_no_run_mixes_both() -> None:
    overrides = parse_overrides(spec(), ["profile=none,cprofile"])
    jobs = resolve_all(spec(), overrides, profile="smoke", target="cpu", seed=0)

    assert [job.parameters.get("profile") for job in jobs] == [None, "cprofile"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("profile=smoke", "asks for a profiler of that name"),
        ("profile= paper", "asks for a profiler of that name"),
        ("profile=perf", "does not take 'perf'"),
    ],
)
def test_what_is_no_profiler_is_refused(word: str, message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        _resolved(word)


def test_an_amount_in_place_of_a_profiler_names_the_option() -> None:
    with pytest.raises(BadValueError) as raised:
        _resolved("profile=smoke")

    assert "--profile smoke" in raised.value.next_step


def test_a_profiler_in_place_of_an_amount_names_the_parameter() -> None:
    with pytest.raises(BadValueError) as raised:
        resolve(spec(), {}, profile="torch", target="cpu", seed=0, run_id="r")

    assert "-p profile=torch" in raised.value.next_step


def test_a_mistyped_name_is_told_of_it() -> None:
    with pytest.raises(UnknownNameError, match="unknown parameter 'profil'") as raised:
        parse_overrides(spec(), ["profil=torch"])

    assert "did you mean 'profile'?" in raised.value.next_step


@pytest.mark.parametrize("alias", [False, True])
def test_no_experiment_may_declare_it(alias: bool) -> None:
    declared = document()
    if alias:
        declared["parameters"]["width"]["aliases"] = ["profile"]
    else:
        declared["parameters"]["profile"] = declared["parameters"].pop("note")

    with pytest.raises(ExperimentFileError, match="already"):
        parse_spec(declared)
