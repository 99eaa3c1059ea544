"""The search for a tile: what is tried, what is stored, and what is read back."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import threading
import time

import pytest
import torch

from narrowgauge_kernels.errors import DiskFullError
from narrowgauge_kernels.sparse import ahead as ahead_module
from narrowgauge_kernels.sparse import tuning
from narrowgauge_kernels.sparse.ahead import Ahead
from narrowgauge_kernels.sparse.errors import DeviceError, SparseArgumentError
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant
from narrowgauge_kernels.sparse.tiles import candidates, default_tile
from narrowgauge_kernels.sparse.tuning import best_tile, faster_path, stored_tile, tune

SHAPE, VARIANT = Shape(1, 128, 14, 14, 32), Variant()
DEVICE = ("NVIDIA H200", "9.0")


@pytest.fixture
def env(tmp_path):
    return {"XDG_CACHE_HOME": str(tmp_path)}


def search(env, measure, shape=SHAPE, variant=VARIANT, seconds=60.0):
    return tune(shape, variant, None, seconds, 12, env, measure, DEVICE)


def like(wanted):
    """Microseconds that are least for one tile."""
    return lambda tile: 1.0 if tile == wanted else 2.0 + tile.rows


def test_the_fastest_is_stored_and_found_again(env):
    wanted = candidates(SHAPE, VARIANT, "9.0", 12)[7]
    found = search(env, like(wanted))
    assert found.trials[0].tile == wanted
    assert found.untried == 0
    assert [each.microseconds for each in found.trials] == sorted(
        each.microseconds for each in found.trials
    )
    assert best_tile(SHAPE, VARIANT, None, env, DEVICE) == wanted
    document = json.loads(found.stored.read_text())
    assert document["device"] == "NVIDIA H200"
    assert found.stored.name == "tiles-nvidia-h200-9.0.json"


def test_published_tiles_are_among_the_tried(env):
    tried = [trial.tile for trial in search(env, lambda tile: float(tile.rows)).trials]
    assert {Tile(2, 7, 4), Tile(2, 7, 2), Tile(3, 7, 4)} <= set(tried)


def test_other_shapes_variants_and_devices_have_their_own(env):
    wanted = candidates(SHAPE, VARIANT, "9.0", 12)[7]
    search(env, like(wanted))
    half = Variant("fp16")
    other = candidates(SHAPE, half, "9.0", 12)[3]
    search(env, like(other), variant=half)
    assert stored_tile(SHAPE, VARIANT, DEVICE, env) == wanted
    assert stored_tile(SHAPE, half, DEVICE, env) == other
    with_more = Variant(bias=True, relu_input=False, relu_output=True)
    assert stored_tile(SHAPE, with_more, DEVICE, env) == wanted
    assert stored_tile(Shape(2, 128, 14, 14, 32), VARIANT, DEVICE, env) is None
    assert stored_tile(SHAPE, VARIANT, ("NVIDIA H100", "9.0"), env) is None


def test_the_faster_path_is_the_one_that_was_measured_so(env):
    window, cores = Variant(path="window"), Variant("fp16", granularity="tensor-core")
    assert faster_path(SHAPE, VARIANT, None, env, DEVICE) == VARIANT
    search(env, lambda tile: 3.0 + tile.rows)
    assert faster_path(SHAPE, window, None, env, DEVICE) == VARIANT, "the only one known"
    search(env, lambda tile: 1.0 + tile.rows, variant=window)
    assert faster_path(SHAPE, VARIANT, None, env, DEVICE) == window
    biased = Variant(bias=True, relu_output=True)
    assert faster_path(SHAPE, biased, None, env, DEVICE).path == "window"
    assert faster_path(SHAPE, Variant(path="dense"), None, env, DEVICE).path == "dense"
    assert faster_path(SHAPE, cores, None, env, DEVICE) == cores


def test_without_a_stored_tile_the_estimate_chooses(env):
    assert best_tile(SHAPE, VARIANT, None, env, DEVICE) == default_tile(SHAPE, VARIANT, "9.0")


def test_searches_at_the_same_time_lose_nothing(env):
    """Each waits for the file that another is adding to."""
    path = search(env, lambda tile: 1.0).stored
    with path.with_suffix(".lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(
            target=search, args=(env, lambda tile: 1.0, SHAPE, Variant("fp16"))
        )
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert len(json.loads(path.read_text())["tiles"]) == 1
    thread.join(30)
    assert len(json.loads(path.read_text())["tiles"]) == 2


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "narrowgauge").write_text("no folder")
    with pytest.raises(DiskFullError, match="cannot be written"):
        search({"XDG_CACHE_HOME": str(tmp_path)}, lambda tile: 1.0)


def test_time_that_is_over_ends_the_search(env):
    found = search(env, lambda tile: 1.0, seconds=0.0)
    assert len(found.trials) == 1
    assert found.untried == 11


def test_sources_are_compiled_in_their_order_and_waited_for():
    done = []
    sources = [lambda number=number: f"source {number}" for number in range(5)]
    with Ahead(sources, "9.0", 1, lambda source, arch: done.append((source, arch))) as ahead:
        ahead.wait(3)
        assert done[:4] == [(f"source {number}", "9.0") for number in range(4)]


def test_what_is_not_begun_when_the_search_ends_is_never_compiled():
    entered, go_on, done = threading.Event(), threading.Event(), []

    def compile_(source, arch):
        entered.set()
        go_on.wait(10)
        done.append(source)

    with Ahead([lambda: "first", lambda: "second"], "9.0", 1, compile_):
        entered.wait(10)
        # On its way out it waits for what was begun, and for nothing else.
        threading.Timer(0.1, go_on.set).start()
    assert done == ["first"]


def test_while_it_is_still_nothing_is_made_or_begun():
    """A thread that makes sources keeps Python from the one that times, for milliseconds."""
    made, begun, go_on = [], [], threading.Event()

    def source(number):
        made.append(number)
        return f"source {number}"

    def compile_(text, arch):
        begun.append(text)
        go_on.wait(10)

    sources = [functools.partial(source, number) for number in range(4)]
    with Ahead(sources, "9.0", 2, compile_) as ahead:
        while len(begun) < 2:
            time.sleep(0.001)
        with ahead.still():
            go_on.set()
            ahead.wait(0)  # what was begun goes on
            ahead.wait(1)
            time.sleep(0.05)
            assert made == [0, 1]
        ahead.wait(3)
    assert sorted(made) == [0, 1, 2, 3]


def test_a_tile_is_timed_while_it_is_still(env, monkeypatch):
    """Else what others do in this process is between a replay and the event behind it."""
    held, locks = [], []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            held.append(locks[-1].locked())

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return 1.0

    class Watched(Ahead):
        def __init__(self, sources, arch):
            super().__init__([], arch)
            locks.append(self._lock)

        def wait(self, number):
            pass

    monkeypatch.setattr(tuning, "Ahead", Watched)
    monkeypatch.setattr(tuning, "Convolution", lambda *given: lambda *operands: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.delattr(torch.cuda, "CUDAGraph", raising=False)
    found = tune(SHAPE, VARIANT, torch.device("cpu", 0), 60.0, 2, env, None, DEVICE)
    assert found.trials[0].microseconds == 50.0
    assert held
    assert all(held)


def test_children_end_with_the_search(monkeypatch, tmp_path):
    """A compiler that would take an hour."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ahead_module.sys, "executable", str(slow_python(tmp_path)))
    with Ahead([lambda: "a", lambda: "b"], "9.0", 2) as ahead:
        while len(ahead._children) < 2:
            time.sleep(0.01)
    assert not ahead._children


