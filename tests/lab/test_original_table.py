"""The original's stage tables from the ledger's stages."""

from __future__ import annotations

from typing import Any, List

import pytest
import torch
from hetero_cases import CASES

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.layers.hetero.backends import BackendOptions, make_backend
from narrowgauge_lab.layers.hetero.ledger import HOST, STAGES, Call, Interval, Ledger
from narrowgauge_lab.layers.hetero.original_table import (
    COLUMNS,
    VARIANTS,
    headings,
    original_table,
)

PASSES = ("forward", "input_grad", "weight_grad")


def interval(start: float, seconds: float, pass_: str, stage: str, layer: str = "conv") -> Interval:
    return Interval(layer, pass_, stage, HOST, start, seconds, 0, 0)


def step(start: float, layer: str = "conv") -> Any:
    """Each stage of each pass once, of 1, 2, 4, ... seconds, in a forward and a backward call."""
    intervals: List[Interval] = []
    at, seconds, begins = start, 1.0, []
    for pass_ in PASSES:
        begins.append(at)
        for stage in STAGES:
            intervals.append(interval(at, seconds, pass_, stage, layer))
            at, seconds = at + seconds, seconds * 2
    forward = Call(layer, "forward", start, begins[1] - start)
    backward = Call(layer, "backward", begins[1], at - begins[1])
    return [forward, backward], intervals


def of(pass_: str, *stages: str) -> float:
    """The seconds that `step` gives these stages."""
    first = PASSES.index(pass_) * len(STAGES)
    return float(sum(2 ** (first + STAGES.index(stage)) for stage in stages))


def both(*stages: str) -> float:
    return of("input_grad", *stages) + of("weight_grad", *stages)


def test_the_tensorrt_variant() -> None:
    calls, intervals = step(0.0)

    (row,) = original_table(calls, intervals, "conv", "tensorrt")

    assert row == {
        "fwd": of("forward", *STAGES), "fwd load": of("forward", "quantise", "to_device"),
        "fwd refit": of("forward", "refit"), "fwd compute": of("forward", "compute"),
        "fwd sync": of("forward", "from_device", "wait"), "fwd reshape": of("forward", "reshape"),
        "bwd": both(*STAGES), "in-grad": of("input_grad", *STAGES),
        "w-grad": of("weight_grad", *STAGES), "bwd load": both("quantise", "to_device"),
        "bwd refit": both("refit"), "bwd compute": both("compute"),
        "bwd sync": both("from_device", "wait"), "bwd pre/post": both("reshape"),
        "total": of("forward", *STAGES) + both(*STAGES),
    }  # fmt: skip
    assert tuple(row) == COLUMNS["tensorrt"]
    assert headings("tensorrt") == (
        "fwd", "load", "refit", "compute", "sync", "reshape", "bwd", "in-grad", "w-grad", "load",
        "refit", "compute", "sync", "pre/post", "total",
    )  # fmt: skip


def test_the_pytorch_variant() -> None:
    calls, intervals = step(0.0)

    (row,) = original_table(calls, intervals, "conv", "pytorch")

    for word, pass_ in (("fwd", "forward"), ("in-grad", "input_grad"), ("w-grad", "weight_grad")):
        assert row[word] == of(pass_, *STAGES)
        assert row[f"{word} to"] == of(pass_, "quantise", "to_device", "refit")
        assert row[f"{word} comp"] == of(pass_, "compute")
        assert row[f"{word} back"] == of(pass_, "from_device", "wait")
    assert row["bwd"] == both(*STAGES)
    assert headings("pytorch") == (
        "fwd", "to", "comp", "back", "bwd", "in-grad", "to", "comp", "back", "w-grad", "to", "comp",
        "back", "total",
    )  # fmt: skip


def test_steps_and_layers_are_told_apart() -> None:
    calls, intervals = [], []
    evaluation = Call("conv", "forward", 0.0, 1.0)
    for start, layer in ((10.0, "conv"), (1e8, "other"), (2e8, "conv")):
        made = step(start, layer)
        calls += made[0]
        intervals += made[1]
    late = interval(2e8, 5.0, "weight_grad", "wait", "(all layers)")

    rows = original_table([evaluation, *calls], [*intervals, late], "conv", "tensorrt")

    assert len(rows) == 2
    assert rows[0] == rows[1]


def test_a_variant_that_there_was_not() -> None:
    with pytest.raises(UnknownNameError, match="tensrt"):
        original_table([], [], "conv", "tensrt")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_faithful_backend_fills_the_columns(variant: str) -> None:
    ledger, case = Ledger("serial"), CASES[0]
    made = make_backend(
        "faithful", "conv", case.problem, "fp16", torch.device("cpu"), ledger, BackendOptions()
    )
    for _ in range(2):
        with ledger.call("conv", "forward"):
            made.forward(case.x, case.weight, case.bias)
        with ledger.call("conv", "backward"):
            made.input_grad(case.grad, case.weight, case.x.shape)
            made.weight_grad(case.grad, case.x, case.weight.shape)

    rows = original_table(ledger.calls(), ledger.intervals(), "conv", variant)

    assert len(rows) == 2
    for row in rows:
        assert min(row.values()) > 0
        parts = [name for name in row if name.startswith("fwd ")]
        assert sum(row[name] for name in parts) <= row["fwd"]
        assert row["in-grad"] + row["w-grad"] <= row["bwd"]
