"""The experiment `hetero-plan`: its costs, its steps by plans, and its claims."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_contract.placement import BUILTIN, PASSES, parse_plan
from narrowgauge_contract.placement_costs import (
    COSTS_FILE,
    FIXED,
    ConversionCost,
    Costs,
    PlacedLayer,
    parse_costs,
)
from narrowgauge_lab.layers.hetero.runner import Runner
from narrowgauge_lab.optim import SGD

ROWS = Rows(
    "hetero-plan",
    ("network=small", "batch=2", "precisions=fp32", "seconds=0.001", "rounds=2"),
)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Costs:
    """Of one row, as the host reads them."""
    out = tmp_path_factory.mktemp("hetero-plan")
    before = torch.get_rng_state()
    row = ROWS.run(out)
    assert row.validity.valid or "held back" in row.validity.reasons[0]
    assert row.facts["accelerator"] == "cpu (stand-in)"
    names = {metric.name for metric in row.metrics}
    assert names >= {"step.cpu", "step.accelerator", "step.hetero-fp32", "elsewhere.cpu"}
    assert row.facts["layers"] == 4
    torch.set_rng_state(before)
    path = out / "row-0" / COSTS_FILE
    return parse_costs(path.read_text(encoding="utf-8"), str(path))


def test_every_layer_and_its_shape_is_there(costs: Costs) -> None:
    assert costs.layers == (
        PlacedLayer("conv1", 0, False),
        PlacedLayer("conv2", 1, True),
        PlacedLayer("conv3", 2, True),
        PlacedLayer("linear", 3, True),
    )
    assert costs.shapes[1].input == (2, 16, 32, 32)
    assert costs.shapes[1].output == (2, 32, 16, 16)
    assert costs.shapes[1].stride == (2, 2)
    assert costs.shapes[3].kind == "linear"
    assert costs.shapes[3].bias
    assert (costs.stand_in, costs.shared_memory) == (True, False)


def test_every_part_has_samples_that_are_times(costs: Costs) -> None:
    four = range(4)
    devices = ("cpu", "accelerator")

    assert {(c.shape, c.pass_, c.device) for c in costs.products} == {
        (shape, name, device) for shape in four for name in PASSES for device in devices
    }
    assert {(c.shape, c.device, c.direction, c.input_grad) for c in costs.native} == {
        (shape, device, direction, wanted)
        for shape in four
        for device in devices
        for direction, wanted in (("forward", True), ("backward", True), ("backward", False))
    }
    assert {(c.shape, c.pass_, c.wire) for c in costs.placed} == {
        (shape, name, "fp32") for shape in four for name in ("forward", "input_grad")
    }
    assert {c.name for c in costs.fixed} == set(FIXED)
    assert {(c.policy, c.direction) for c in costs.copies} == {
        (policy, way) for policy in ("pageable", "pinned") for way in ("up", "down")
    }
    assert len({c.bytes for c in costs.copies}) == 5
    assert {c.plan for c in costs.steps} == {"cpu", "accelerator", "hetero-fp32"}
    parts = (*costs.products, *costs.native, *costs.placed, *costs.copies, *costs.conversions,
             *costs.segments, *costs.fixed, *costs.steps)  # fmt: skip
    assert all(s > 0 for part in parts for s in part.seconds)


def test_the_segments_are_what_lies_between_the_layers(costs: Costs) -> None:
    found = {(c.direction, c.after) for c in costs.segments if c.device == "cpu"}
    names = [layer.name for layer in costs.layers]

    assert found == {
        *(("forward", name) for name in ("input", *names)),
        *(("backward", name) for name in (*names, "input")),
        ("optimiser", "linear"),
    }


def test_stubs_train_nothing_and_leave_the_network_as_it_was() -> None:
    """All segments together are a step without its layers."""
    subjects, instrument = ROWS.module("subjects"), ROWS.module("instrument")
    what = subjects.subject("resnet20", 2, 0)
    before = {name: value.clone() for name, value in what.model.state_dict().items()}
    layers, shapes = subjects.layers_of(what)

    by = instrument.Instrument(CPU, 0.001)
    found = ROWS.module("segments").segments(by, what, layers, shapes, 0.001, "kernels")

    assert len(layers) == 20
    assert len(shapes) == 7
    assert len(found) == 2 * (2 * (len(layers) + 1) + 1)
    assert all(torch.equal(before[n], value) for n, value in what.model.state_dict().items())


def test_int8_is_measured_in_both_forms(tmp_path: Path) -> None:
    layers, instrument = ROWS.module("layers"), ROWS.module("instrument")
    wires, subjects = ROWS.module("wires"), ROWS.module("subjects")
    by = instrument.Instrument(CPU, 0.001)
    _, shapes = subjects.layers_of(subjects.subject("small", 2, 0))

    products = layers.products(by, shapes[3:], ("int8",), "accelerator")
    placed = layers.placed(by, shapes[3:], ("int8",))
    converted = wires.conversions(by, ("int8",))

    assert {each.form for each in products} == {"fp32", "int8"}
    assert {(each.pass_, each.wire) for each in placed} == {
        (name, wire) for name in ("forward", "input_grad") for wire in ("fp32", "int8")
    }
    assert all(isinstance(each, ConversionCost) and each.wire == "int8" for each in converted)
    assert {each.side for each in converted} == {"cpu", "accelerator"}


def test_a_row_with_a_plan_measures_its_step(tmp_path: Path) -> None:
    given = ("predicted=0.25", "bound=0.125", "accelerator_step=0.5")
    row = ROWS.run(tmp_path, "plan=hetero-fp32", *given)

    steps, beside = (row.metric(name).values for name in ("step", "step.accelerator"))
    assert row.metric("speed_since_costs").values == pytest.approx([0.5 / each for each in beside])
    assert row.metric("step_over_bound").values == pytest.approx([8 * each for each in steps])
    assert row.metric("predicted_step").values == (0.25,)
    assert len(row.metric("step").values) == len(row.metric("step.accelerator").values) == 2
    assert row.facts["plan"]["plan"]["name"] == "hetero-fp32"
    assert row.facts["placed"]["placed"] == 4
    assert not (tmp_path / "row-0" / COSTS_FILE).exists()


def test_what_a_plan_leaves_on_the_cpu_is_timed_beside_torchs_own(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path / "cpu", "plan=hetero-fp32")
    values = [row.metric(f"elsewhere.{each}").values for each in ("plan", "torch")]
    assert [len(each) for each in values] == [2, 2]
    assert min(values[0] + values[1]) > 0
    # Less than a step, whose layers are none of it.
    assert min(values[0]) < max(row.metric("step").values)

    there = ROWS.run(tmp_path / "accelerator", "plan=accelerator")
    assert there.metric("elsewhere.plan") is None, "nothing of it is on the CPU"


def test_time_inside_of_placed_layers_is_none_of_what_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of layers that a plan leaves on the CPU, which training would leave to torch."""
    subjects, module = ROWS.module("subjects"), ROWS.module("elsewhere")
    what = subjects.subject("small", 2, 0)
    document = {**BUILTIN["hetero-fp32"], "layers": {
        "linear": {"device": "cpu", "precision": "fp32"},
    }}  # fmt: skip
    clock = [0.0]
    for owner, name, seconds in (
        (Runner, "forward", 1.0), (Runner, "backward", 10.0), (SGD, "step", 100.0),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, _slowed(getattr(owner, name), clock, seconds))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    step = module.OutsideLayers(what, parse_plan(document, "here"), CPU)

    assert len(step.converted.runners) == 4
    assert (step(), clock) == (100.0, [144.0]), "of which the layers are 44"


