"""Quantised networks by TensorRT, through its stand-in: what is built, on which images, and that an
answer outlives the next one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trt_cases import CPU, images, network, put, sums
from trt_world import World

from narrowgauge_lab.engines import tensorrt
from narrowgauge_lab.engines.errors import ShapeOutsideProfileError
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.quant import executors


@pytest.fixture
def world(monkeypatch: Any) -> World:
    """TensorRT 8.6, which calibrates by itself, as if a GPU were here."""
    found = World("8.6")
    engine = put(found, monkeypatch)
    monkeypatch.setattr(engine, "missing", lambda _device: "")
    monkeypatch.setattr(tensorrt, "ENGINE", engine)
    return found


def test_a_network_runs_as_int8_that_its_images_calibrated(world: World) -> None:
    executors.require_executor("tensorrt", 8, CPU)

    done = executors.by_tensorrt(network(), images(6), CPU, most=4)

    assert done.how == "TensorRT, int8"
    assert done.file_bytes is None
    assert world.flags() == {"INT8"}
    seen = torch.cat([torch.from_numpy(each) for each in world.images_seen])
    assert torch.equal(seen.reshape(-1, 3, 8, 8), images(6))
    for count in (1, 4):
        x = images(count)
        assert torch.allclose(done.forward(x).double(), sums(x), rtol=1e-3)
    with pytest.raises(ShapeOutsideProfileError):
        done.forward(images(5))


def test_an_answer_outlives_the_next_one(world: World) -> None:
    done = executors.by_tensorrt(network(), images(6), CPU, most=4)

    first = done.forward(images(2))
    kept = first.clone()
    done.forward(1 + images(2))

    assert torch.equal(first, kept)


def test_its_twin_is_float32_and_calibrated_on_nothing(world: World) -> None:
    done = executors.by_tensorrt(network(), images(6), CPU, most=4, precision="fp32")

    assert done.how == "TensorRT, fp32"
    assert world.flags() == set()
    assert world.images_seen == []
    assert torch.allclose(done.forward(images(3)).double(), sums(images(3)), rtol=1e-3)


def test_int8_without_images_is_refused(world: World) -> None:
    with pytest.raises(CalibrationError):
        executors.by_tensorrt(network(), images(6)[:0], CPU, most=4)
    assert world.made("Builder.build_serialized_network") == []
