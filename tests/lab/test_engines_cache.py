"""Engines kept: damage, other machines, two processes, disks without room, folders closed to us."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any, List

import pytest
import torch
from engine_cases import CPU, images, network
from torch import nn

from narrowgauge_contract.errors import ExitCode
from narrowgauge_lab.engines import EngineCache, Preparation
from narrowgauge_lab.engines import cache as cache_module
from narrowgauge_lab.engines.errors import EngineCacheError
from narrowgauge_lab.engines.keys import CacheKey, cache_key, content_hash, model_hash
from narrowgauge_lab.forking import fork

KEY = CacheKey(
    {"engine": "toy", "network": "n", "weights": "w"},
    {"device": "NVIDIA H200", "driver": "580.65", "version of torch": "2.11", "source": "s"},
)


def elsewhere(**fields: str) -> CacheKey:
    return dataclasses.replace(KEY, here={**KEY.here, **fields})


def never() -> bytes:
    raise AssertionError("it was kept, and must not be built")


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / "engines")


def test_what_was_built_is_read_the_next_time(cache: EngineCache) -> None:
    payload = os.urandom(100_000) + b"\n{}\n"
    first = cache.fetch(KEY, lambda: payload)
    assert (first.payload, first.from_cache, first.note) == (payload, False, "")
    again = EngineCache(cache.folder).fetch(KEY, never)
    assert (again.payload, again.from_cache, again.note) == (payload, True, "")
    assert first.key == again.key == KEY.digest


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut, "it has 9 of 10 bytes"),
        (_flip, "sha256"),
        (lambda data: b"", "does not begin as one"),
        (lambda data: data[:40], "header cannot be read"),
        (lambda data: data.replace(b'"bytes"', b'"bites"'), "header cannot be read"),
        (lambda data: b"narrowgauge engine 1\n[]\n" + data, "header cannot be read"),
        (lambda data: b"narrowgauge engine 1\n\xff\n", "header cannot be read"),
    ],
    ids=["cut", "flipped bit", "emptied", "torn header", "renamed field", "a list", "no text"],
)
def test_a_damaged_engine_is_rebuilt_and_it_is_said(cache: EngineCache, damage, said) -> None:
    cache.put(KEY, b"0123456789")
    path = cache.path(KEY)
    path.write_bytes(damage(path.read_bytes()))
    got = cache.fetch(KEY, lambda: b"new")
    assert (got.payload, got.from_cache) == (b"new", False)
    assert got.note.startswith("rebuilt: the cached engine toy-")
    assert said in got.note
    assert cache.fetch(KEY, never).payload == b"new"


def test_another_engine_under_the_same_name_is_not_used(cache: EngineCache) -> None:
    cache.put(elsewhere(driver="1"), b"other")
    os.replace(cache.path(elsewhere(driver="1")), cache.path(KEY))
    got = cache.fetch(KEY, lambda: b"mine")
    assert got.payload == b"mine"
    assert "another engine under this name" in got.note


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", "NVIDIA A100"), ("driver", "550.1"), ("version of torch", "2.9")],
)
def test_an_engine_from_elsewhere_is_not_used_and_the_difference_is_said(
    cache: EngineCache, field: str, value: str
) -> None:
    cache.put(elsewhere(**{field: value}), b"theirs")
    got = cache.fetch(KEY, lambda: b"ours")
    assert (got.payload, got.from_cache) == (b"ours", False)
    assert got.note.startswith("not used: toy-")
    assert f"made with another {field}: {value}, here {KEY.here[field]}" in got.note


def test_the_nearest_engine_is_told_of_and_other_questions_are_not(cache: EngineCache) -> None:
    cache.put(elsewhere(device="NVIDIA A100", driver="550.1"), b"far")
    cache.put(elsewhere(driver="550.1"), b"near")
    assert "another driver: 550.1" in cache.fetch(KEY, lambda: b"ours").note
    asked = dataclasses.replace(KEY, asked={**KEY.asked, "weights": "others"})
    assert cache.fetch(asked, lambda: b"a question of its own").note == ""
    # Under another torch the network's code may read otherwise; its weights say that it is the one.
    newer = CacheKey({**KEY.asked, "network": "m"}, {**KEY.here, "version of torch": "2.13"})
    assert "version of torch: 2.11, here 2.13" in cache.fetch(newer, lambda: b"x").note


def test_an_engine_that_its_library_refuses_is_rebuilt(cache: EngineCache) -> None:
    cache.put(KEY, b"stale")
    got = cache.fetch(KEY, lambda: b"fresh", lambda payload: "serialised by 8.6")
    assert (got.payload, got.from_cache, got.note) == (
        b"fresh",
        False,
        "rebuilt: serialised by 8.6",
    )
    assert cache.fetch(KEY, never, lambda payload: "").payload == b"fresh"


def test_of_two_processes_one_builds_and_the_other_waits_and_reads(
    cache: EngineCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, go = os.pipe(), os.pipe()
    child = fork()
    if child == 0:
        status = 1
        try:

            def slowly() -> bytes:
                os.close(go[1])  # so that a test that fails lets it end
                os.write(ready[1], b"!")
                os.read(go[0], 1)
                return b"the child's"

            status = 0 if not cache.fetch(KEY, slowly).from_cache else 2
        finally:
            os._exit(status)
    os.read(ready[0], 1)
    lock, waits = fcntl.flock, threading.Event()

    def waiting(stream: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX:  # asked for when it was found to be another's
            waits.set()
        lock(stream, operation)

    monkeypatch.setattr(cache_module.fcntl, "flock", waiting)
    found: List[Any] = []
    waiter = threading.Thread(target=lambda: found.append(cache.fetch(KEY, never)), daemon=True)
    waiter.start()
    assert waits.wait(60)
    time.sleep(0.05)
    assert not found  # the child has not built yet
    os.write(go[1], b"!")
    waiter.join(60)
    assert os.waitpid(child, 0)[1] == 0
    (got,) = found
    assert (got.payload, got.from_cache) == (b"the child's", True)
    assert got.note.startswith("built by another process, waited for ")
    for end in (*ready, *go):
        os.close(end)


def test_a_builder_that_dies_leaves_the_lock_and_its_unfinished_file(cache: EngineCache) -> None:
    cache.folder.mkdir()
    torn = cache.folder / f"{cache.path(KEY).name}.99999.part"
    torn.write_bytes(b"half")
    child = fork()
    if child == 0:
        cache.fetch(KEY, lambda: os._exit(9))  # type: ignore[arg-type]
    os.waitpid(child, 0)
    got = cache.fetch(KEY, lambda: b"ours")
    assert (got.payload, got.note) == (b"ours", "")
    assert not torn.exists()
    assert sorted(p.suffix for p in cache.folder.iterdir()) == [".engine", ".lock"]


def test_a_failed_build_keeps_nothing_and_frees_the_lock(cache: EngineCache) -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        cache.fetch(KEY, _fails)
    assert cache.fetch(KEY, lambda: b"ok").payload == b"ok"


def _fails() -> bytes:
    raise RuntimeError("no kernel")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_costs_the_keeping_not_the_engine(
    cache: EngineCache, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module.os, call, full)
    got = cache.fetch(KEY, lambda: b"engine")
    assert (got.payload, got.from_cache) == (b"engine", False)
    assert got.note == f"not kept: no room left in {cache.folder}; free some space there"
    monkeypatch.undo()
    assert cache.get(KEY).payload is None
    assert not list(cache.folder.glob("*.part"))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_closed_to_us_is_read_and_not_written(cache: EngineCache) -> None:
    cache.put(KEY, b"theirs")
    os.chmod(cache.folder, 0o500)
    try:
        assert cache.fetch(KEY, never).payload == b"theirs"
        got = cache.fetch(elsewhere(driver="1"), lambda: b"ours")
    finally:
        os.chmod(cache.folder, 0o700)
    assert got.payload == b"ours"
    assert "not kept: cannot write to" in got.note


def test_a_folder_that_cannot_be_opened_for_writing(
    cache: EngineCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for whoever may write anywhere, by the lock file's error."""
    cache.put(KEY, b"theirs")

    def closed(path: Any, mode: str = "r", **_: Any) -> Any:
        if "a" in mode or "w" in mode:
            raise OSError(errno.EROFS, "Read-only file system")
        return open(path, mode)

    monkeypatch.setattr(cache_module, "open", closed, raising=False)
    assert cache.fetch(KEY, never).payload == b"theirs"
    got = cache.fetch(elsewhere(driver="1"), lambda: b"ours")
    assert got.payload == b"ours"
    assert "Read-only file system; give a folder that can be written" in got.note
    assert "another driver" in got.note


