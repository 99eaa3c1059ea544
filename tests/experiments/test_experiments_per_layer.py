"""`per-layer`: rows of one small layer, what they record, what makes them invalid or skipped."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import SkippedError
from narrowgauge_contract.events import EVENTS_FILE, EventLog
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.placement import BUILTIN, parse_plan
from narrowgauge_contract.summary import summary_lines
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.hetero.backends.faithful import bytes_per_call
from narrowgauge_lab.layers.hetero.ledger import STAGES, Interval
from narrowgauge_lab.layers.hetero.original_table import COLUMNS, VARIANTS
from narrowgauge_lab.layers.passes import Problem, missing
from narrowgauge_lab.spans import RecordedSpans

NAME = "per-layer"
#: Quick, whatever the machine: no figure of these tests is a measurement.
QUICK = ("group=7", "batch=2", "iterations=3", "limit_s=0.01", "plan=hetero-fp32")
_ROWS = Rows(NAME, QUICK)
module, spec, job, run_row = _ROWS.module, _ROWS.spec, _ROWS.job, _ROWS.run

#: Elements of group 7 at batch 2: images, outputs, weights.
_X, _Y, _W = 2 * 16 * 32 * 32, 2 * 32 * 16 * 16, 32 * 16 * 9


@pytest.fixture(autouse=True)
def _a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps say nothing about where time goes; how that is judged has a test of its own."""
    monkeypatch.setattr(module("accounts"), "_TOLERANCE", 1e9)


def _context(out: Path, *words: str) -> RowContext:
    chosen = {word.partition("=")[0]: word for word in (*QUICK, *words)}
    made = job(*chosen.values())
    return RowContext(
        made.rows[0], EventLog(out / EVENTS_FILE), out, device=CPU, profile="smoke", plans=made.plan
    )


def _training(out: Path, *words: str) -> Any:
    """Group 7 at batch 2, by the plan of the words."""
    ctx = _context(out, *words)
    plan = ctx.plan(str(ctx.parameters["plan"]))
    shapes = module("shapes")
    return ctx, module("subject").Training(ctx, shapes.GROUPS["7"], 2, plan)


def _values(row: Row, name: str) -> List[float]:
    metric = row.metric(name)
    assert metric is not None, name
    return list(metric.values)


# Rows.


def test_a_serial_row_records_what_it_promises(tmp_path: Path) -> None:
    row = run_row(tmp_path)

    assert row.validity.valid, row.validity.reasons
    column = module("accounts").column
    tables = {column(variant, name) for variant in VARIANTS for name in COLUMNS[variant]}
    errors = {f"relative_error_{name}" for name in ("forward", "input_grad", "weight_grad")}
    assert {metric.name for metric in row.metrics} == {
        "forward", "backward", "step", "bytes_to_device", "bytes_from_device", "copy_share",
        "stages_over_wall", *(f"stage_{stage}" for stage in STAGES), *tables, *errors,
    }  # fmt: skip
    assert all(_values(row, name)[0] < 1e-5 for name in errors)
    facts = row.facts
    assert facts["accelerator"] == "cpu (stand-in)"
    assert facts["shape"] == "2x 16x32x32 -> 32x16x16, stride 2"
    assert facts["plan"]["plan"]["name"] == "hetero-fp32"
    assert len(facts["sweep"]) == 6
    assert all(each["weight_grad"] < 1e-5 for each in facts["sweep"])
    assert "one CPU" in facts["bytes_profiled_missing"]
    assert len(_values(row, "tensorrt_bwd_pre_post")) == 3


def test_the_sweep_is_of_the_first_repeat(tmp_path: Path) -> None:
    ctx, training = _training(tmp_path)
    said: Dict[str, Any] = {}
    ctx.fact = said.__setitem__  # type: ignore[method-assign]
    ctx.repeat = 1

    module("run")._measure(ctx, training)

    assert "sweep" not in said
    assert "placed" in said


@pytest.mark.parametrize("plan", ["hetero-fp32", "original-fp16", "accelerator"])
def test_bytes_are_what_each_step_moves(tmp_path: Path, plan: str) -> None:
    row = run_row(tmp_path, f"plan={plan}")

    up, down = 4 * (_X + _Y + _W), 4 * (_X + _Y + _W)
    if plan == "accelerator":
        up = down = 0
    elif plan == "original-fp16":
        moved = bytes_per_call(
            Problem("conv2d", (2, 2), (1, 1)), (2, 16, 32, 32), (32, 16, 3, 3), "fp16"
        )
        up, down = (sum(each[way] for each in moved.values()) for way in (0, 1))
    assert _values(row, "bytes_to_device") == [float(up)] * 3
    assert _values(row, "bytes_from_device") == [float(down)] * 3