def _slowed(call: Any, clock: List[float], seconds: float) -> Any:
    """The call, which moves the clock on."""

    def slow(*arguments: Any) -> Any:
        clock[0] += seconds
        return call(*arguments)

    return slow


def test_all_plans_are_measured_in_turn(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "exhaustive=true", "plan=hetero-fp32")

    measured = json.loads((tmp_path / "row-0" / "plans.json").read_text())
    codes = [each["code"] for each in measured]
    assert row.facts["plans"] == len(measured) == 17
    assert len(set(codes)) == 17
    assert row.facts["best"] in codes
    assert all(len(each["seconds"]) == 2 for each in measured)
    by_code = {each["code"]: each for each in measured}
    # The best by the first round; its sample is that of the second.
    best = min(measured, key=lambda each: each["seconds"][0])
    assert row.metric("best_step").values == pytest.approx(tuple(best["seconds"][1:]))
    assert row.metric("step").values == pytest.approx(tuple(by_code["hetero-fp32"]["seconds"][1:]))
    plan = parse_plan(by_code["c.a.a.c"]["plan"], "plans.json")
    assert plan.placement("conv2").weight_grad.device == "accelerator"
    assert plan.placement("linear").forward.device == "cpu"


def test_by_passes_there_are_as_many_plans_as_ways_to_divide_them() -> None:
    steps, subjects = ROWS.module("steps"), ROWS.module("subjects")
    layers, _ = subjects.layers_of(subjects.subject("small", 1, 0))

    plans = steps.all_plans(layers, "pass")

    assert len(plans) == len({each.code for each in plans}) == 4 * 8**3
    with pytest.raises(BadValueError, match="too many plans"):
        steps.all_plans([*layers, *layers], "layer")


