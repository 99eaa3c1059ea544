"""Engines, timings and calibration tables that TensorRT's adapter keeps, and those that it cannot
use."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from trt_cases import images, network, prepare, put, sums
from trt_world import World

from narrowgauge_lab.engines import cache, keys
from narrowgauge_lab.engines.tensorrt.bundle import Built, pack, unpack
from narrowgauge_lab.errors import OutOfMemoryError

BUILD = "Builder.build_serialized_network"


def test_a_kept_engine_is_used(tmp_path: Path, monkeypatch: Any) -> None:
    world = World("10.3")
    engine = put(world, monkeypatch)

    first = prepare(engine, cache=tmp_path)
    second = prepare(engine, cache=tmp_path)

    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.cache_key == second.cache_key != ""
    assert len(world.made(BUILD)) == 1
    assert torch.allclose(second(images(2)).double(), sums(images(2)))
    assert second.layers() == first.layers()


@pytest.mark.parametrize(
    "changed",
    [{"batches": (1, 2, 8)}, {"workspace_mb": 5}, {"precision": "fp16"}, {"model": "other"}],
)
def test_another_question_is_another_engine(changed: Any, tmp_path: Path, monkeypatch: Any) -> None:
    world = World("10.3")
    engine = put(world, monkeypatch)
    prepare(engine, cache=tmp_path)
    if "model" in changed:
        changed = {"model": network()}
        with torch.no_grad():
            changed["model"][0].weight.mul_(2)

    assert not prepare(engine, cache=tmp_path, **changed).from_cache


def test_a_damaged_engine_is_rebuilt_and_said(tmp_path: Path, monkeypatch: Any) -> None:
    world = World("8.6")
    engine = put(world, monkeypatch)
    prepare(engine, cache=tmp_path)
    (path,) = tmp_path.glob("tensorrt-[0-9a-f]*.engine")
    content = path.read_bytes()
    path.write_bytes(content[:-3] + b"xyz")

    again = prepare(engine, cache=tmp_path)

    assert not again.from_cache
    assert "rebuilt: the cached engine" in again.cache_note
    assert "was damaged" in again.cache_note
    assert path.read_bytes() == content
    assert torch.allclose(again(images(2)).double(), sums(images(2)))


def test_an_engine_that_tensorrt_cannot_load_is_rebuilt_and_said(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Whole, of the same key, and yet not for this library."""
    world = World("8.6")
    engine = put(world, monkeypatch)
    prepare(engine, cache=tmp_path)
    world.refuses_plans = 1

    again = prepare(engine, cache=tmp_path)

    assert not again.from_cache
    assert "cannot load the cached engine: Serialization Error" in again.cache_note


def test_memory_that_runs_out_over_a_kept_engine_is_no_damage(
    tmp_path: Path, monkeypatch: Any
) -> None:
    world = World("10.3")
    engine = put(world, monkeypatch)
    prepare(engine, cache=tmp_path)

    def none(runtime: Any, serialized_engine: Any) -> None:
        world._say(runtime._values["logger"], "Error Code 2: OutOfMemory (Requested size was 9")

    world.Runtime_deserialize_cuda_engine = none  # type: ignore[method-assign]
    with pytest.raises(OutOfMemoryError):
        prepare(engine, cache=tmp_path)
    assert len(world.made(BUILD)) == 1


@pytest.mark.parametrize(
    ("field", "value"), [("device", "another GPU"), ("driver", "999.1"), ("capability", "9.9")]
)
def test_an_engine_of_another_device_is_not_used_and_that_is_said(
    field: str, value: str, tmp_path: Path, monkeypatch: Any
) -> None:
    world = World("10.3")
    engine = put(world, monkeypatch)
    here = keys.device_fields(torch.device("cpu"))
    monkeypatch.setattr(keys, "device_fields", lambda _: {**here, field: value})
    prepare(engine, cache=tmp_path)
    monkeypatch.setattr(keys, "device_fields", lambda _: here)

    runner = prepare(engine, cache=tmp_path)

    assert not runner.from_cache
    assert f"made with another {field}: {value}" in runner.cache_note
    assert len(world.made(BUILD)) == 2


