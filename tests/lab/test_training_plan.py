"""Training by a placement plan, with the CPU standing in for the accelerator."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from torch import nn
from training_cases import CLASSES, CPU, Case, SmallNet, feeds, recipe

from narrowgauge_contract.errors import NotApplicableError, UnknownNameError, UsageError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog
from narrowgauge_contract.job import RowPlan
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.placement import BUILTIN, PlacementPlan, parse_plan, plan_document
from narrowgauge_lab import placed, training
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.passes.choice import missing
from narrowgauge_lab.measure import probe
from narrowgauge_lab.schedule import MultiStep
from narrowgauge_lab.sentry import Lookout, Sentry

_TIMED = {"images_per_second", "epoch_seconds"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _plan(name: str, **changes: str) -> PlacementPlan:
    """A built-in plan; `changes`: a word of [passes] for all passes, or a wire for all tensors."""
    document: Dict[str, Any] = json.loads(json.dumps(BUILTIN[name]))
    for key, word in changes.items():
        if key == "wire":
            document["transfer"]["wire"] = dict.fromkeys(document["transfer"]["wire"], word)
        else:
            for passes in document["passes"].values():
                passes[key] = word
    return parse_plan(document, name)


def _exact() -> PlacementPlan:
    return _plan("hetero-fp32")


def _short() -> PlacementPlan:
    """Gradients rounded stochastically, in products and on the wire."""
    return _plan("hetero-int8")


def _train(case: Case, plan: PlacementPlan, epochs: int = 2, **given: Any) -> nn.Module:
    rate = given.pop("rate", 0.05)
    return case.train(dataclasses.replace(recipe(epochs, rate=rate), plan=plan), **given)


def _assert_equal(one: nn.Module, other: nn.Module) -> None:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


def test_placed_passes_at_full_precision_train_the_same_network(tmp_path: Path) -> None:
    plain, case = Case(tmp_path / "plain"), Case(tmp_path / "placed")
    expected = plain.train(recipe(epochs=3))
    model = _train(case, _exact(), 3)

    for name, tensor in expected.state_dict().items():
        difference = (tensor.double() - model.state_dict()[name].double()).abs().max().item()
        assert difference <= 1e-4, name
    assert case.values("train_loss") == pytest.approx(plain.values("train_loss"), rel=1e-4)
    assert case.values("test_accuracy") == plain.values("test_accuracy")


def test_the_record_has_the_plan_and_what_became_of_it(tmp_path: Path) -> None:
    case = Case(tmp_path)
    plan = _exact()
    _train(case, plan, 1)

    row = case.row()
    facts = row.facts
    assert row.validity.valid, row.validity.reasons
    assert parse_plan(facts["plan"], "the fact") == plan
    assert facts["plan"] == plan_document(plan)
    assert facts["plan_table"][0].split() == ["layer", "forward", "input_grad", "weight_grad"]
    assert [line.split()[0] for line in facts["plan_table"][1:]] == ["conv", "linear"]
    assert facts["plan_table"][1].count("accelerator fp32 torch") == 3
    assert facts["placed"]["accelerator"] == "cpu (stand-in)"
    assert facts["placed"]["policy"] == "overlapped"
    assert facts["placed"]["left_alone"] == []
    assert facts["precision_ran"] == "fp32"
    assert facts["precision_by_device"] == {"cpu": ["fp32"]}
    assert facts["loss_scaling"] == "none"
    assert facts["graphs_ran"].startswith("off: layers are placed by a plan")


def test_bytes_per_step_are_those_of_the_layers(tmp_path: Path) -> None:
    """16 images; conv 3→8, 3×3 of 8×8; linear 72→3; the images have no gradient."""
    case = Case(tmp_path)
    model = _train(case, _exact(), 1)

    whole = sum(p.numel() + -p.numel() % 16 for p in model.parameters())
    up = 16 * (3 * 64 + 8 * 36 + 72 + 3) + whole
    down = 16 * (8 * 36 + 3 + 72) + (8 * 27 + 8) + (3 * 72 + 3)
    assert case.row().facts["bytes_per_step"] == {
        "to_device": 4 * up,
        "from_device": 4 * down,
        "images": 16,
    }


@pytest.mark.parametrize("killed_in_epoch", [1, 3])
def test_killed_and_resumed_is_bitwise_the_same(tmp_path: Path, killed_in_epoch: int) -> None:
    """int8: the seeds of stochastic rounding go on where they were."""
    whole, case = Case(tmp_path / "whole"), Case(tmp_path / "killed")
    expected = _train(whole, _short(), 4)
    # Every update is one forward pass in training; each row begins with looks that are none.
    with pytest.raises(KeyboardInterrupt):
        _train(case, _short(), 4, fail_at=5 * (killed_in_epoch - 1) + 3)

    model = _train(case, _short(), 4, resume=True)

    _assert_equal(expected, model)
    for metric in whole.row().metrics:
        if metric.name not in _TIMED:
            assert case.values(metric.name) == metric.values
    lines = [(out / "row-0" / placed.OVERFLOW_FILE).read_text() for out in (whole.out, case.out)]
    assert lines[0] == lines[1]
    assert [json.loads(line)["epoch"] for line in lines[0].splitlines()] == [1, 2, 3, 4]


def test_int8_learns_and_keeps_what_it_loses(tmp_path: Path) -> None:
    case = Case(tmp_path)
    _train(case, _short(), 8)

    row = case.row()
    assert row.validity.valid, row.validity.reasons
    losses = case.values("train_loss")
    assert losses[-1] < 0.6 * losses[0]
    assert row.facts["precision_ran"] in ("int8", "fp64"), "or exact products in float64"
    shares = case.values("gradient_underflow")
    assert len(shares) == 8
    assert all(0 < share < 100 for share in shares), "small gradients become 0 at 8 bits"
    first = json.loads((tmp_path / "row-0" / placed.OVERFLOW_FILE).read_text().splitlines()[0])
    seen = {(each["layer"], each["pass_"], each["role"]) for each in first["passes"]}
    assert {("conv", "weight_grad", "grad_output"), ("linear", "forward", "input")} <= seen


def test_fp16_scales_the_loss(tmp_path: Path) -> None:
    case = Case(tmp_path)
    if missing("fp16", CPU):
        with pytest.raises(NotApplicableError, match="hetero-fp16"):
            _train(case, _plan("hetero-fp16"))
        return
    _train(case, _plan("hetero-fp16"), 8)

    row = case.row()
    assert row.validity.valid, row.validity.reasons
    assert row.facts["precision_ran"] == "fp16"
    assert row.facts["loss_scaling"] == "dynamic"
    assert case.values("train_loss")[-1] < 0.6 * case.values("train_loss")[0]
    assert len(case.values("loss_scale")) == len(case.values("gradient_underflow")) == 8


def test_the_original_had_no_loss_scaling_and_has_none_here() -> None:
    scaled = ("accelerator-fp16", "hetero-fp16", "tensorrt-fp16")
    scales = {name: placed._scales_loss(_plan(name)) for name in BUILTIN}

    assert {name for name, scaled_here in scales.items() if scaled_here} == set(scaled)
    assert placed._scales_loss(_plan("hetero-fp32", wire="fp16"))


@pytest.mark.parametrize("name", ["original-fp32", "original-fp16"])
def test_the_original_trains_on_a_stand_in_in_what_it_multiplies(tmp_path: Path, name: str) -> None:
    case = Case(tmp_path)
    _train(case, _plan(name), 2)

    row = case.row()
    assert row.validity.valid, row.validity.reasons
    assert row.facts["precision_ran"] == "fp32", "of values that fp16 has, where that was asked for"
    assert [each["name"] for each in row.facts["placed"]["left_alone"]] == ["linear"]


class _Overflowing(SmallNet):
    """Whose second layer gives infinity from the first update on."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        nn.init.constant_(self.linear.weight, 3e38)


