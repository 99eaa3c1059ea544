"""int8 by TensorRT: calibrators that see every image, and Q/DQ where calibrators are gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trt_cases import CPU, VERSIONS, images, network, prepare, put
from trt_world import World

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab import engines
from narrowgauge_lab.errors import CalibrationError

WEAK = [version for version in VERSIONS if not version.startswith("11")]


@pytest.mark.parametrize("kind", ["entropy", "minmax"])
@pytest.mark.parametrize("version", WEAK)
def test_calibrators_see_every_image_once(version: str, kind: str, monkeypatch: Any) -> None:
    world = World(version)
    given = (images(3), images(1), images(2))

    prepare(put(world, monkeypatch), "int8", batches=(1, 4, 4), calibration=given, int8=kind)

    base = {"entropy": "IInt8EntropyCalibrator2", "minmax": "IInt8MinMaxCalibrator"}[kind]
    (calibrator,) = world.made("IBuilderConfig.int8_calibrator=")
    assert isinstance(calibrator["value"], getattr(world.trt, base))
    # The largest batch up to the best one that leaves no image over.
    assert calibrator["value"].get_batch_size() == 3
    seen = torch.cat([torch.from_numpy(each) for each in world.images_seen])
    assert torch.equal(seen, torch.cat(given).flatten())
    shape = world.made("IOptimizationProfile.set_shape")[1]
    assert shape["min"] == shape["opt"] == shape["max"] == (3, 3, 8, 8)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ((torch.zeros(0, 3, 8, 8),), "nothing to calibrate on"),
        ((torch.zeros(2, 3, 9, 9),), "calibration batch 0 is"),
        ((torch.full((2, 3, 8, 8), float("nan")),), "not finite"),
    ],
)
def test_images_that_cannot_calibrate_are_refused(given: Any, match: str, monkeypatch: Any) -> None:
    with pytest.raises(CalibrationError, match=match):
        prepare(put(World("8.6"), monkeypatch), "int8", calibration=given)


def test_no_images_are_a_calibration_error(monkeypatch: Any) -> None:
    engine = put(World("8.6"), monkeypatch)

    with pytest.raises(CalibrationError, match="nothing to calibrate on"):
        engine.prepare(network(), images(2), engines.Preparation("int8", CPU))


def test_an_error_inside_the_calibrator_is_not_lost(monkeypatch: Any) -> None:
    """TensorRT prints it and builds from the images so far."""
    world = World("8.4")
    batch = images(4)
    engine = put(world, monkeypatch)

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "to", fails)
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        prepare(engine, "int8", calibration=(batch,))


def test_where_calibrators_are_gone_int8_is_qdq(monkeypatch: Any) -> None:
    world = World("11.4")
    engine = put(world, monkeypatch)
    files = []
    monkeypatch.setattr(
        "narrowgauge_lab.engines.tensorrt.engine._onnx",
        lambda *given: files.append(given[-1].file) or b"a network",
    )

    prepare(engine, "int8")

    assert files == ["int8"]
    with pytest.raises(NotApplicableError, match="no calibrators"):
        prepare(engine, "int8", int8="entropy")


def test_mixed_lets_the_rest_of_int8_be_fp16(monkeypatch: Any) -> None:
    world = World("8.6")
    engine = put(world, monkeypatch)

    prepare(engine, "int8", mixed=True)

    assert world.flags() == {"INT8", "FP16"}
    with pytest.raises(BadValueError, match="mixed"):
        prepare(engine, "fp16", mixed=True)
