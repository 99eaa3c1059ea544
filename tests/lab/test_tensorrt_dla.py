"""Networks on a DLA: what goes there, what the GPU keeps, and what a core has room for."""

from __future__ import annotations

import threading
from typing import Any, Iterator, List

import pytest
import torch
from trt_cases import VERSIONS, images, prepare, put, sums
from trt_world import LayerRow, World

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.tensorrt import dla
from narrowgauge_lab.engines.tensorrt.bundle import Built
from narrowgauge_lab.engines.tensorrt.dla import Layer, place
from narrowgauge_lab.engines.tensorrt.inspector import count_loadables, layer_facts

ONE = (2, 2, 2)


@pytest.fixture(autouse=True)
def empty_cores() -> Iterator[None]:
    before = dict(dla.CORES._used)
    yield
    dla.CORES._used.clear()
    dla.CORES._used.update(before)


def world_with_dla(version: str = "8.4", takes: Any = ("conv1", "relu1")) -> World:
    world = World(version)
    world.dla_cores, world.dla_takes = 2, set(takes)
    return world


@pytest.mark.parametrize("version", [each for each in VERSIONS if not each.startswith("11")])
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_what_a_dla_takes_goes_there_and_the_rest_is_named(
    version: str, precision: str, monkeypatch: Any
) -> None:
    world = world_with_dla(version)

    runner = prepare(put(world, monkeypatch), precision, batches=ONE, dla=1)

    assert world.flags() >= {"FP16", "GPU_FALLBACK"}
    assert world.made("IBuilderConfig.DLA_core=") == [{"value": 1}]
    (device,) = world.made("IBuilderConfig.default_device_type=")
    assert device["value"].name == "DLA"
    (moved,) = world.made("IBuilderConfig.set_device_type")
    assert (moved["layer"].name, moved["device_type"].name) == ("fc", "GPU")
    assert world.made("Runtime.DLA_core=") == [{"value": 1}]
    assert runner.notes == (
        "DLA core 1 runs 2 layers in 1 loadables, the GPU 1",
        "on the GPU because a DLA cannot run it: fc",
    )
    facts = {fact.layer: fact.provider for fact in runner.layers()}
    assert facts["fc"] == "tensorrt, GPU because a DLA cannot run it"
    x = images(2, precision)
    assert torch.allclose(runner(x).double(), sums(x), rtol=1e-2)


def test_a_strongly_typed_dla_engine_sets_no_precision(monkeypatch: Any) -> None:
    world = world_with_dla("11.4")
    world.file_type = "HALF"

    prepare(put(world, monkeypatch), "fp16", batches=ONE, dla=0)

    assert world.flags() == {"GPU_FALLBACK"}


def test_what_a_dla_cannot_be_asked_for(monkeypatch: Any) -> None:
    engine = put(world_with_dla(), monkeypatch)

    with pytest.raises(NotApplicableError, match="fp16 and int8, not fp32"):
        prepare(engine, "fp32", batches=ONE, dla=0)
    with pytest.raises(NotApplicableError, match="one batch size, not 1 to 4"):
        prepare(engine, "fp16", batches=(1, 2, 4), dla=0)
    with pytest.raises(NotApplicableError, match="no DLA core 2 here"):
        prepare(engine, "fp16", batches=ONE, dla=2)
    with pytest.raises(NotApplicableError, match="no layer of this network"):
        prepare(put(world_with_dla(takes=()), monkeypatch), "fp16", batches=ONE, dla=0)


def test_a_core_holds_sixteen_loadables_of_all_engines(monkeypatch: Any) -> None:
    engine = put(world_with_dla(), monkeypatch)
    runners = [prepare(engine, "fp16", batches=ONE, dla=0) for _ in range(16)]

    with pytest.raises(NotApplicableError, match="core 0 has no room") as caught:
        prepare(engine, "fp16", batches=ONE, dla=0)
    assert "holds 16, and other engines of this process have 16" in caught.value.why
    other = prepare(engine, "fp16", batches=ONE, dla=1)
    runners.pop().close()
    again = prepare(engine, "fp16", batches=ONE, dla=0)
    for runner in (*runners, other, again):
        runner.close()
    assert set(dla.CORES._used.values()) == {0}


def test_an_engine_that_fails_to_load_gives_its_room_back(monkeypatch: Any) -> None:
    world = world_with_dla()
    engine = put(world, monkeypatch)
    world.Runtime_deserialize_cuda_engine = lambda *_, **__: None  # type: ignore[method-assign]

    with pytest.raises(Exception, match="cannot load"):
        prepare(engine, "fp16", batches=ONE, dla=0)
    assert dla.CORES._used[0] == 0


def chain(count: int) -> List[LayerRow]:
    """DLA layers with a layer between any two that a DLA cannot run."""
    rows: List[LayerRow] = []
    for n in range(count):
        rows.append((f"conv{n}", "CONVOLUTION", [f"t{n}"], [f"u{n}"]))
        rows.append((f"odd{n}", "SOFTMAX", [f"u{n}"], [f"t{n + 1}"]))
    return rows