def test_a_file_system_without_locks_is_said(
    cache: EngineCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache_module.fcntl, "flock", none)
    got = cache.fetch(KEY, lambda: b"ours")
    assert "its file system has no locks" in got.note


@pytest.mark.parametrize("below", ["", "further"])
def test_a_file_is_no_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    cache = EngineCache(tmp_path / "file" / below if below else tmp_path / "file")
    with pytest.raises(EngineCacheError, match="is no folder to keep engines in") as caught:
        cache.fetch(KEY, never)
    assert caught.value.next_step
    assert caught.value.exit_code == ExitCode.RESULTS_UNWRITABLE


# ---- what a key depends on ------------------------------------------------------------------


def key_of(**changes: Any) -> CacheKey:
    given = {
        "engine": "toy", "versions": {"toy": "1"}, "model": network("residual"),
        "example": images(2), "wanted": Preparation("fp32", CPU), "options": {"a": 1}, **changes,
    }  # fmt: skip
    return cache_key(**given)


def _another_weight() -> nn.Module:
    model = network("residual")
    with torch.no_grad():
        model.fc.bias[3] += 1e-6
    return model


def _another_statistic() -> nn.Module:
    model = network("residual")
    model.bn.running_var[0] *= 2
    return model


def _another_stride() -> nn.Module:
    model = network("concatenated")
    model.pool.ceil_mode = False  # which AvgPool2d does not print
    return model


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine": "tin"}, "engine"),
        ({"versions": {"toy": "2"}}, "version of toy"),
        ({"model": _another_weight()}, "weights"),
        ({"model": _another_statistic()}, "weights"),
        ({"example": images(3)}, "example"),
        ({"example": images(2).double()}, "example"),
        ({"options": {"a": 2}}, "options"),
        ({"wanted": Preparation("fp32", CPU, batches=(1, 2, 3))}, "batches"),
        ({"wanted": Preparation("int8", CPU)}, "precision"),
        ({"wanted": Preparation("fp32", CPU, (images(1),))}, "calibration"),
    ],
)
def test_each_thing_that_matters_makes_another_key(changes, field) -> None:
    one, other = key_of(), key_of(**changes)
    assert one.digest != other.digest
    fields = {**one.asked, **one.here}
    differing = [n for n, v in {**other.asked, **other.here}.items() if fields.get(n) != v]
    assert differing == [field]