def slow_python(folder):
    path = folder / "python"
    path.write_text("#!/bin/sh\nexec sleep 3600\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "content", ["no JSON", "[]", '{"format": 9, "tiles": {}}', '{"format": 1}', '{"tiles": {}}']
)
def test_a_damaged_file_is_an_error_that_names_it(env, content):
    path = search(env, lambda tile: 1.0).stored
    path.write_text(content)
    with pytest.raises(SparseArgumentError, match="not a file of tuned tiles") as caught:
        best_tile(SHAPE, VARIANT, None, env, DEVICE)
    assert caught.value.next_step == f"remove {path}"


@pytest.mark.parametrize("tile", [{}, {"rows": 4}, {"rows": 0, "columns": 1, "channels": 1}, 3])
def test_a_stored_tile_that_is_none_is_an_error(env, tile):
    path = search(env, lambda tile: 1.0).stored
    document = json.loads(path.read_text())
    for entry in document["tiles"].values():
        entry["tile"] = tile
    path.write_text(json.dumps(document))
    with pytest.raises(SparseArgumentError, match="not a file of tuned tiles"):
        best_tile(SHAPE, VARIANT, None, env, DEVICE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_tuning_says_so(env):
    with pytest.raises(DeviceError, match="torch sees no CUDA device to tune on"):
        tune(SHAPE, VARIANT, env=env)
