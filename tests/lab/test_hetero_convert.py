"""What `convert` places, what it leaves alone and says so, and what it refuses before it changes
anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from placed_cases import STAND_IN, Residual, images, placed, plan, residual
from torch import nn

from narrowgauge_contract.errors import (
    NotApplicableError,
    SkippedError,
    UnknownNameError,
    UsageError,
)
from narrowgauge_contract.placement import BUILTIN, parse_plan
from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.hetero import backends
from narrowgauge_lab.layers.hetero.backends.faithful import FaithfulBackend
from narrowgauge_lab.layers.hetero.convert import convert, home_of
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.hetero.modules import HeteroConv2d, HeteroLinear


class _Own(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _odd() -> nn.Module:
    layers = {
        "good": nn.Conv2d(3, 3, 3, padding=1),
        "reflect": nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"),
        "one": nn.Conv1d(3, 3, 3),
        "transposed": nn.ConvTranspose2d(3, 3, 3),
        "own": _Own(3, 3, 3),
        "wide": nn.Conv2d(3, 3, 3).double(),
        "attention": nn.MultiheadAttention(4, 2),
        "bilinear": nn.Bilinear(2, 2, 2),
    }
    if torch_compat.torch_version() >= (1, 9):
        layers["same"] = nn.Conv2d(3, 3, (3, 5), padding="same", dilation=(2, 1))
        layers["valid"] = nn.Conv2d(3, 3, 3, padding="valid")
        layers["uneven"] = nn.Conv2d(3, 3, (2, 3), padding="same")
        layers["complex"] = nn.Conv2d(3, 3, 3, dtype=torch.complex64)
    return nn.ModuleDict(layers)


def test_what_it_cannot_place_is_left_alone_with_its_reason() -> None:
    model = _odd()
    types = {name: type(module) for name, module in model.named_modules()}
    converted = placed(model)
    found = {each.name: each for each in converted.left_alone}
    expected = {"reflect", "one", "transposed", "own", "wide", "attention.out_proj", "bilinear"}
    text = torch_compat.torch_version() >= (1, 9)
    assert set(found) == expected | ({"uneven", "complex"} if text else set())
    assert "padding_mode 'reflect'" in found["reflect"].reason
    assert "float64" in found["wide"].reason
    assert found["own"].type == "_Own"
    for name in found:
        assert type(dict(model.named_modules())[name]) is types[name]
    assert isinstance(model["good"], HeteroConv2d)
    assert set(dict(converted.placements)) == {"good"} | ({"same", "valid"} if text else set())
    assert len(converted.facts()["left_alone"]) == len(found)


def test_a_plan_of_convolutions_only_leaves_linear_layers_where_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    plan = parse_plan(BUILTIN["original-fp32"], "test")
    converted = convert(model, plan, torch.device("cpu"))

    (left,) = converted.left_alone
    assert (left.name, left.reason) == ("2", "the plan places convolutions only")
    assert type(model[2]) is nn.Linear
    assert [name for name, _ in converted.placements] == ["0"]


@pytest.mark.skipif(torch_compat.torch_version() < (1, 9), reason="padding is numbers only")
@pytest.mark.parametrize("name", ["same", "valid"])
def test_padding_in_words(name: str) -> None:
    model = _odd()
    x = torch.randn(2, 3, 9, 9)
    expected = model[name](x)
    placed(model, pieces=1)
    assert torch.equal(model[name](x), expected)


def test_a_module_at_two_places_and_the_root_itself() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    converted = placed(model)
    assert model[0] is model[2] is layer
    assert isinstance(layer, HeteroLinear)
    assert len(converted.runners) == 1
    alone = nn.Conv2d(3, 3, 3)
    assert placed(alone).model is alone
    assert isinstance(alone, HeteroConv2d)


def test_placed_anew_by_another_plan() -> None:
    model = residual()
    first = placed(model, mode="bytes")
    second = placed(model, mode="bytes", layers={"first": {"device": "cpu"}})
    model(images())
    assert first.ledger.bytes_moved() == (0, 0)
    assert second.ledger.bytes_moved() != (0, 0)
    convert(model, plan(passes={"device": "cpu"}), STAND_IN)
    model(images())
    assert all(each.runner is None for each in model.modules() if hasattr(each, "runner"))


def test_native_layers_stay_torchs_own_unless_somebody_looks() -> None:
    cpu = plan(passes={"device": "cpu"}, layers={"first": {"device": "accelerator"}})
    model = residual()
    converted = convert(model, cpu, STAND_IN)
    assert converted.native == ("stem", "second", "shortcut", "classifier")
    assert converted.native_precision == "fp32"
    assert type(model.stem) is nn.Conv2d
    assert len(converted.placements) == 5
    watched = convert(residual(), cpu, STAND_IN, Ledger("serial"))
    assert watched.native == ()
    assert len(watched.runners) == 5


@pytest.mark.parametrize(
    ("precision", "first", "expected"),
    [("fp32", "fp32", "fp32"), ("bf16", "bf16", ""), ("bf16", "fp32", "fp32")],
)
def test_the_float32_of_placed_layers_is_told_where_none_is_native(
    precision: str, first: str, expected: str
) -> None:
    said = plan(precision, layers={"first": {"precision": first}})
    try:
        converted = convert(residual(), said, STAND_IN)
    except NotApplicableError as error:
        pytest.skip(error.why)
    assert (converted.native, converted.native_precision) == ((), expected)


def _refused(kind: type, match: str, said: Any, model: Any = None) -> None:
    model = model if model is not None else residual()
    before = [type(each) for each in model.modules()]
    with pytest.raises(kind, match=match):
        convert(model, said, STAND_IN)
    assert [type(each) for each in model.modules()] == before


def test_a_plan_that_names_no_such_layer() -> None:
    said = plan(layers={"frist": {"device": "cpu"}})
    with pytest.raises(UnknownNameError, match="unknown layer 'frist' in the plan 'test'") as found:
        convert(residual(), said, STAND_IN)
    assert found.value.nearest == "first"
    _refused(UnknownNameError, "frist", said)


def test_a_plan_that_names_a_layer_that_is_left_alone() -> None:
    model = _odd()
    _refused(UsageError, "layer 'reflect', a Conv2d", plan(layers={"refl*": {"device": "cpu"}}),
             model)  # fmt: skip


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_a_precision_that_the_device_lacks(precision: str) -> None:
    _refused(NotApplicableError, "plan 'test' cannot run here", plan(precision))


def test_int8_where_it_cannot_go_names_the_layers() -> None:
    model = residual()
    model.first = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    with pytest.raises(NotApplicableError) as found:
        convert(model, plan("int8"), STAND_IN)
    assert "first" in found.value.why
    assert "shortcut" not in found.value.why
    assert type(model.first) is nn.Conv2d
    placed(model, precision="int8", layers={"first": {"precision": "fp32"}})


def test_a_backend_that_this_host_lacks_is_skipped() -> None:
    lacking = backends.missing("tensorrt", STAND_IN)
    assert lacking
    _refused(SkippedError, "cannot run here", parse_plan(BUILTIN["tensorrt-fp32"], "t"))
    with pytest.raises(UnknownNameError):
        backends.missing("tensorr", STAND_IN)


def test_managed_memory_and_gpus_that_are_not_there() -> None:
    _refused(NotApplicableError, "'managed' cannot be had on cpu", plan(policy="managed"))
    if not torch.cuda.is_available():
        with pytest.raises(NotApplicableError, match="no cuda"):
            convert(residual(), plan(), torch.device("cuda"))


def test_a_model_at_another_place() -> None:
    model = residual().to("meta") if hasattr(torch, "compile") else None
    if model is not None:
        _refused(UsageError, "parameter 'stem.weight' is on meta", plan(), model)
    assert home_of(plan(elsewhere="accelerator"), torch.device("cuda")).type == "cuda"
    assert home_of(plan(), torch.device("cuda")).type == "cpu"


def test_facts_say_who_computes_and_what_went_otherwise() -> None:
    converted = placed(Residual(), policy="mapped", layers={"first": {"backend": "faithful"}})
    facts = converted.facts()
    assert facts["accelerator"] == "cpu (stand-in)"
    assert facts["placed"] == 5
    assert facts["products"]["first"] == dict.fromkeys(
        ("forward", "input_grad", "weight_grad"), "faithful"
    )
    assert facts["products"]["stem"]["forward"] == "cpu: torch"
    assert any("nothing to map" in note for note in facts["notes"])
    assert set(facts["int8_on_the_wire"]) == {"host", "accelerator"}
    converted.close()
    converted.model(images())


def test_facts_say_what_a_whole_backend_has_to_say_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said = property(lambda self: (f"{self.precision}: not on the DLA",))
    monkeypatch.setattr(FaithfulBackend, "notes", said)
    converted = placed(Residual(), layers={"first": {"backend": "faithful"}})
    assert converted.facts()["notes"].count("fp32: not on the DLA") == 1