def test_an_overlapped_row_holds_its_times_against_each_resource(tmp_path: Path) -> None:
    row = run_row(tmp_path, "mode=overlapped")

    assert row.validity.valid, row.validity.reasons
    for part, resource in itertools.product(("forward", "backward", "step"), ("up", "down", "gpu")):
        assert min(_values(row, f"{part}_{resource}_alone")) > 0
    assert min(_values(row, "step_cpu_alone")) > 0
    assert row.metric("forward_cpu_alone") is None, "it neither packs nor copies aside at fp32"
    bound = row.facts["bound"]["backward"]
    assert bound["resource"] in ("up", "down", "gpu", "cpu")
    ratios = [each / bound["seconds"] for each in _values(row, "backward")]
    assert _values(row, "backward_over_bound") == pytest.approx(ratios)
    assert row.facts["coverage"]["steps"] == 3
    assert row.metric("tensorrt_total") is None


def test_what_does_not_overlap_has_no_bound(tmp_path: Path) -> None:
    for number, plan in enumerate(("original-fp32", "accelerator", "cpu")):
        row = run_row(tmp_path / str(number), "mode=overlapped", f"plan={plan}")
        assert row.metric("step_over_bound") is None
        assert row.metric("step") is not None
        assert row.facts["bound_missing"]


def test_the_policy_takes_the_place_of_the_plans_own(tmp_path: Path) -> None:
    row = run_row(tmp_path, "policy=pinned")
    assert row.facts["plan"]["transfer"]["policy"] == "pinned"


@pytest.mark.parametrize("plan", ["original-fp32", "accelerator", "cpu"])
def test_a_policy_for_a_plan_that_copies_nothing_by_it_is_skipped(
    tmp_path: Path, plan: str
) -> None:
    with pytest.raises(SkippedError, match=f"'{plan}' has no transfer policy"):
        run_row(tmp_path, f"plan={plan}", "policy=pageable")


def test_a_precision_that_is_not_here_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="hetero-fp8"):
        run_row(tmp_path, "plan=hetero-fp8")


# What is wrong.


def test_the_originals_gradient_at_stride_2_makes_a_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row's plan has the fault off; what runs has it on."""
    for name in ("subject", "correctness"):
        ours = module(name)
        monkeypatch.setattr(ours, "convert", _with_the_fault(ours.convert))

    row = run_row(tmp_path, "plan=original-fp32")

    assert not row.validity.valid
    reasons = "\n".join(row.validity.reasons)
    assert "the layer's weight_grad is off by 1.4" in reasons
    assert "sweep, stride 2: weight_grad" in reasons
    assert "forward" not in reasons
    assert "input_grad" not in reasons


def _with_the_fault(convert: Any) -> Any:
    def faulty(model: Any, plan: Any, *rest: Any) -> Any:
        return convert(model, dataclasses.replace(plan, stride_bug=True), *rest)

    return faulty


def test_the_fault_that_a_plan_asks_for_is_said(tmp_path: Path) -> None:
    document = {**BUILTIN["original-fp32"], "plan": {
        "name": "faulty", "elsewhere": "cpu", "stride_bug": True,
    }}  # fmt: skip
    ctx = _context(tmp_path)
    training = module("subject").Training(
        ctx, module("shapes").GROUPS["7"], 2, parse_plan(document, "here")
    )
    said: Dict[str, Any] = {}
    ctx.fact = said.__setitem__  # type: ignore[method-assign]
    ctx.invalid = said.setdefault("invalid", []).append  # type: ignore[method-assign]

    module("correctness").check_layer(ctx, training)

    assert "stride_bug" in said["weight_grad_wrong_as_planned"]
    assert said["invalid"] == []


def test_a_product_that_rounds_more_than_it_may_makes_a_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module("correctness").LIMITS, "fp32", 1e-12)
    row = run_row(tmp_path)
    assert len([reason for reason in row.validity.reasons if "the layer's" in reason]) == 3


def test_float16_that_overflows_gets_a_loss_scale(tmp_path: Path) -> None:
    if missing("fp16", CPU):
        pytest.skip(missing("fp16", CPU))
    ctx, training = _training(tmp_path, "plan=hetero-fp16")
    training.target.mul_(1e5)

    module("correctness").check_layer(ctx, training)
    assert 0 < training.loss_scale < 1
    before = training.weight.detach().clone()
    training.step()
    assert bool(torch.isfinite(training.weight).all())
    assert not torch.equal(before, training.weight.detach())