def test_an_engine_of_another_version_is_not_used_and_that_is_said(
    tmp_path: Path, monkeypatch: Any
) -> None:
    prepare(put(World("8.4"), monkeypatch), cache=tmp_path)

    runner = prepare(put(World("8.6"), monkeypatch), cache=tmp_path)

    assert not runner.from_cache
    assert "made with another version of tensorrt: 8.4.1.5, here 8.6.1" in runner.cache_note


def test_a_second_process_waits_for_the_first(tmp_path: Path, monkeypatch: Any) -> None:
    world = World("10.3")
    engine = put(world, monkeypatch)
    begun, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:

            def wait() -> None:
                os.write(begun[1], b"!")
                os.read(go[0], 1)

            world.before_build = wait
            status = 2 if prepare(engine, cache=tmp_path).from_cache else 0
        finally:
            os._exit(status)
    os.read(begun[0], 1)
    lock = cache.fcntl.flock

    def waiting(stream: Any, operation: int) -> None:
        if operation == cache.fcntl.LOCK_EX:  # asked for when it was found to be another's
            threading.Timer(0.1, os.write, (go[1], b"!")).start()
        lock(stream, operation)

    monkeypatch.setattr(cache.fcntl, "flock", waiting)

    runner = prepare(engine, cache=tmp_path)

    assert os.waitpid(child, 0)[1] == 0
    assert runner.from_cache
    assert runner.cache_note.startswith("built by another process, waited for ")
    assert world.made(BUILD) == []
    assert torch.allclose(runner(images(2)).double(), sums(images(2)))
    for end in (*begun, *go):
        os.close(end)


@pytest.mark.parametrize("version", ["8.4", "10.13", "11.4"])
def test_timings_are_kept_for_the_next_network(
    version: str, tmp_path: Path, monkeypatch: Any
) -> None:
    world = World(version)
    engine = put(world, monkeypatch)
    prepare(engine, cache=tmp_path)

    prepare(engine, cache=tmp_path, batches=(1, 1, 1))

    first, second = world.made("IBuilderConfig.create_timing_cache")
    assert first["serialized_timing_cache"] == b""
    assert second["serialized_timing_cache"].startswith(b"timings of")
    refused = [call["ignore_mismatch"] for call in world.made("IBuilderConfig.set_timing_cache")]
    assert refused == [False, False]


def test_timings_that_tensorrt_refuses_are_left_and_that_is_said(
    tmp_path: Path, monkeypatch: Any
) -> None:
    world = World("10.3")
    engine = put(world, monkeypatch)
    prepare(engine, cache=tmp_path)
    world._timings = lambda: b"other timings:"  # type: ignore[method-assign]

    runner = prepare(engine, cache=tmp_path, batches=(1, 1, 1))

    assert "not used: the timing cache is of another TensorRT or device" in runner.notes


def test_no_timing_cache_where_none_is_wanted(tmp_path: Path, monkeypatch: Any) -> None:
    world = World("10.3")

    prepare(put(world, monkeypatch), cache=tmp_path, timing_cache=False)

    assert world.made("IBuilderConfig.create_timing_cache") == []


@pytest.mark.parametrize("version", ["8.4", "10.16"])
def test_a_calibration_table_saves_the_next_calibration(
    version: str, tmp_path: Path, monkeypatch: Any
) -> None:
    world = World(version)
    engine = put(world, monkeypatch)
    prepare(engine, "int8", cache=tmp_path)
    seen = len(world.images_seen)
    assert seen > 0

    prepare(engine, "int8", cache=tmp_path, workspace_mb=7)  # another engine, the same scales
    assert len(world.images_seen) == seen
    prepare(engine, "int8", cache=tmp_path, calibration=(images(3),))
    assert len(world.images_seen) > seen


def test_a_bundle_is_what_was_packed_or_nothing() -> None:
    built = Built(b"plan\nwith lines", (("a", "CONVOLUTION"),), ("a",), (("b", "why"),), 2, ("n",))

    assert unpack(pack(built)) == built
    for damaged in (b"", b"x" + pack(built), pack(built)[:-1], pack(built).replace(b"[", b"(")):
        assert unpack(damaged) is None