def test_steps_by_different_plans_compute_the_same() -> None:
    """What is measured is training: the same gradient whichever plan it is by."""
    steps, subjects = ROWS.module("steps"), ROWS.module("subjects")
    what = subjects.subject("small", 2, 0)
    layers, _ = subjects.layers_of(what)
    plans = steps.all_plans(layers, "layer")
    stepper = steps.Stepper(what, plans[0].plan, CPU)
    found = []
    for taken in (plans[0], plans[5], plans[-1]):
        stepper.place(taken.plan)
        stepper()
        found.append(stepper._optimizer.gradient.clone())

    assert float(found[0].abs().max()) > 0
    for other in found[1:]:
        assert torch.allclose(other, found[0], rtol=1e-4, atol=1e-6)


def test_the_networks_and_their_layers() -> None:
    subjects = ROWS.module("subjects")
    mnist, _ = subjects.layers_of(subjects.subject("mnist", 2, 0))
    once, again = (subjects.subject("small", 2, 7) for _ in range(2))

    assert [layer.name for layer in mnist] == ["conv1", "conv2", "fc1", "fc2"]
    assert [layer.input_grad for layer in mnist] == [False, True, True, True]
    assert torch.equal(once.images, again.images)


def test_an_unknown_precision_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'int8'"):
        ROWS.module("run")._precisions("fp32+int9", CPU)
    assert ROWS.module("run")._precisions("tf32+int8", CPU) == ("fp32", "int8")


def test_the_claims_are_about_what_is_recorded() -> None:
    spec = ROWS.spec()
    recorded = {
        "step", "step.accelerator", "best_step", "predicted_step", "step_over_bound",
        "elsewhere.plan", "elsewhere.torch",
    }  # fmt: skip

    claims = load_claims(EXPERIMENTS / "hetero-plan" / "claims.toml", spec)
    for claim in claims:
        assert {selection.metric for selection in claim.selections} <= recorded
    # Two plans of one network are two claims' rows: the newest is not held against both.
    asked = {claim.id: {each.where["elsewhere"] for each in claim.selections} for claim in claims}
    for name in ("prediction", "step-near-its-bound", "elsewhere-as-torch"):
        assert asked[name] == {"cpu"}
    assert asked["never-slower-than-all-on-the-accelerator"] == {"free"}
