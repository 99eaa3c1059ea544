"""Engines on a GPU: against float64 on the CPU, side by side in one process."""

from __future__ import annotations

import gc
from typing import Any, Dict

import pytest
import torch
from engine_cases import (
    CLASSES,
    NETWORKS,
    differently_laid,
    exact,
    images,
    network,
    relative_error,
)

from narrowgauge_lab import engines, tf32_flags, torch_compat
from narrowgauge_lab.engines import Preparation, registry
from narrowgauge_lab.engines.base import DTYPES
from narrowgauge_lab.engines.graph import GraphRunner, capture
from narrowgauge_lab.measure.probe import precision_ran

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::torch")]
CUDA = torch.device("cuda")
OURS = ("eager", "channels_last", "torchscript", "cuda-graph", "compile", "onnxruntime", "xla",
        "torch2trt")  # fmt: skip
#: Strict float32 by Winograd's algorithm too; TF32 is wrong by ten times that and more.
BOUNDS = {"fp32": 2e-5, "tf32": 4e-3, "fp16": 5e-3, "bf16": 5e-2}


def prepared(engine: str, precision: str, model: Any, **wanted: Any) -> Any:
    """Skips with the engine's reason where there is none."""
    reason = engines.missing(engine, CUDA) or registry.refuses(engine, precision, CUDA)
    if reason:
        pytest.skip(reason)
    example = images(2).to(CUDA, DTYPES[precision])
    return engines.prepare(engine, model, example, Preparation(precision, CUDA, **wanted))


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("engine", OURS)
def test_agrees_with_float64(engine: str, name: str, precision: str) -> None:
    if engine == "compile" and name == "concatenated" and precision != "fp16":
        pytest.skip("each compilation takes ten seconds")
    model = network(name)
    # torch2trt has no open batch, and torch.compile compiles for each.
    batches = (2, 2, 2) if engine in ("compile", "torch2trt") else (1, 2, 4)
    runner = prepared(engine, precision, model, batches=batches)
    for count in (1, 2, 3, 1) if batches[0] < 2 else (2,):
        x = images(count, seed=5).to(CUDA, DTYPES[precision])
        right = exact(model, x)
        for laid in differently_laid(x).values():
            got = runner(laid)
            assert got.shape == (count, CLASSES)
            assert got.device.type == "cuda"
            assert relative_error(got, right) <= BOUNDS[precision]
    seen = runner.observations()
    if seen is not None:
        tf32 = {"conv": precision == "tf32", "matmul": precision == "tf32"}
        assert precision_ran(seen, tf32) == precision
    assert runner.build_seconds > 0
    runner.close()


def test_a_graph_replays_what_it_was_given_and_nothing_else() -> None:
    """New inputs each time; other work in between writes over whatever was let go of."""
    model = network("residual")
    runner = prepared("cuda-graph", "fp16", model, batches=(1, 2, 4))
    del model
    for seed in range(5):
        count = 1 + seed % 4
        x = images(count, seed=seed).to(CUDA).half()
        right = exact(network("residual"), x)
        gc.collect()
        torch.cuda.empty_cache()
        litter = [torch.full((1 << 18,), float("nan"), device=CUDA) for _ in range(40)]
        assert relative_error(runner(x), right) <= BOUNDS["fp16"]
        del litter
    # 1 to 4 images: a graph of each, with weights and pools on the device.
    assert runner.memory_bytes() > 4 * 2 * 3 * 17 * 17


def test_graphs_survive_that_workspaces_are_cleared() -> None:
    """Inductor gives all of cuBLAS's workspaces back whenever it makes graphs of its own."""
    model = network("residual")
    runner = prepared("cuda-graph", "fp16", model)
    x = images(2, seed=9).to(CUDA).half()
    right = exact(model, x)
    torch_compat.clear_cublas_workspaces()
    torch.cuda.empty_cache()
    litter = [torch.full((1 << 22,), 7.0, device=CUDA) for _ in range(16)]
    for _ in range(3):
        assert relative_error(runner(x), right) <= BOUNDS["fp16"]
    assert all(bool((each == 7.0).all()) for each in litter)


def test_runners_of_all_kinds_side_by_side() -> None:
    """Interleaved, as they are measured: none changes what another computes."""
    model = network("residual")
    runners: Dict[str, Any] = {}
    for engine in ("eager", "cuda-graph", "compile", "torchscript"):
        for precision in ("fp32", "tf32", "fp16"):
            if engine == "compile" and precision != "fp16":
                continue
            if not (engines.missing(engine, CUDA) or registry.refuses(engine, precision, CUDA)):
                runners[f"{engine} {precision}"] = prepared(engine, precision, model)
    assert len(runners) >= 6
    for seed in range(3):
        for name, runner in runners.items():
            precision = name.split()[-1]
            x = images(2, seed=seed).to(CUDA, DTYPES[precision])
            assert relative_error(runner(x), exact(model, x)) <= BOUNDS[precision], name


def test_strict_float32_stays_strict_whatever_the_process_allows() -> None:
    model = network("residual")
    runner = prepared("eager", "fp32", model)
    x = images(2, seed=4).to(CUDA)
    with tf32_flags.tf32_set_to(True):
        assert relative_error(runner(x), exact(model, x)) <= BOUNDS["fp32"]
        assert tf32_flags.tf32_allowed() == {"matmul": True, "conv": True}


def test_a_call_with_no_network_can_be_captured() -> None:
    """As experiments do: `capture` takes what reads its own inputs, and gives one result."""
    given = torch.zeros(4, device=CUDA)
    replay = capture(lambda: given * 2 + 1, CUDA)
    given.fill_(3.0)
    assert replay().tolist() == [7.0] * 4
    assert replay.pool_bytes >= 0
    assert replay.observations == ()


def test_an_empty_batch_is_not_captured() -> None:
    runner = prepared("cuda-graph", "fp32", network("residual"), batches=(0, 2, 2))
    assert isinstance(runner, GraphRunner)
    assert runner(images(0).to(CUDA)).shape == (0, CLASSES)
    assert sorted(runner._graphs) == [2]
