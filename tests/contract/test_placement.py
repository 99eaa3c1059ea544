"""Placement plans: what is read, what is refused and how, and that nothing is lost on the way."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any, Callable, Dict, List, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge_contract.errors import ExitCode, PlanFileError
from narrowgauge_contract.placement import (
    BUILTIN,
    DEVICES,
    ELSEWHERE,
    ELSEWHERE_BY,
    PASSES,
    POLICIES,
    PRECISIONS,
    TENSORS,
    WEIGHTS,
    WIRES,
    LayerPlacement,
    PassPlacement,
    PlacementPlan,
    Transfers,
    is_reference,
    parse_plan,
    plan_document,
    plan_value,
)


def _mine() -> Dict[str, Any]:
    """A plan as TOML gives it, with something said in every place that there is."""
    return {
        "plan": {"name": "mine", "elsewhere": "cpu"},
        "passes": {
            "device": "accelerator", "precision": "int8", "weight_grad": {"precision": "bf16"},
        },
        "transfer": {"policy": "mapped", "pieces": 4, "wire": {"input": "int8"}},
        "layers": {
            "blocks.*": {"precision": "fp16", "forward": {"device": "dla", "backend": "tensorrt"}},
            "blocks.0.*": {"device": "cpu", "precision": "fp32"},
        },
    }  # fmt: skip


def _mine_with(path: str, value: Any) -> Dict[str, Any]:
    """The same, with `value` at a path of keys between slashes."""
    document = _mine()
    *above, last = path.split("/")
    body = document
    for key in above:
        body = body.setdefault(key, {})
    body[last] = value
    return document


def test_a_plan_is_read_with_what_each_table_leaves_to_the_one_above() -> None:
    plan = parse_plan(_mine(), "mine.toml")

    int8, bf16 = (PassPlacement("accelerator", name) for name in ("int8", "bf16"))
    on_cpu = PassPlacement("cpu", "fp32")
    fp16 = PassPlacement("accelerator", "fp16")
    assert plan.default == LayerPlacement(int8, int8, bf16)
    assert plan.placement("fc") == plan.default
    assert plan.placement("blocks.1.conv") == LayerPlacement(
        PassPlacement("dla", "fp16", "tensorrt"), fp16, fp16
    )
    assert plan.placement("blocks.0.conv") == LayerPlacement(on_cpu, on_cpu, on_cpu)
    assert plan.placement("Blocks.0.conv") == plan.default
    assert plan.transfers == Transfers("mapped", True, "dirty", 4, {"input": "int8"})
    assert plan.transfers.wire == {**dict.fromkeys(TENSORS, "fp32"), "input": "int8"}
    assert (plan.name, plan.elsewhere, plan.stride_bug) == ("mine", "cpu", False)
    assert plan.precisions() == ("fp32", "bf16", "fp16", "int8")


def test_the_last_pattern_that_matches_wins() -> None:
    document = _mine()
    document["layers"] = dict(reversed(list(document["layers"].items())))

    plan = parse_plan(document, "mine.toml")

    assert plan.placement("blocks.0.conv") == plan.placement("blocks.1.conv")
    assert plan.placement("blocks.0.conv") != parse_plan(_mine(), "").placement("blocks.0.conv")


def test_passes_are_asked_for_by_name() -> None:
    placement = parse_plan(_mine(), "mine.toml").placement("blocks.1.conv")

    assert [placement.of(name) for name in PASSES] == [
        placement.forward, placement.input_grad, placement.weight_grad,
    ]  # fmt: skip
    with pytest.raises(KeyError):
        placement.of("backward")


@pytest.mark.parametrize("name", BUILTIN)
def test_what_is_built_in_is_a_plan_under_its_own_name(name: str) -> None:
    plan = parse_plan(BUILTIN[name], name)

    assert plan.name == name
    assert plan_document(plan) == BUILTIN[name]
    kind, _, precision = name.partition("-")
    assert plan.precisions() == (precision or "fp32",)
    backends = {"original": "faithful", "tensorrt": "tensorrt"}
    assert {each.backend for each in plan.passes()} == {backends.get(kind, "torch")}
    assert plan.elsewhere == ("accelerator" if kind == "accelerator" else "cpu")
    assert plan.elsewhere_by == ("kernels" if kind in ("hetero", "tensorrt") else "torch")
    device = "cpu" if kind == "cpu" else "accelerator"
    assert {each.device for each in plan.passes()} == {device}


def test_what_is_built_in_covers_what_the_experiments_name() -> None:
    assert set(BUILTIN) == {
        "cpu", "accelerator", *(f"accelerator-{each}" for each in PRECISIONS if each != "fp32"),
        "original-fp32", "original-fp16", *(f"hetero-{each}" for each in PRECISIONS),
        "tensorrt-fp32", "tensorrt-fp16",
    }  # fmt: skip
    original = parse_plan(BUILTIN["original-fp32"], "").transfers
    assert (original.policy, original.resident, original.weights) == (
        "pageable", False, "each-call",
    )  # fmt: skip
    wires = {
        name: set(parse_plan(BUILTIN[f"hetero-{name}"], "").transfers.wire.values())
        for name in PRECISIONS
    }
    assert wires == {
        "fp32": {"fp32"}, "tf32": {"fp32"}, "bf16": {"bf16"}, "fp16": {"fp16"}, "int8": {"int8"},
        "fp8": {"int8"},
    }  # fmt: skip


def _placements() -> st.SearchStrategy[PassPlacement]:
    on_torch = st.builds(PassPlacement, st.sampled_from(DEVICES[:2]), st.sampled_from(PRECISIONS))
    engine = st.builds(
        PassPlacement,
        st.just("accelerator"),
        st.sampled_from(["fp32", "tf32", "bf16", "fp16"]),
        st.just("tensorrt"),
    )
    on_dla = st.just(PassPlacement("dla", "fp16", "tensorrt"))
    faithful = st.builds(
        PassPlacement,
        st.just("accelerator"),
        st.sampled_from(["fp32", "fp16"]),
        st.just("faithful"),
    )
    return st.one_of(on_torch, engine, on_dla, faithful)


_LAYERS = st.builds(LayerPlacement, _placements(), _placements(), _placements())
_PLANS = st.builds(
    PlacementPlan,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True).filter(
        lambda name: name != "none"
    ),
    elsewhere=st.sampled_from(ELSEWHERE),
    layers=st.dictionaries(st.text(min_size=1).filter(str.strip), _LAYERS, max_size=4).map(
        lambda layers: tuple(layers.items())
    ),
    default=_LAYERS,
    transfers=st.builds(
        Transfers,
        st.sampled_from(POLICIES),
        st.booleans(),
        st.sampled_from(WEIGHTS),
        st.integers(0, 64),
        st.dictionaries(st.sampled_from(TENSORS), st.sampled_from(WIRES)),
    ),
).flatmap(
    lambda plan: st.tuples(st.booleans(), st.sampled_from(ELSEWHERE_BY)).map(
        lambda said: dataclasses.replace(
            plan,
            stride_bug=said[0] and any(each.backend == "faithful" for each in plan.passes()),
            elsewhere_by=said[1] if plan.elsewhere == "cpu" else "torch",
        )
    )
)


@given(_PLANS)
@settings(max_examples=40, deadline=None)
def test_a_plan_survives_its_document_and_json_with_sorted_keys(plan: PlacementPlan) -> None:
    document = plan_document(plan)
    written = json.loads(json.dumps(document, sort_keys=True))

    assert parse_plan(document, "x") == plan
    assert parse_plan(written, "x") == plan
    assert hash(parse_plan(written, "x")) == hash(plan)
    assert plan_value(parse_plan(written, "x")) == plan_value(plan)
    assert is_reference(plan_value(plan))


def test_the_value_is_the_same_where_a_plan_acts_the_same_and_only_there() -> None:
    plan = parse_plan(_mine(), "mine.toml")
    spelt_out = _mine_with("passes/backend", "torch")
    spelt_out["plan"]["stride_bug"] = False
    spelt_out["plan"]["elsewhere_by"] = "torch"
    turned = dataclasses.replace(plan, layers=plan.layers[::-1])
    others = [
        turned,
        parse_plan(_mine_with("transfer/wire/output", "bf16"), "x"),
        parse_plan(_mine_with("layers/fc/device", "cpu"), "x"),
        parse_plan(_mine_with("transfer/pieces", 0), "x"),
        parse_plan(_mine_with("plan/elsewhere_by", "kernels"), "x"),
    ]

    assert plan_value(parse_plan(spelt_out, "other.toml")) == plan_value(plan)
    assert len({plan_value(each) for each in (plan, *others)}) == 6
    assert plan_value(plan).startswith("mine@")
    assert not any(map(is_reference, ["mine", "mine@", "mine@3fa9c1d", "a/b@3fa9c1d2", *BUILTIN]))


def test_what_travels_is_complete_and_nothing_else() -> None:
    assert Transfers().wire == dict.fromkeys(TENSORS, "fp32")
    with pytest.raises(ValueError, match="weights do not travel; input, output"):
        Transfers(wire={"weights": "int8"})


_WRONG: List[Tuple[str, Any, str]] = [
    ("layer", {}, "unknown key 'layer'(.|\n)*did you mean 'layers'"),
    ("plan/elswhere", "cpu", "unknown key 'elswhere'(.|\n)*did you mean 'elsewhere'"),
    ("plan/elsewhere", "dla", "elsewhere is not 'dla'(.|\n)*Known: cpu, accelerator"),
    ("plan/elsewhere_by", "kernel", "elsewhere_by is not 'kernel'(.|\n)*did you mean 'kernels'"),
    (
        "plan",
        {"name": "x", "elsewhere": "accelerator", "elsewhere_by": "kernels"},
        'goes with elsewhere = "cpu" only',
    ),
    ("plan/name", "a,b", "'a,b' cannot be a plan's name"),
    ("plan/name", "none", "'none' cannot be a plan's name"),
    ("plan/name", 3, "lacks the text 'name'"),
    ("plan/convolutions_only", 1, "should be true or false, not 1"),
    ("plan/stride_bug", "yes", "should be true or false, not 'yes'"),
    ("plan/stride_bug", True, "stride_bug is of the backend 'faithful'"),
    ("passes/precison", "fp32", "unknown key 'precison'(.|\n)*did you mean 'precision'"),
    ("passes/precision", "fp61", "precision is not 'fp61'(.|\n)*did you mean 'fp16'"),
    ("passes/precision", ["fp16"], r"precision is not \['fp16'\]"),
    ("passes/device", "acelerator", "did you mean 'accelerator'"),
    ("passes/device", "cuda", "did you mean 'accelerator'"),
    ("passes/forward", "cpu", r"\[forward\] should be a table"),
    ("passes/forward/policy", "pinned", r"\[passes.forward\] has the unknown key 'policy'"),
    ("passes/input_grads", {}, "did you mean 'input_grad'"),
    ("transfer/policy", "overlaped", "did you mean 'overlapped'"),
    ("transfer/policy", None, "policy is not None"),
    ("transfer/resident", 1, "resident should be true or false, not 1"),
    ("transfer/weights", "always", "Known: dirty, each-call"),
    ("transfer/pieces", -1, "pieces should be a whole number from 0"),
    ("transfer/pieces", True, "pieces should be a whole number from 0"),
    ("transfer/pieces", 2.0, "pieces should be a whole number from 0"),
    ("transfer/wire/weights", "int8", "unknown key 'weights'"),
    ("transfer/wire/input", "fp8", r"\[transfer.wire\]: input is not 'fp8'"),
    ("layers", [3], "should be a table of patterns"),
    ("layers", [{"device": "cpu"}], "empty pattern"),
    ("layers", [{"pattern": "a"}, {"pattern": "a"}], "the pattern 'a' twice"),
    ("layers/ ", {}, "empty pattern"),
    ("layers/fc", "cpu", r"\[layers.\"fc\"\] should be a table"),
    ("layers/fc/pattern", "x", r"\[layers.\"fc\"\] has the unknown key 'pattern'"),
    ("layers/fc/device", "gpu", r"\[layers.\"fc\"\]: device is not 'gpu'"),
    ("layers/fc/device", "dla", "device 'dla' goes with backend 'tensorrt' only"),
    ("layers/fc", {"device": "cpu", "backend": "tensorrt"}, "does not go with device 'cpu'"),
    ("layers/fc/backend", "faithful", "'faithful' does not compute in int8"),
    (
        "layers/fc",
        {"device": "dla", "backend": "tensorrt", "precision": "fp32"},
        "a DLA runs passes in fp16, not in fp32",
    ),
    (
        "layers/fc",
        {"device": "dla", "backend": "tensorrt", "precision": "int8"},
        "a DLA runs passes in fp16, not in int8",
    ),
    (
        "layers/fc",
        {"device": "accelerator", "backend": "tensorrt", "precision": "int8"},
        "'tensorrt' does not compute in int8",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), _WRONG, ids=lambda each: str(each)[:30])
def test_what_is_wrong_is_named_with_its_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanFileError, match=message) as caught:
        parse_plan(_mine_with(path, value), "mine.toml")

    assert caught.value.what.startswith("mine.toml")
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize("precision", ["tf32", "bf16", "int8", "fp8"])
def test_the_original_computes_in_nothing_that_it_did_not(precision: str) -> None:
    document = copy.deepcopy(BUILTIN["original-fp16"])
    document["plan"]["stride_bug"] = True
    assert parse_plan(document, "x").stride_bug

    document["passes"]["weight_grad"]["precision"] = precision
    with pytest.raises(PlanFileError, match=rf"\[passes.weight_grad\].*not compute in {precision}"):
        parse_plan(document, "x")


@pytest.mark.parametrize(
    ("leave_out", "message"),
    [
        (("plan",), r"lacks the table \[plan\]"),
        (("passes",), r"lacks the table \[passes\]"),
        (("plan", "name"), "lacks the text 'name'"),
        (("plan", "elsewhere"), "lacks the text 'elsewhere'"),
        (("passes", "device"), r"\[passes\] lacks the text 'device'"),
        (("passes", "precision"), r"\[passes\] lacks the text 'precision'"),
    ],
)
def test_what_must_be_said_is(leave_out: Tuple[str, ...], message: str) -> None:
    document = _mine()
    body = document
    for key in leave_out[:-1]:
        body = body[key]
    del body[leave_out[-1]]

    with pytest.raises(PlanFileError, match=message):
        parse_plan(document, "mine.toml")


_KEYS = st.sampled_from(
    ["plan", "passes", "transfer", "layers", "wire", "name", "elsewhere", "device", "precision",
     "backend", "pattern", *PASSES, *TENSORS, "x", ""]
)  # fmt: skip
_WORDS = st.sampled_from(["cpu", "fp16", "torch", "faithful", "dla", "mine", "a.*", "int8", ""])
#: What a TOML reader can give: all of its types, nested at will.
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        _WORDS, st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates(),
        st.none(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_KEYS | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)  # fmt: skip


def _is_plan_or_named_error(document: Any) -> None:
    try:
        plan = parse_plan(document, "fuzz.toml")
    except PlanFileError:
        return
    assert parse_plan(plan_document(plan), "x") == plan


@given(st.dictionaries(_KEYS, _VALUES, max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_document_is_a_plan_or_a_named_error(document: Dict[str, Any]) -> None:
    _is_plan_or_named_error(document)


def _places(body: Any, above: Tuple[Any, ...] = ()) -> List[Tuple[Any, ...]]:
    """The keys and positions that lead to every part of a document."""
    inside: List[Tuple[Any, Any]] = []
    if isinstance(body, dict):
        inside = list(body.items())
    elif isinstance(body, list):
        inside = list(enumerate(body))
    found = [above] if above else []
    return found + [path for key, part in inside for path in _places(part, (*above, key))]


def _spoil(document: Any, path: Tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    spoilt = copy.deepcopy(document)
    body = spoilt
    for key in path[:-1]:
        body = body[key]
    change(body, path[-1])
    return spoilt


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_good_document_with_one_thing_spoilt_is_a_plan_or_a_named_error(data: Any) -> None:
    listed = plan_document(parse_plan(_mine(), "x"))
    document = data.draw(st.sampled_from([_mine(), listed]))
    path = data.draw(st.sampled_from(_places(document)))
    value = data.draw(_VALUES)

    def replace(body: Any, key: Any) -> None:
        body[key] = value

    def remove(body: Any, key: Any) -> None:
        del body[key]

    for change in (replace, remove):
        _is_plan_or_named_error(_spoil(document, path, change))
