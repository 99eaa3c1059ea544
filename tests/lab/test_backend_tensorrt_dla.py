"""Layers whose passes a plan gives to a DLA: what goes there, and why the rest does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, List, Tuple

import pytest
from hetero_cases import CASES, Case, gradients, relative_error
from trt_convolving import Convolving
from trt_layers import TOLERANCE, Bench, batch, check

from narrowgauge_lab.engines.tensorrt import dla

BUILD = "Builder.build_serialized_network"
PLAIN = CASES[0]


@pytest.fixture
def bench(monkeypatch: Any, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


@pytest.fixture
def cores() -> Iterator[List[int]]:
    before = dict(dla.CORES._used)
    yield []
    dla.CORES._used.clear()
    dla.CORES._used.update(before)


def with_dla(takes: Tuple[str, ...] = ("CONVOLUTION",)) -> Convolving:
    world = Convolving("8.4")
    world.dla_cores, world.dla_takes = 2, set(takes)
    return world


def test_forward_runs_on_the_dla_and_the_rest_says_why_not(bench: Bench, cores: Any) -> None:
    world = with_dla()
    made = bench.backend(world, PLAIN.problem, "fp16", dla=1)

    check(made, PLAIN)

    assert world.made("Runtime.DLA_core=") == [{"value": 1}]
    assert "conv, forward: DLA core 1 runs 1 layers in 1 loadables, the GPU 0" in made.notes
    moved_away = [note for note in made.notes if "on the GPU" in note]
    assert [note.partition(":")[0].split(", ")[1] for note in moved_away] == [
        "input_grad", "weight_grad",
    ]  # fmt: skip
    assert "no layer of this network can run on a DLA" in moved_away[0]
    made.close()
    assert dla.CORES._used[1] == 0


def test_a_core_that_is_full_sends_layers_to_the_gpu(bench: Bench, cores: Any) -> None:
    world = with_dla()
    dla.CORES._used[0] = 15
    made = [bench.backend(world, PLAIN.problem, "fp16", dla=0) for _ in range(2)]

    for each in made:
        y = each.forward(PLAIN.x, PLAIN.weight, None)
        case = Case("", PLAIN.problem, PLAIN.x, PLAIN.weight, None, PLAIN.grad)
        assert relative_error(y, gradients(case)[0]) <= TOLERANCE["fp16"]

    assert len(made[0].notes) == 1
    (note,) = made[1].notes
    assert "forward, batches of 3: on the GPU, not on DLA core 0" in note
    assert "other engines of this process have 16" in note


def test_a_dla_has_an_engine_for_each_batch(bench: Bench, cores: Any) -> None:
    world = with_dla()
    made = bench.backend(world, PLAIN.problem, "fp16", dla=0)

    for count in (3, 2, 3):
        case = batch(count)
        assert (
            relative_error(made.forward(case.x, case.weight, case.bias), gradients(case)[0]) < 3e-3
        )

    shapes = [
        (each["min"][0], each["max"][0]) for each in world.made("IOptimizationProfile.set_shape")
    ]
    assert shapes == [(3, 3), (2, 2)]


def test_a_dla_that_cannot_be_refitted_is_left(bench: Bench, cores: Any) -> None:
    world = with_dla()
    names = world.Refitter_get_all_weights

    def on_gpu_only(refitter: Any) -> List[str]:
        on_dla = not refitter._values["engine"]._values["plan"]["devices"] and world.made(
            "IBuilderConfig.default_device_type="
        )
        first = len(world.made("Runtime.DLA_core=")) == 1 and len(world.made(BUILD)) == 1
        return [] if on_dla and first else names(refitter)

    world.Refitter_get_all_weights = on_gpu_only  # type: ignore[method-assign]
    made = bench.backend(world, PLAIN.problem, "fp16", dla=0)

    y = made.forward(PLAIN.x, PLAIN.weight, None)

    assert relative_error(y, gradients(PLAIN)[0]) <= TOLERANCE["fp16"]
    assert ["cannot refit there" in note for note in made.notes] == [True]
    assert dla.CORES._used[0] == 0
