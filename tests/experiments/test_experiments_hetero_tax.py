"""`hetero-tax`: rows of a tiny network by several setups, what makes them invalid or skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from one_row import CPU, EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import SkippedError, UsageError
from narrowgauge_contract.events import EVENTS_FILE, EventLog, read_events
from narrowgauge_contract.outcome import Fold, Row
from narrowgauge_contract.summary import summary_lines
from narrowgauge_lab import precision
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.passes import missing
from narrowgauge_lab.measure.ceilings import Ceiling
from narrowgauge_lab.measure.cost import Cost

NAME = "hetero-tax"
#: Quick, whatever the machine: no figure of these tests is a measurement.
QUICK = ("network=resnet50-tiny", "batch=2", "limit_s=0.01", "setup=hetero-fp32")
_ROWS = Rows(NAME, QUICK)
module, spec, job, run_row = _ROWS.module, _ROWS.spec, _ROWS.job, _ROWS.run


def _context(out: Path) -> RowContext:
    made = job(*QUICK)
    return RowContext(
        made.rows[0], EventLog(out / EVENTS_FILE), out, device=CPU, profile="smoke", plans=made.plan
    )


def _value(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None, name
    return metric.values[0]


def test_a_row_records_what_it_promises(tmp_path: Path) -> None:
    row = run_row(tmp_path)

    assert row.validity.valid, row.validity.reasons
    assert {metric.name for metric in row.metrics} == {
        "step", "images_per_second", "bytes_to_device", "bytes_from_device", "bytes_moved",
        "loss_error", "gradient_error", "product_seconds",
    }  # fmt: skip
    assert _value(row, "loss_error") < 1e-5
    assert _value(row, "gradient_error") < 1e-2
    facts = row.facts
    assert facts["accelerator"] == "cpu (stand-in)"
    assert "made up" in facts["pictures"]
    assert "no bus" in facts["copy_seconds_missing"]
    assert "GFLOP of products" in facts["reason"]
    assert facts["world_size"] == 1
    assert facts["steps_ran"] == "eager"
    assert facts["precision_ran"] == "fp32"
    moved = facts["bytes_per_step"]
    assert (moved["to_device"], moved["from_device"]) == (
        _value(row, "bytes_to_device"), _value(row, "bytes_from_device"),
    )  # fmt: skip
    assert _value(row, "bytes_moved") == moved["to_device"] + moved["from_device"]


def test_what_is_all_on_the_accelerator_moves_nothing(tmp_path: Path) -> None:
    row = run_row(tmp_path, "setup=accelerator")
    assert row.validity.valid, row.validity.reasons
    assert _value(row, "bytes_to_device") == _value(row, "bytes_from_device") == 0
    assert row.facts["placed"]["placed"] == 0


def test_the_original_moves_several_times_as_much(tmp_path: Path) -> None:
    ours, original = (run_row(tmp_path / name, f"setup={name}")
                      for name in ("hetero-fp32", "original-fp32"))  # fmt: skip
    for row in (ours, original):
        assert row.validity.valid, row.validity.reasons
    assert _value(original, "bytes_to_device") > 3 * _value(ours, "bytes_to_device")


def test_the_best_trains_the_same_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its compiler and its graph, for which it needs a GPU."""
    if "bf16" not in precision.available(CPU):
        pytest.skip("no autocast to bf16 here")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # it sets that, and we undo it
    ctx = _context(tmp_path)
    said: List[str] = []
    ctx.invalid = said.append  # type: ignore[method-assign]
    what = module("subjects").subject("resnet50-tiny", 4, 0)
    strict = module("agreement").strict_training(what, CPU)
    training = module("setups").Training(ctx, what, None, compiles=False, graphs=False)

    module("agreement").check_training(ctx, training, strict)
    before = training.optimizer.values.clone()
    training()

    assert not said
    assert training.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(before, training.optimizer.values), "the rate is 0: each step is the first"


def test_a_network_that_computes_something_else_makes_a_row_invalid(tmp_path: Path) -> None:
    ctx = _context(tmp_path)
    said: List[str] = []
    ctx.invalid = said.append  # type: ignore[method-assign]
    what = module("subjects").subject("resnet50-tiny", 4, 0)
    loss, gradient = module("agreement").strict_training(what, CPU)
    plan = module("setups").asked_plan(ctx)
    training = module("setups").Training(ctx, what, plan)

    module("agreement").check_training(ctx, training, (1.1 * loss, gradient))
    assert len(said) == 1
    assert "the loss is off by 0.0909" in said[0]
    with torch.no_grad():
        training.optimizer.values.fill_(float("nan"))
    module("agreement").check_training(ctx, training, (loss, gradient))
    assert len(said) == 3
    assert said[2] == "the gradient is not finite"