def test_more_pieces_than_sixteen_are_cut_down_and_that_is_said(monkeypatch: Any) -> None:
    world = world_with_dla(takes=[f"conv{n}" for n in range(20)])
    world.layers = chain(20)

    runner = prepare(put(world, monkeypatch), "fp16", batches=ONE, dla=0)

    assert runner.notes[0] == "DLA core 0 runs 16 layers in 16 loadables, the GPU 24"
    crowded = next(note for note in runner.notes if "a core holds 16" in note)
    assert crowded.count("conv") == 4


def test_a_gpu_and_two_dlas_run_at_once_each_in_a_thread(monkeypatch: Any) -> None:
    engine = put(world_with_dla(), monkeypatch)
    runners = [prepare(engine, "fp16", batches=ONE, dla=core) for core in (-1, 0, 1)]
    gate, results = threading.Barrier(3), {}

    def work(number: int) -> None:
        x = images(2, "fp16") * (number + 1)
        gate.wait(120)
        wanted = sums(x).float()
        results[number] = all(torch.allclose(runners[number](x), wanted) for _ in range(20))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {0: True, 1: True, 2: True}
    for runner in runners:
        runner.close()


def layers(*rows: Any) -> List[Layer]:
    return [Layer(name, kind, tuple(reads), tuple(writes), takes)
            for name, kind, reads, writes, takes in rows]  # fmt: skip


def test_neighbours_are_one_piece_and_the_lightest_goes_first() -> None:
    found = place(
        layers(
            ("a", "CONVOLUTION", "x", "b", True), ("b", "ACTIVATION", "b", "c", True),
            ("s", "SOFTMAX", "c", "d", False), ("e", "ACTIVATION", "d", "f", True),
            ("t", "SOFTMAX", "f", "g", False), ("h", "CONVOLUTION", "g", "i", True),
        ),
        limit=2,
    )  # fmt: skip

    assert found.on_dla == ("a", "b", "h")
    assert found.loadables == 2
    assert [name for name, _ in found.fallback] == ["s", "e", "t"]


def test_a_skip_around_the_gpu_is_no_connection() -> None:
    """`sum` reads `a` directly and through the GPU: one loadable of both would wait for itself."""
    rows = layers(
        ("a", "CONVOLUTION", ["x"], ["a"], True), ("soft", "SOFTMAX", ["a"], ["s"], False),
        ("sum", "ELEMENTWISE", ["a", "s"], ["y"], True),
    )  # fmt: skip

    assert place(rows).loadables == 2


def test_constants_and_sizes_are_no_work() -> None:
    rows = layers(
        ("one", "CONSTANT", [], ["k"], False), ("size", "SHAPE", ["x"], ["n"], False),
        ("a", "CONVOLUTION", ["x", "k"], ["y"], True),
    )  # fmt: skip

    found = place(rows)

    assert (found.fallback, found.loadables) == ((), 1)


def test_the_inspector_tells_what_runs_where() -> None:
    text = """{"Layers": [
      {"Name": "{ForeignNode[conv1...relu9]}", "LayerType": "DLA",
       "Inputs": [{"Format/Datatype": "DLA linear FP16 format"}]},
      {"Name": "fc + softmax", "LayerType": "CaskGemm", "TacticName": "sm87_xmma_tf32",
       "Weights": {"Type": "Half", "Count": 9}}], "Bindings": ["input"]}"""
    built = Built(b"", fallback=(("softmax", "a DLA cannot run it"),))

    first, second = layer_facts(text, built, 1)

    assert (first.provider, first.precision) == ("tensorrt, DLA core 1", "fp16")
    assert second.provider == "tensorrt, GPU because a DLA cannot run it"
    assert (second.precision, second.kernel) == ("fp16", "sm87_xmma_tf32")
    assert count_loadables(text) == 1


@pytest.mark.parametrize(
    ("layer", "precision"),
    [
        ('{"Weights": {"Type": "Int8", "Count": 8}, "Inputs": [{"DataType": "Float"}]}', "int8"),
        ('{"Weights": {"Type": "Int8", "Count": 0}, "Inputs": [{"DataType": "Half"}]}', "fp16"),
        ('{"Inputs": [{"Format/Datatype": "Row major linear FP32"}]}', "fp32"),
        ('{"Inputs": [{"Format/Datatype": "Float"}], "TacticName": "x_f32f32_tf32f32"}', "tf32"),
        ('{"Inputs": [{"Format": "NHWC8", "DataType": "BFloat16"}]}', "bf16"),
        ('{"Inputs": [{"Format/Datatype": "N/A due to dynamic shapes"}]}', ""),
        ('{"Inputs": [], "Outputs": [{"DataType": "FP8"}]}', "fp8"),
        ('"conv1 + relu1"', ""),
    ],
)
def test_precisions_of_all_versions_inspectors(layer: str, precision: str) -> None:
    (fact,) = layer_facts(f'{{"Layers": [{layer}]}}', Built(b""), -1)

    assert fact.precision == precision