def _row(out: Path, model: nn.Module, given: training.Recipe) -> Row:
    case = Case(out)
    with EventLog(out / EVENTS_FILE) as log:
        ctx = RowContext(case.plan, log, out, device=CPU, profile="short")
        head = {"repeat": 0, "seed": 3, "parameters": {}}
        log.emit(EventKind.ROW_START, 0, **head)
        training.train(ctx, model, *feeds(), CLASSES, given)
        log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0, error=None)
    return case.row()


def test_the_layer_and_pass_that_overflowed_first_are_named(tmp_path: Path) -> None:
    model = _Overflowing()
    before = {name: value.clone() for name, value in model.named_parameters()}
    row = _row(tmp_path, model, dataclasses.replace(recipe(), plan=_exact()))

    assert row.validity.reasons == (
        "diverged: loss is NaN/inf at epoch 1, update 1: layer 'linear' gave infinity first, in "
        "its pass forward",
    )
    assert (row.facts["overflow"]["layer"], row.facts["overflow"]["pass_"]) == ("linear", "forward")
    assert row.facts["overflow"]["inf"] > 0
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


def test_a_later_overflow_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    """Epoch 3 begins with a rate that no weight survives; its second update is the one to go."""
    case = Case(tmp_path)
    given = recipe(epochs=6)
    given = dataclasses.replace(given, schedule=MultiStep(0.05, (2,), gamma=1e36), plan=_exact())
    case.train(given, dropout=0.0)

    row = case.row()
    (reason,) = row.validity.reasons
    found = re.match(r"diverged: loss is NaN/inf at epoch 3, update 2: layer '(\w+)' g", reason)
    assert found is not None, reason
    assert found.group(1) == row.facts["overflow"]["layer"]
    assert [math.isfinite(loss) for loss in case.values("train_loss")] == [True, True, False]
    with EventLog(tmp_path / "again.jsonl") as log:
        plan = RowPlan(0, 0, 3, {})
        ctx = RowContext(plan, log, tmp_path, device=CPU, profile="short", resume=True)
        state = ctx.checkpoints.load()
    assert state is not None
    assert state["epoch"] == 2
    assert all(torch.isfinite(each).all() for each in state["model"].values())


