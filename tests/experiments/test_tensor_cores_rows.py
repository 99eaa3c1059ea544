"""Rows of `tensor-cores` from end to end, on a CPU: what they record, and when they are INVALID."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest
import torch
from tensor_cores_cases import (
    CPU,
    EXPERIMENTS,
    QUICK,
    functions,
    logged,
    module,
    run_row,
)
from torch import nn

from narrowgauge_contract.errors import NotApplicableError, UnknownNameError, UsageError
from narrowgauge_contract.outcome import Status, load_outcome
from narrowgauge_lab import torch_compat

_ = functions  # a fixture, used by name
HAS_FP16 = torch.float16 in torch_compat.autocast_dtypes(CPU)
needs_fp16 = pytest.mark.skipif(not HAS_FP16, reason="this torch has no float16 on a CPU")


def test_a_clean_row_records_what_it_promises(tmp_path: Path) -> None:
    row = run_row(tmp_path, *QUICK, "mode=fp32", "images=5", "layout=channels_last", "fold=true")

    assert row.validity.valid, row.validity.reasons
    metrics = {metric.name: metric for metric in row.metrics}
    assert set(metrics) == {
        "relative_error", "max_error", "seconds", "latency", "images_per_second",
        "macs_per_second",
    }  # fmt: skip
    latency, rates = metrics["latency"].values, metrics["images_per_second"].values
    assert rates == pytest.approx([2 / seconds for seconds in latency])
    macs = row.facts["cost"]["macs"]
    assert metrics["macs_per_second"].values == pytest.approx([2 * macs / s for s in latency])
    assert metrics["relative_error"].values[0] < 1e-5
    facts = row.facts
    assert facts["precision_ran"] == "fp32"
    assert facts["patched_functions"] == []
    assert facts["engine_ran"] == "eager"
    assert facts["timed"] == "6 images", "whole batches"
    assert facts["tf32_measured"] == {"matmul": False, "conv": False}
    assert facts["setup"]["fold"] is True
    assert facts["cost"]["parameters"] > 0
    assert 0 < facts["roofline_share"] < 1
    assert {"state_before", "state_after", "windows_discarded", "ceiling"} <= set(facts)
    (line,) = [text for text in logged(tmp_path) if "seconds" in text]
    assert line == f"Float32: {metrics['seconds'].values[0]:.2f} seconds"


@pytest.mark.slow
@needs_fp16
@pytest.mark.parametrize("mode", ["O1", "O2", "O3"])
def test_the_native_levels_run_in_fp16(tmp_path: Path, mode: str) -> None:
    row = run_row(tmp_path, *QUICK, f"mode={mode}", "images=0")

    assert row.validity.valid, row.validity.reasons
    assert row.facts["precision_ran"] == "fp16"
    assert row.metric("seconds") is None, "no images, no loop"
    assert row.metric("relative_error").values[0] > 1e-5


@pytest.mark.slow
def test_an_int8_row_really_multiplies_bytes(tmp_path: Path) -> None:
    """By torch's own quantised operators, which the probe sees on either torch."""
    row = run_row(tmp_path, *QUICK, "mode=int8", "images=0")

    assert row.validity.valid, row.validity.reasons
    assert row.facts["precision_ran"] == "int8"
    assert sum(each["calls"] for each in row.facts["probe"]) == 18
    assert row.facts["setup"]["fold"] is True
    assert 1e-4 < row.metric("relative_error").values[0] < 0.3


def test_outputs_that_are_not_finite_make_the_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = module("network")
    build = network.Inference.build

    def spoilt(workload: Any) -> nn.Module:
        model: nn.Module = build(workload)
        model.fc.bias.data[3] = float("nan")
        return model

    monkeypatch.setattr(network.Inference, "build", spoilt)
    row = run_row(tmp_path, *QUICK, "mode=fp32", "images=0")

    assert row.status is Status.COMPLETE
    assert row.validity.reasons == ("2 of 20 outputs are not finite",)


@needs_fp16
@pytest.mark.usefixtures("functions")
def test_a_clean_row_in_a_process_that_is_not_clean_is_invalid(tmp_path: Path) -> None:
    """It cannot happen, a row being a process; if it does, the probe sees it."""
    module("apex").Amp().initialize(nn.Linear(2, 2), "O1")
    row = run_row(tmp_path, *QUICK, "mode=fp32", "images=0")

    assert row.facts["patched_functions"] == ["conv2d", "linear"]
    assert not row.validity.valid
    assert any("asked for precision fp32, ran fp" in reason for reason in row.validity.reasons)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("mode=tf32",), NotApplicableError),
        (("mode=fp32", "engine=graph"), NotApplicableError),
        (("mode=bf16", "protocol=contaminated"), NotApplicableError),
        (("mode=fp32", "protocol=contaminated", "layout=channels_last"), NotApplicableError),
        (("mode=fp32", "rung=tf32", "fold=true"), UsageError),
        (("mode=fp32", "energy=sunlight"), UnknownNameError),
        (("mode=int8", "workload=linear-tiny"), NotApplicableError),
        (("mode=fp8",), NotApplicableError),
        (("mode=fp32", "workload=linear-tiny", "layout=channels_last"), NotApplicableError),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, words: Any, error: Any) -> None:
    with pytest.raises(error):
        run_row(tmp_path, *QUICK, *words)


# The linear benches.


def _bench(mode: str, **changes: Any) -> Any:
    network, setups = module("network"), module("setups")
    torch.manual_seed(0)
    chosen = setups.MODES[mode]
    setup = setups.Setup(precision=chosen.precision, form=chosen.form)
    workload = network.TRAINING["linear-tiny"]
    return module("linear").Bench(workload, 16, setup, CPU, **changes)


