"""The stand-in for tensorrt: it refuses what its version has not."""

from __future__ import annotations

import pytest
import trt_fake
from trt_world import World

from narrowgauge_lab.engines.tensorrt import library


def test_the_stand_in_refuses_what_is_not_there() -> None:
    old, new = World("8.4").trt, World("11.4").trt
    said = library.make_logger(old)

    with pytest.raises(TypeError, match="incompatible function arguments"):
        old.Builder(said, 3)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        old.Builder(log=said)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        old.Builder("no logger")
    with pytest.raises(TypeError, match="No constructor"):
        old.IBuilderConfig()
    config = old.Builder(said).create_builder_config()
    with pytest.raises(AttributeError, match="no attribute workspace"):
        config.workspace = 3
    with pytest.raises(AttributeError, match="can't set"):
        config.num_optimization_profiles = 3
    with pytest.raises(TypeError, match="incompatible"):
        config.set_flag("FP16")
    assert not hasattr(old.IExecutionContext, "execute_async_v3")
    assert not hasattr(new.BuilderFlag, "FP16")
    assert not hasattr(new, "IInt8EntropyCalibrator2")


def test_the_stand_in_refuses_a_derived_class_without_its_base() -> None:
    trt = World("8.6").trt

    class Careless(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match="must be called"):
        Careless()


def test_signatures_are_read_as_pybind11_writes_them() -> None:
    read = trt_fake.parse_signature(
        "create(self: Builder, flags: int = 0, rest: List[Tuple[int, str]]) -> IBuilderConfig"
    )

    assert [each.name for each in read.arguments] == ["flags", "rest"]
    assert [each.optional for each in read.arguments] == [True, False]
    assert read.result == "IBuilderConfig"