def test_another_precision_than_the_plans_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = probe.observe
    stray = probe.Observation("aten::mm", "bfloat16", "bfloat16", "bfloat16", 1)
    monkeypatch.setattr(probe, "observe", lambda call: (*observe(call), stray))
    case = Case(tmp_path)
    _train(case, _exact(), 1)

    assert case.row().validity.reasons == (
        "the plan 'hetero-fp32' asks for fp32 on cpu, and what ran is bf16+fp32 on cpu",
    )


def test_a_precision_of_the_plan_that_never_ran_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = probe.observe

    def at_fp32(call: Any) -> Any:
        seen = observe(call)
        wide = {"inputs": "float32", "weight": "float32"}
        return tuple(dataclasses.replace(each, **wide) for each in seen)

    monkeypatch.setattr(probe, "observe", at_fp32)
    case = Case(tmp_path)
    _train(case, _short(), 1)

    (reason,) = case.row().validity.reasons
    assert reason.endswith("and what ran is fp32 on cpu")


def test_a_plan_that_names_no_such_layer_trains_nothing(tmp_path: Path) -> None:
    document = dict(BUILTIN["hetero-fp32"])
    document["layers"] = {"convv": document["passes"]}
    plan = parse_plan(document, "test")
    with pytest.raises(UnknownNameError, match="convv"):
        _train(Case(tmp_path), plan)


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"precision": "bf16", "nproc": 1}, "precision=bf16 and -p plan=hetero-int8"),
        ({"precision": "fp32", "nproc": 2}, "nproc=2 and -p plan=hetero-int8"),
    ],
)
def test_a_plan_goes_with_no_other_word_for_the_same(
    tmp_path: Path, parameters: Dict[str, Any], match: str
) -> None:
    asked = {"plan": "hetero-int8", **parameters}
    with EventLog(tmp_path / EVENTS_FILE) as log:
        ctx = RowContext(RowPlan(0, 0, 0, asked), log, tmp_path, device=CPU, profile="short")
        with pytest.raises(UsageError, match=match):
            placed.asked_plan(ctx)


def test_a_sentry_holds_from_the_first_bad_update_on() -> None:
    sentry = Sentry(CPU)
    good, bad = torch.tensor(1.0), torch.tensor(math.nan)
    gradient = torch.ones(4)
    lookout = Lookout(sentry.first)
    held = []
    for loss, by in [(good, gradient), (good, gradient / 0), (good, gradient), (bad, gradient)]:
        held.append(bool(sentry.judge(loss, by)))

    assert held == [False, True, True, True]
    assert lookout.look() == 2


def test_a_sentry_leaves_overflow_to_a_loss_scale_until_no_scale_helps() -> None:
    sentry = Sentry(CPU)
    loss, gradient = torch.tensor(1.0), torch.full((4,), math.inf)

    assert not sentry.judge(loss, gradient, torch.tensor(65536.0))
    sentry.begin()
    assert not sentry.judge(loss, gradient, torch.tensor(65536.0))
    assert sentry.judge(loss, gradient, torch.tensor(2.0**-11))
    assert sentry.first.item() == 2, "of the epoch that began last"


def test_a_trained_model_computes_with_the_weights_that_it_has(tmp_path: Path) -> None:
    """The bus sends weights only where they changed: none may be left behind."""
    case = Case(tmp_path)
    model = _train(case, _exact(), 1)
    images, _ = feeds()[1].batch(torch.arange(8))
    plain = SmallNet()
    plain.load_state_dict(model.state_dict())
    model.eval()
    plain.eval()
    with torch.no_grad():
        assert (model(images) - plain(images)).abs().max().item() <= 1e-5
