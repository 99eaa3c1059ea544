"""What only a GPU can show of `tensor-cores`: the null result and the truth, engines, 8 bits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, Tuple

import pytest
import torch
from tensor_cores_cases import EXPERIMENTS, module

from narrowgauge_contract.outcome import Outcome, Row, load_outcome
from narrowgauge_lab import precision, torch_compat

pytestmark = pytest.mark.gpu


_WORDS = ("workload=resnet50", "limit_s=0.5")


def _lab(out: Path, *words: str) -> Outcome:
    """The rows that the words ask for, on the GPU, each in its own process. Of words for one
    parameter the last one counts."""
    given = ["--profile", "smoke", "--experiments", str(EXPERIMENTS), "--out", str(out)]
    chosen = {word.partition("=")[0]: word for word in (*_WORDS, *words)}
    for word in chosen.values():
        given += ["-p", word]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "narrowgauge_lab",
            "run",
            "tensor-cores",
            "--device",
            "cuda",
            *given,
        ],
        env={**os.environ, "PYTHONPATH": str(EXPERIMENTS.parent / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    outcome = load_outcome(out / "outcome.json")
    assert done.returncode == outcome.exit_code, done.stderr
    print(done.stdout)
    return outcome


def _valid(outcome: Outcome) -> Tuple[Row, ...]:
    for row in outcome.rows:
        assert row.error is None, row.error
        assert row.validity.valid, row.validity.reasons
    return outcome.rows


def _needs(name: str) -> None:
    if name not in precision.available(torch.device("cuda")):
        pytest.skip(f"{name} does not work on this GPU with this torch")


def test_the_null_result_and_the_truth_on_one_day(tmp_path: Path) -> None:
    """Contaminated, `Float32` is half and as fast as O3; clean, it is float32 and slower."""
    words = ("mode=O3,fp32", "protocol=contaminated,clean", "batch=64", "images=640")
    rows = {(r.parameters["protocol"], r.parameters["mode"]): r
            for r in _valid(_lab(tmp_path, *words))}  # fmt: skip

    ran = {key: row.facts["precision_ran"] for key, row in rows.items()}
    assert ran == {
        ("contaminated", "O3"): "fp16", ("contaminated", "fp32"): "fp16",
        ("clean", "O3"): "fp16", ("clean", "fp32"): "fp32",
    }  # fmt: skip
    seconds = {key: row.metric("seconds").values[0] for key, row in rows.items()}
    null = seconds["contaminated", "fp32"] / seconds["contaminated", "O3"]
    truth = seconds["clean", "fp32"] / seconds["clean", "O3"]
    # Ten batches each: an equality that a busy host blurs, beside a difference that it does not.
    assert 0.67 < null < 1.5
    if "tf32" in precision.available(torch.device("cuda")):  # tensor cores of some size
        assert truth > 1.3 * null
    assert rows["contaminated", "fp32"].facts["patched_functions"] == ["conv2d", "linear"]
    assert rows["clean", "fp32"].facts["patched_functions"] == []
    assert rows["clean", "fp32"].metric("peak_memory").values[0] > 4 * 25557032
    assert rows["clean", "O3"].facts["kernels"][0]["share"] > 0


def test_at_batch_one_launches_are_judged_by_measured_times(tmp_path: Path) -> None:
    words = ("mode=fp32,fp16", "batch=1", "images=0")
    for row in _valid(_lab(tmp_path, *words)):
        assert row.facts["bound_by"] in ("launches", "device", "undecided")
        assert "latency" in row.facts["bound_by_proof"]
        latency = sorted(row.metric("latency").values)
        if row.metric("gpu_busy") is None:
            assert row.facts["gpu_busy_missing"]
        else:
            busy = sorted(row.metric("gpu_busy").values)
            assert busy[len(busy) // 2] < 1.05 * latency[len(latency) // 2]
        assert row.metric("enqueue").values


@pytest.mark.parametrize("mode", ["tf32", "O1", "O2", "bf16"])
def test_each_mode_runs_in_what_it_says(tmp_path: Path, mode: str) -> None:
    expected = {"tf32": "tf32", "O1": "fp16", "O2": "fp16", "bf16": "bf16"}[mode]
    _needs(expected)
    (row,) = _valid(_lab(tmp_path, f"mode={mode}", "batch=8", "images=0"))

    assert row.facts["precision_ran"] == expected


def test_a_graph_replays_what_was_probed(tmp_path: Path) -> None:
    if not torch_compat.graphs_available(torch.device("cuda")):
        pytest.skip("this torch has no CUDA graphs")
    words = ("rung=bn-fold,graph", "mode=fp32", "batch=1", "images=0")
    eager, graph = _valid(_lab(tmp_path, *words))

    assert graph.facts["engine_ran"] == "cuda-graph"
    assert graph.facts["precision_ran"] == eager.facts["precision_ran"] == "fp16"
    assert graph.facts["setup"] == {**eager.facts["setup"], "engine": "graph"}
    middle: Dict[str, float] = {}
    for row in (eager, graph):
        values = sorted(row.metric("latency").values)
        middle[row.facts["engine_ran"]] = values[len(values) // 2]
    assert middle["cuda-graph"] < middle["eager"]


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_replayed_graph_keeps_what_it_reads(precision: str) -> None:
    """Weights, inputs and buffers: what nobody keeps, the next allocation writes over."""
    device = torch.device("cuda")
    if not torch_compat.graphs_available(device):
        pytest.skip("this torch has no CUDA graphs")
    torch.manual_seed(0)
    setup = module("setups").Setup(
        precision=precision, layout="channels_last", fold=True, engine="graph"
    )
    model = module("network").INFERENCE["resnet50-tiny"].build()
    images = torch.rand(8, 3, 32, 32)
    network = module("engines").make_ready(model, images, setup, device, "auto")
    first = network.call().clone()
    del model, images
    gc.collect()
    overwriting = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(64)]
    overwriting += [torch.full((1 << 12,), float("nan"), device=device) for _ in range(512)]

    assert torch.equal(network.call(), first)


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["compile", "int8", "fp8"])
def test_the_upper_rungs_compute_the_same_network(tmp_path: Path, rung: str) -> None:
    outcome = _lab(tmp_path, f"rung={rung}", "mode=fp32", "batch=32", "images=0")
    (row,) = outcome.rows
    if row.error is not None and row.error.kind == "NotApplicableError":
        pytest.skip(row.error.what)
    assert row.validity.valid, row.validity.reasons
    assert row.facts["precision_ran"] == {"compile": "fp16"}.get(rung, rung)


@pytest.mark.parametrize("mode", ["fp32", "O1", "O2", "O3"])
def test_the_benches_train(tmp_path: Path, mode: str) -> None:
    words = ("workload=linear-8192", f"mode={mode}", "protocol=clean,contaminated")
    for row in _valid(_lab(tmp_path, *words)):
        assert row.facts["precision_ran"] == ("fp32" if mode == "fp32" else "fp16")
        assert row.facts["timed"] == "100 iterations"
