"""claims.toml: the closed language of claims, and every way to get it wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Dict

import pytest

from narrowgauge_contract.claims import (
    ClaimKind,
    Expectation,
    MetricOperator,
    Selection,
    load_claims,
    parse_claims,
)
from narrowgauge_contract.errors import (
    BadValueError,
    ClaimsError,
    ExitCode,
    UnknownNameError,
)
from narrowgauge_contract.record import load_record
from narrowgauge_contract.spec import ExperimentSpec, load_spec, parse_spec

DATA = Path(__file__).parents[1] / "data"


def _spec() -> ExperimentSpec:
    return parse_spec(load_record(DATA / "records" / "tensor-cores.json").spec)


def _claim() -> Dict[str, Any]:
    return {
        "id": "c", "text": "t", "paper": "p", "kind": "ratio", "minutes": 1, "disk_gb": 0.5,
        "metric": {"operator": "ratio", "of": ["tflops{precision=bf16}", "tflops"]},
        "expected": {"any": {"figure": 2.0, "tolerance": 0.1}},
    }  # fmt: skip


def test_every_kind_and_operator_is_read() -> None:
    claims = load_claims(DATA / "claims" / "tensor-cores.toml", _spec())

    assert {claim.kind for claim in claims} == set(ClaimKind)
    assert {claim.operator for claim in claims} == set(MetricOperator)
    first = claims[0]
    assert first.selections[0] == Selection("tflops", {"precision": "bf16"})
    assert first.expected["any"] == Expectation(figure=8.0, tolerance=0.5)
    assert first.minimum_repeats == 5
    assert claims[1].selections[0].where == {"precision": "int8", "size": 4096}
    assert claims[1].minimum_repeats == 3


def test_a_selection_says_what_it_was_read_from() -> None:
    """A value with commas, as a list of ratios, is in quotes."""
    spec = load_spec(Path(__file__).parents[2] / "experiments" / "pruning" / "experiment.toml")
    body = {**_claim(), "kind": "bound", "expected": {"any": {"minimum": 1.5}}}
    words = "chosen_speedup{method=l1-channel, ratios='0.5,0.6', compile=true}"
    body["metric"] = {"operator": "value", "of": [words]}

    [claim] = parse_claims({"claim": [body]}, spec)
    body["metric"] = {"operator": "value", "of": [str(claim.selections[0])]}
    [again] = parse_claims({"claim": [body]}, spec)

    assert again == claim
    assert claim.selections[0].where == {
        "method": "l1-channel", "ratios": "0.5,0.6", "compile": True,
    }  # fmt: skip
    assert str(claim.selections[0]) == words
    assert str(Selection("step", {})) == "step"


@pytest.mark.parametrize("statistic", ["alarm-rate", "slower-rate"])
def test_the_shares_of_comparisons_are_statistics(statistic: str) -> None:
    body = _claim()
    body["kind"] = "value"
    body["metric"] = {"operator": "value", "of": ["tflops"], "statistic": statistic}

    [claim] = parse_claims({"claim": [body]}, _spec())

    assert claim.statistic == statistic


def test_the_least_claim_is_enough() -> None:
    [claim] = parse_claims({"claim": [_claim()]}, _spec())

    assert (claim.statistic, claim.profile, claim.device) == ("median", "paper", "")


def test_a_claim_may_be_of_one_device() -> None:
    [claim] = parse_claims({"claim": [{**_claim(), "device": "NVIDIA H200"}]}, _spec())

    assert claim.device == "NVIDIA H200"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("id", ..., "lacks 'id'"),
        ("id", 3, "'id' should be text"),
        ("text", "", "'text' should be text"),
        ("minutes", ..., "lacks 'minutes'"),
        ("minutes", "two", "'minutes' should be a number"),
        ("disk_gb", True, "'disk_gb' should be a number"),
        ("minimum_repeats", 0, "'minimum_repeats' should be a whole number"),
        ("minimum_repeats", 2.5, "'minimum_repeats' should be a whole number"),
        ("kind", "opinion", "kind 'opinion' is not one of"),
        ("profile", "long", "profile is one of"),
        ("verdict", "REPRODUCED", "unknown key 'verdict'"),
        ("not_comparable", "", "'not_comparable' should be text"),
        ("device", "", "'device' should be text"),
        ("metric", "tflops", "should be a table"),
        ("metric/operator", "eval", "'eval' is not one of"),
        ("metric/of", ["tflops"], "'ratio' takes 2 to 2 selections"),
        ("metric/of", "tflops", "'of' should be a list"),
        ("metric/of", ["tflops", 3], "'of' should be a list"),
        ("metric/of", ["tflops", "tflops[0]"], "is not name{parameter=value"),
        ("metric/of", ["tflops", "__import__('os')"], "is not name{parameter=value"),
        ("metric/of", ["tflops", "tflops{precision}"], "is not parameter=value"),
        ("metric/of", ["tflops", "tflops{precision='fp16}"], "has quotes that are not around it"),
        ("metric/of", ["tflops", "tflops{precision=f'p'16}"], "has quotes that are not around it"),
        ("metric/statistic", "best", "statistic is one of"),
        ("metric/unit", "s", "unknown key 'unit'"),
        ("expected", {}, "names no target"),
        ("expected", [], "should be a table"),
        ("expected/native", {"figure": 2.0, "tolerance": 0.1}, "expected.native is of no hardware"),
        ("expected/any", 3, "should be a table"),
        ("expected/any", {"figure": 2.0}, "a ratio needs 'figure' and 'tolerance'"),
        ("expected/any", {"figure": "2", "tolerance": 0.1}, "'figure' should be a number"),
        ("expected/any", {"figur": 2.0}, "did you mean 'figure'"),
    ],
)
def test_each_mistake_is_named(path: str, value: Any, message: str) -> None:
    claim = copy.deepcopy(_claim())
    *places, last = path.split("/")
    table = claim
    for place in places:
        table = table[place]
    if value is ...:
        del table[last]
    else:
        table[last] = value

    with pytest.raises(ClaimsError, match=message) as caught:
        parse_claims({"claim": [claim]}, _spec(), where="claims.toml")

    assert "claims.toml claim 1" in caught.value.what
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_bound_needs_a_bound() -> None:
    claim = {**_claim(), "kind": "bound", "expected": {"any": {"figure": 1.0}}}

    with pytest.raises(ClaimsError, match="a bound needs 'minimum' or 'maximum'"):
        parse_claims({"claim": [claim]}, _spec())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expected": {"any": {"figure": float("nan"), "tolerance": 0.1}}}, "a finite number"),
        ({"expected": {"any": {"figure": 1, "tolerance": float("inf")}}}, "a finite number"),
        ({"minutes": float("inf")}, "'minutes' should be a finite number"),
        ({"expected": {"any": {"figure": 1.0, "tolerance": 0}}}, "more than 0, not 0"),
        ({"expected": {"any": {"figure": 1.0, "tolerance": -0.1}}}, "more than 0, not -0.1"),
        (
            {"expected": {"any": {"figure": 1.0, "tolerance": 0.1, "maximum": 9.0}}},
            "'tolerance' does not go with",
        ),
        (
            {"kind": "bound", "expected": {"any": {"minimum": 2, "maximum": 1}}},
            "the minimum 2 is more than the maximum 1",
        ),
        ({"kind": "trend", "expected": {"any": {}}}, "a trend needs 'figure'"),
        ({"kind": "equivalence", "minimum_repeats": 6, "expected": {"any": {"figure": 1.0}}},
         "an equivalence needs 'tolerance'"),
        ({"kind": "equivalence", "minimum_repeats": 5}, "minimum_repeats >= 6"),
        ({"kind": "equivalence"}, "minimum_repeats >= 6"),
        ({"kind": "ordering", "expected": {"any": {}}}, "an ordering is of 'order'"),
        (
            {"kind": "trend", "metric": {"operator": "order", "of": ["tflops", "tflops"]}},
            "an ordering is of 'order', and nothing else is",
        ),
        (
            {"metric": {"operator": "ratio", "of": ["tflops"] * 2, "statistic": "alarm-rate"}},
            "'alarm-rate' is a share of one selection",
        ),
    ],
)  # fmt: skip
def test_what_allows_everything_or_nothing_is_refused(
    changes: Dict[str, Any], message: str
) -> None:
    with pytest.raises(ClaimsError, match=message) as caught:
        parse_claims({"claim": [{**_claim(), **changes}]}, _spec(), where="claims.toml")

    assert "claims.toml claim 1" in caught.value.what


def test_bounds_may_meet() -> None:
    claim = {**_claim(), "kind": "bound", "expected": {"any": {"minimum": 2, "maximum": 2}}}

    [parsed] = parse_claims({"claim": [claim]}, _spec())

    assert parsed.expected["any"] == Expectation(minimum=2.0, maximum=2.0)


def test_two_claims_cannot_share_an_id() -> None:
    with pytest.raises(ClaimsError, match="'c' is used twice"):
        parse_claims({"claim": [_claim(), _claim()]}, _spec())


@pytest.mark.parametrize("document", [{"claims": []}, {"claim": {}}, {"claim": "x"}])
def test_a_document_of_another_shape_is_refused(document: Dict[str, Any]) -> None:
    with pytest.raises(ClaimsError):
        parse_claims(document, _spec())


def test_a_selection_is_checked_against_the_experiment() -> None:
    for selection, kind in (
        ("tflops{precison=bf16}", UnknownNameError),
        ("tflops{precision=bf61}", BadValueError),
        ("tflops{size=0}", BadValueError),
    ):
        claim = _claim()
        claim["metric"]["of"][0] = selection
        with pytest.raises(kind):
            parse_claims({"claim": [claim]}, _spec())