def test_a_loss_scale_settles_before_it_is_judged(tmp_path: Path) -> None:
    """Of float16: by the scale that a training begins with a gradient may overflow."""
    if missing("fp16", CPU):
        pytest.skip(missing("fp16", CPU))
    made = job(*QUICK[:3], "setup=hetero-fp16")
    ctx = RowContext(
        made.rows[0], EventLog(tmp_path / EVENTS_FILE), tmp_path,
        device=CPU, profile="smoke", plans=made.plan,
    )  # fmt: skip
    said: List[str] = []
    ctx.invalid = said.append  # type: ignore[method-assign]
    what = module("subjects").subject("resnet50-tiny", 4, 0)
    strict = module("agreement").strict_training(what, CPU)
    training = module("setups").Training(ctx, what, module("setups").asked_plan(ctx))
    scale = training._way.loss_scale
    begun = scale.scale.fill_(2.0**24).item()
    before = training.optimizer.values.clone()

    module("agreement").check_training(ctx, training, strict)

    assert not said
    assert 1 <= training.loss_scale() < begun
    assert torch.equal(before, training.optimizer.values)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("setup=best",), "GPU"),
        (("setup=hetero-fp32", "nproc=2"), "nproc=2"),
        (("setup=hetero-fp8",), "hetero-fp8"),
    ],
)
def test_what_is_not_to_be_had_here_is_skipped(tmp_path: Path, words: Any, says: str) -> None:
    with pytest.raises(SkippedError, match=says):
        run_row(tmp_path, *words)


@pytest.mark.parametrize("words", [("setup=plan",), ("setup=best", "plan=hetero-fp32")])
def test_setup_and_plan_belong_together(tmp_path: Path, words: Any) -> None:
    with pytest.raises(UsageError, match="do not go together"):
        run_row(tmp_path, *words)


def test_a_plan_of_ones_own_is_the_setup_plan(tmp_path: Path) -> None:
    row = run_row(tmp_path, "setup=plan", "plan=cpu")
    assert row.validity.valid, row.validity.reasons
    assert row.facts["plan"]["plan"]["name"] == "cpu"


def test_the_reason_is_bytes_over_the_bus_and_products_over_the_best_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bus of 50 and 40 GB/s, and products of 10 TMAC/s."""
    rates = {"h2d": 50e9, "d2h": 40e9, "bf16": 10e12}
    reasons = module("reasons")

    def measured(name: str, *_: Any) -> Ceiling:
        return Ceiling(name, "B/s", 10, (1,), "a library", _samples(rates[name]))

    monkeypatch.setattr(reasons, "ceiling", measured)
    seconds, said = reasons._copying(CPU, (10_000_000_000, 12_000_000_000), 0.1)
    assert seconds == pytest.approx(0.3)
    assert (said["h2d"], said["d2h"]) == (50e9, 40e9)


def test_where_nothing_travels_the_bus_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = module("reasons")
    asked: List[str] = []

    def measured(name: str, *_: Any) -> Ceiling:
        asked.append(name)
        return Ceiling(name, "B/s", 10, (1,), "a library", _samples(1e9))

    monkeypatch.setattr(reasons, "ceiling", measured)
    monkeypatch.setattr(reasons, "ceiling_of_precision", measured)
    ctx = _context(tmp_path)
    ctx.device = torch.device("cuda")  # of which nothing is asked
    said: Dict[str, Any] = {}
    ctx.metric = lambda name, value, **_: said.update({name: value})  # type: ignore[method-assign]

    reasons.record_reason(ctx, Cost(7, 0, 0, {}, 7), (0, 0), 2, "fp32")
    assert said["copy_seconds"] == 0
    assert asked == ["fp32"]
    reasons.record_reason(ctx, Cost(7, 0, 0, {}, 7), (10**9, 10**9), 2, "fp32")
    assert said["copy_seconds"] == pytest.approx(1.0)
    assert asked == ["fp32", "fp32", "h2d", "d2h"]


def _samples(rate: float) -> Any:
    from narrowgauge_lab.measure.timing import Samples

    taken = (10.0 / rate,)
    return Samples(taken, "monotonic", 1, taken, 0, True, "interval")


def test_the_table_has_a_line_per_setup(tmp_path: Path) -> None:
    rows = [run_row(tmp_path / name, f"setup={name}") for name in ("accelerator", "hetero-fp32")]
    closing = spec().closing
    assert closing is not None
    lines = summary_lines(closing, rows)
    assert lines[-1].startswith("| resnet50-tiny | 2 | 1 | hetero-fp32 | ")
    assert "?" not in lines[-1]


def test_the_claims_are_of_rows_that_there_can_be() -> None:
    claims = load_claims(EXPERIMENTS / NAME / "claims.toml", spec())
    assert {"heterogeneous-is-6.4-times-slower", "best-over-strict-fp32", "two-gpus"} <= {
        each.id for each in claims
    }
    setups = spec().parameters["setup"].choices
    metrics = {"step", "images_per_second", "copy_seconds", "bytes_moved"}
    for claim in claims:
        assert all(each.where["setup"] in setups for each in claim.selections)
        assert {each.metric for each in claim.selections} <= metrics


@pytest.mark.slow
def test_two_processes_train_one_network(tmp_path: Path) -> None:
    """By the lab itself: ranks are forked, and this process has run torch already."""
    words = ["run", NAME, "--profile", "smoke", "--out", str(tmp_path / "out")]
    for word in (*QUICK[:3], "setup=accelerator", "nproc=2"):
        words += ["-p", word]
    command = [sys.executable, "-m", "narrowgauge_lab", *words]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)

    (row,) = Fold().add_all(read_events(tmp_path / "out" / EVENTS_FILE)).rows()
    assert row.validity.valid, row.validity.reasons
    assert row.facts["world_size"] == 2
    assert _value(row, "images_per_second") == pytest.approx(4 / _value(row, "step"))
