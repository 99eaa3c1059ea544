"""Calibration tables of TensorRT's: read, kept, and beside our own scales."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from trt_cases import CPU, images, network, put
from trt_world import World

from narrowgauge_contract.errors import DataCorruptError, NotApplicableError
from narrowgauge_lab.engines import EngineCache, Preparation
from narrowgauge_lab.engines.tensorrt import engine as engine_module
from narrowgauge_lab.engines.tensorrt.onnx_nodes import node_inputs
from narrowgauge_lab.engines.tensorrt.tables import read_table, scales_of_layers
from narrowgauge_lab.quant.calibration import QuantConfig
from narrowgauge_lab.quant.comparison import SYMMETRIC, Comparison, compare
from narrowgauge_lab.quant.qdq import export_float
from narrowgauge_lab.quant.trt import TensorRT


def _table(scales: Dict[str, float]) -> bytes:
    """As TensorRT writes it."""
    lines = [f"{name}: {struct.pack('>f', scale).hex()}" for name, scale in scales.items()]
    return "\n".join(["TRT-8601-EntropyCalibration2", *lines, ""]).encode()


def _file() -> bytes:
    return export_float(network(), torch.zeros(1, 3, 8, 8))


def _tensors() -> Dict[str, str]:
    """Layer -> what it reads in the ONNX file."""
    return {
        layer: next(reads[0] for reads in node_inputs(_file()) if f"{layer}.weight" in reads)
        for layer in ("0", "3")
    }


def _engine(world: World, monkeypatch: Any) -> Any:
    """With files that are real ones: what layers read is found in them."""
    engine = put(world, monkeypatch)
    monkeypatch.setattr(engine_module, "_onnx", lambda *_: _file())
    return engine


def _compared(world: World, monkeypatch: Any, config: QuantConfig = SYMMETRIC) -> Comparison:
    peer = TensorRT(_engine(world, monkeypatch), CPU)
    monkeypatch.setattr(peer, "missing", lambda: "")  # there is no GPU
    (found,) = compare(network(), [images(4), images(2)], config, [peer])
    return found


def test_a_table_is_read_to_the_bit() -> None:
    """The table in the README of NVIDIA's sampleINT8, in part; names and zeros as others have."""
    head = b"TRT-7000-EntropyCalibration2\n"
    table = head + b"data: 3c008912\nprob: 3c010a14\n366: 0\na: b_1: 3f800000\n"

    scales = read_table(table)

    assert scales["data"] == pytest.approx(0.00784518, rel=1e-5)
    assert scales["prob"] == pytest.approx(0.00787594, rel=1e-5)
    assert (scales["366"], scales["a: b_1"]) == (0.0, 1.0)
    assert read_table(_table({"x": 0.1}))["x"] == float(torch.tensor(0.1))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (b"", "first line"),
        (b"table", "first line is not TRT-"),
        (b"TRT-8\nx: 3c010a140", "8 digits are wanted"),
        (b"TRT-8\nx:", "8 digits are wanted"),
        (b"TRT-8\nx 3c010a14", "8 digits are wanted"),
        (b"TRT-8\nx: 3c010azz", "is no entry"),
        (b"TRT-8\nx: 7fc00000", "the scale of x is nan"),
        (b"TRT-8\nx: bf800000", "the scale of x is -1.0"),
        (b"\xff\xfe", "first line"),
    ],
)
def test_what_is_no_table_is_refused(table: bytes, said: str) -> None:
    with pytest.raises(DataCorruptError, match="no calibration table") as caught:
        read_table(table)

    assert said in caught.value.why


def test_layers_are_found_by_what_they_read() -> None:
    tensors = _tensors()
    table = _table({tensors["0"]: 0.5, tensors["3"]: 0.25, "output": 2.0})

    assert scales_of_layers(table, _file(), ["0", "3", "9"]) == {"0": 0.5, "3": 0.25}
    assert scales_of_layers(_table({tensors["3"]: 0.0}), _file(), ["0", "3"]) == {}


def test_its_scales_stand_beside_ours(monkeypatch: Any) -> None:
    world, tensors = World("8.6"), _tensors()
    world.table = _table({tensors["0"]: 0.005})
    found = _compared(world, monkeypatch, QuantConfig(activation_symmetric=True))

    (first, weight, second, _) = found.pairs
    assert (found.tool, found.version) == ("tensorrt", world.trt.__version__)
    assert first.theirs is not None
    assert (first.layer, first.tensor, first.theirs.method) == ("0", "input", "minmax")
    assert float(first.theirs.scale) == pytest.approx(0.005)
    assert float(first.theirs.amax) == pytest.approx(0.635)
    x = images(4)
    assert torch.equal(first.theirs.codes, (x / torch.tensor(0.005)).round().clamp(-128, 127).int())
    # Images reach 1, so that it saturates them where ours does not.
    assert first.steps_off > 10
    assert "does not say how" in weight.skipped
    assert "no entry for what this layer reads" in second.skipped
    base = world.trt.IInt8MinMaxCalibrator
    (calibrator,) = world.made("IBuilderConfig.int8_calibrator=")
    assert isinstance(calibrator["value"], base)


@pytest.mark.parametrize(
    ("version", "config", "said"),
    [
        ("11.4", SYMMETRIC, "has no calibrators for this: "),
        ("8.6", QuantConfig(activation_symmetric=True, activation_observer="mse"), "like mse"),
        ("8.6", QuantConfig(activation_symmetric=True, activation_bits=4), "like 4 bits"),
    ],
)
def test_what_it_does_not_choose_is_skipped(
    version: str, config: QuantConfig, said: str, monkeypatch: Any
) -> None:
    found = _compared(World(version), monkeypatch, config)

    assert all(pair.theirs is None for pair in found.pairs)
    assert [said in pair.skipped for pair in found.pairs] == [True, False, True, False]


def test_by_qdq_there_are_no_scales_of_its_own(monkeypatch: Any) -> None:
    engine = _engine(World("8.6"), monkeypatch)
    wanted = Preparation("int8", CPU, (images(4),), options={"int8": "qdq"})

    with pytest.raises(NotApplicableError, match="finds no scales here"):
        engine.calibration_scales(network(), images(2), wanted)


def test_a_table_is_kept_for_the_next_time(tmp_path: Path, monkeypatch: Any) -> None:
    world, tensors = World("8.6"), _tensors()
    world.table = _table({tensors["3"]: 0.125})
    engine = _engine(world, monkeypatch)
    wanted = Preparation(
        "int8", CPU, (images(4),), cache=EngineCache(tmp_path), options={"int8": "entropy"}
    )

    scales = [engine.calibration_scales(network(), images(2), wanted) for _ in range(2)]

    assert scales == [{"3": 0.125}] * 2
    assert len(world.made("Builder.build_serialized_network")) == 1
    # The engine itself is calibrated by that table, too.
    seen = len(world.images_seen)
    engine.prepare(network(), images(2), wanted)
    assert len(world.images_seen) == seen