def test_the_same_question_has_the_same_key() -> None:
    assert key_of().digest == key_of().digest
    model = network("residual")
    model.to(memory_format=torch.channels_last)
    assert key_of(model=model).digest == key_of().digest


def test_a_networks_code_counts_and_attributes_that_are_not_printed() -> None:
    assert model_hash(network("concatenated")) != model_hash(_another_stride())

    def tanh(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(self.average(self.conv(x)).flatten(1)))

    one, other = network("residual"), network("residual")
    other.__class__ = type("Residual", (type(other),), {"forward": tanh})
    other.__class__.__module__ = type(one).__module__
    assert model_hash(one) != model_hash(other)


def test_contents_are_hashed_whole_whatever_their_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge_lab.engines import keys

    monkeypatch.setattr(keys, "_PIECE", 64)
    x = torch.arange(1000.0)
    base = content_hash([("x", x)])
    for index in (0, 15, 16, 999):
        changed = x.clone()
        changed[index] += 1
        assert content_hash([("x", changed)]) != base
    assert content_hash([("y", x)]) != base
    assert content_hash([("x", x.reshape(10, 100))]) != base
    assert content_hash([("x", torch.empty(0))]) != content_hash([("x", torch.empty(0, 2))])
    assert content_hash([("x", x.bfloat16())]) == content_hash([("x", x.bfloat16().clone())])