def test_a_bench_is_plain_gradient_descent() -> None:
    """Layer, loss and update written out, as the original has them."""
    bench = _bench("fp32")
    layer = nn.Linear(64, 32)
    layer.load_state_dict(bench.layer.state_dict())
    for _ in range(3):
        loss = nn.functional.mse_loss(layer(bench.inputs), bench.targets)
        gradients = torch.autograd.grad(loss, list(layer.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(layer.parameters(), gradients):
                parameter -= 1e-3 * gradient
        assert torch.equal(bench(), loss.detach())

    assert torch.allclose(bench.layer.weight, layer.weight, rtol=1e-6, atol=1e-8)


@needs_fp16
@pytest.mark.parametrize("mode", ["O1", "O2", "O3"])
def test_the_levels_of_a_bench_train_alike(mode: str) -> None:
    strict, reduced = _bench("fp32"), _bench(mode)
    losses = [(float(strict()), float(reduced())) for _ in range(5)]

    for expected, found in losses:
        assert found == pytest.approx(expected, rel=5e-3)
    assert losses[-1][1] < losses[0][1]
    expected_dtype = torch.float32 if mode == "O1" else torch.float16
    assert reduced.layer.weight.dtype == expected_dtype


@needs_fp16
def test_a_step_whose_gradients_overflow_is_left_out() -> None:
    bench = _bench("O2")
    bench()
    bench._scale.scale.fill_(1e30)
    before = bench.layer.weight.clone()
    bench()

    assert torch.equal(bench.layer.weight, before)
    assert int(bench._scale.skipped) == 1


@pytest.mark.parametrize("mode", ["fp32", pytest.param("O2", marks=[needs_fp16, pytest.mark.slow])])
def test_a_bench_is_a_row(tmp_path: Path, mode: str) -> None:
    row = run_row(tmp_path, "workload=linear-tiny", "batch=16", "limit_s=0.05", f"mode={mode}")

    assert row.validity.valid, row.validity.reasons
    assert row.facts["timed"] == "5 iterations"
    assert row.facts["precision_ran"] == ("fp32" if mode == "fp32" else "fp16")
    assert row.facts["cost"]["macs"] == 2 * 16 * 64 * 32
    operators = [each["operator"] for each in row.facts["probe"]]
    assert len(operators) == 2, "the forward product and the weight's gradient"


# Rows as processes.

_SCRIPT = """
import sys, torch
from narrowgauge_lab import cli
draw = torch.rand
def rand(*sizes, **named):
    if sizes[0] == 64:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 1 GiB free")
    return draw(*sizes, **named)
torch.rand = rand
torch.set_num_threads(1)
sys.exit(cli.main(sys.argv[1:]))
"""


def _lab(out: Path, *words: str) -> Any:
    """The lab with an allocator that has no room for 64 images."""
    given = ["--profile", "smoke", "--experiments", str(EXPERIMENTS), "--out", str(out)]
    for word in words:
        given += ["-p", word]
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT, "run", "tensor-cores", "--device", "cpu", *given],
        env={**os.environ, "PYTHONPATH": str(EXPERIMENTS.parent / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_batch_that_does_not_fit_says_so_and_the_sweep_goes_on(tmp_path: Path) -> None:
    words = ("workload=resnet50-tiny", "batch=64,2", "mode=fp32", "images=4", "limit_s=0.05")
    done = _lab(tmp_path, *words)

    assert done.returncode == 31, done.stderr
    one, other = load_outcome(tmp_path / "outcome.json").rows
    assert one.status is Status.FAILED
    assert one.error.kind == "OutOfMemoryError"
    assert "Tried to allocate 2.50 GiB" in one.error.why
    assert one.facts["bytes_asked"] == 2684354560
    assert (other.status, other.validity.valid) == (Status.COMPLETE, True)
    assert "Results summary (4 images)\n===============\nFloat32: " in done.stdout


@pytest.mark.slow
@needs_fp16
def test_contaminated_rows_leave_clean_rows_clean(tmp_path: Path) -> None:
    """Interleaved in one run: the original's five levels, contaminated and not."""
    words = ("mode=O3,O2,O1,O0,fp32", "protocol=contaminated,clean", "batch=2", "images=4")
    done = _lab(tmp_path, "workload=resnet50-tiny", "limit_s=0.05", *words)

    assert done.returncode == 0, done.stderr
    rows = load_outcome(tmp_path / "outcome.json").rows
    ran = {(r.parameters["protocol"], r.parameters["mode"]): r.facts["precision_ran"] for r in rows}
    levels: List[str] = ["O3", "O2", "O1", "O0", "fp32"]
    assert [ran["contaminated", level] for level in levels] == ["fp16"] * 5
    assert [ran["clean", level] for level in levels] == ["fp16"] * 3 + ["fp32"] * 2
    for row in rows:
        late = row.parameters["mode"] in ("O1", "O0", "fp32")
        patched = late and row.parameters["protocol"] == "contaminated"
        assert row.facts["patched_functions"] == (["conv2d", "linear"] if patched else [])
    assert done.stdout.count("Results summary (4 images)") == 2


@pytest.mark.slow
# torch's compiler imports deprecated parts of torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_row_is_probed_and_held_against_the_reference(tmp_path: Path) -> None:
    if not torch_compat.compiler_available():
        pytest.skip("this torch does not compile")
    row = run_row(tmp_path, *QUICK, "mode=fp32", "engine=compile", "images=0")

    assert row.validity.valid, row.validity.reasons
    assert row.facts["engine_ran"] == "torch.compile default"
    assert row.facts["precision_ran"] == "fp32"