@pytest.mark.parametrize(("share", "valid"), [(1.0, True), (0.975, True), (0.96, False)])
def test_stages_that_do_not_add_up_make_a_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, valid: bool
) -> None:
    accounts = module("accounts")
    monkeypatch.setattr(accounts, "_TOLERANCE", 0.03)
    reasons: List[str] = []
    ctx = _context(tmp_path)
    ctx.invalid = reasons.append  # type: ignore[method-assign]

    accounts._require_close(ctx, share, "all stages add up to")

    assert (not reasons) is valid
    assert valid or "96.0%" in reasons[0]


def test_stages_belong_to_the_step_that_their_middle_is_in() -> None:
    def stage(start: float, seconds: float) -> Interval:
        return Interval("conv", "forward", "compute", "work", start, seconds, 0, 0)

    stages = [stage(0.99, 0.5), stage(1.5, 0.2), stage(1.999, 0.4), stage(2.5, 0.4)]
    steps = module("accounts")._by_step(stages, [(1.0, 1.9), (2.0, 3.0)])
    assert [[each.start for each in step] for step in steps] == [[0.99, 1.5], [1.999, 2.5]]


# Accounts and traces.


def test_accounts_end_and_leave_native_layers_native(tmp_path: Path) -> None:
    _, training = _training(tmp_path, "plan=accelerator")
    assert training.converted.native == ("conv",)
    ledger = training.account("serial")
    assert not training.converted.native
    training.step()
    assert ledger.calls()
    training.account("off")
    training.step()
    assert training.converted.native == ("conv",)


def test_a_trace_has_the_stages_in_lanes_of_their_own(tmp_path: Path) -> None:
    ctx, training = _training(tmp_path)
    ctx.record_spans()
    assert isinstance(ctx.spans, RecordedSpans)

    module("accounts").trace_steps(training, "serial", ctx.spans)

    events, _ = ctx.spans.finish()
    lanes = {event.lane for event in events}
    assert lanes == {"spans", "hetero"}
    assert {event.name for event in events if event.lane == "spans"} == {
        "forward", "backward", "optimiser",
    }  # fmt: skip


# What is published.


def test_the_published_tables_are_the_same_everywhere(tmp_path: Path) -> None:
    claims = {each.id: each for each in load_claims(EXPERIMENTS / NAME / "claims.toml", spec())}
    row = run_row(tmp_path, "plan=cpu")
    stages = next(each for each in spec().drawings if each.name == "stages")
    assert stages.stack is not None
    groups = [name for name in module("shapes").GROUPS if name != "1c"]
    for variant, beside in zip(VARIANTS, stages.stack.beside):
        assert set(beside.values) == set(groups)
        for group in groups:
            words = [_claim(variant, group, name) for name in COLUMNS[variant]]
            figures = [claims[word].expected["any"].figure or 0.0 for word in words]
            parts = sum(
                figure for word, figure in zip(words, figures)
                if word.rpartition("-")[2] in _PARTS
            )  # fmt: skip
            assert sum(beside.values[group].values()) == pytest.approx(parts)
            if variant == "tensorrt":
                cells = " | ".join(f"{100 * figure:.3f}" for figure in figures)
                assert f"published: TensorRT, Xavier | {cells} |" in _closing(row, group)


#: The ends of those columns that are stages; the others are sums of them, or whole calls.
_PARTS = ("load", "refit", "compute", "sync", "reshape", "post", "to", "comp", "back")


def _claim(variant: str, group: str, column: str) -> str:
    return f"{variant}-{group}-{module('accounts').column('', column)[1:]}".replace("_", "-")


def _closing(row: Row, group: str) -> str:
    """What is printed of the row, were it of that group at batch 32."""
    closing = spec().closing
    assert closing is not None
    parameters = {**row.parameters, "group": group, "batch": 32}
    lines = summary_lines(closing, [dataclasses.replace(row, parameters=parameters)])
    assert lines[-2].startswith(f"| {group} | 32 | cpu | ")
    return lines[-1]


def test_the_shapes_are_resnet_20s() -> None:
    found = {name: shape.text() for name, shape in module("shapes").GROUPS.items()}
    assert found["1"] == "3x224x224 -> 16x224x224"
    assert found["1c"] == "3x32x32 -> 16x32x32"
    assert found["13"] == "32x16x16 -> 64x8x8"
    assert found["14-18"] == "64x8x8 -> 64x8x8"
