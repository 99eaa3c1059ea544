"""Host memory, copies aside, and what happens where page-locked memory runs out; on a CPU that
pretends to page-lock, since who locks is asked through the doors that these tests hold."""

from __future__ import annotations

import math
import types
from typing import Any, List, Optional, Tuple

import pytest
import torch
from placed_cases import gradients, images, plan, residual
from torch import nn

from narrowgauge_lab.layers.hetero import host as host_module
from narrowgauge_lab.layers.hetero.bus import MOST_PIECES, PIECE_BYTES, Bus
from narrowgauge_lab.layers.hetero.chooser import SIZES, Choice, Chooser
from narrowgauge_lab.layers.hetero.convert import Converted, convert
from narrowgauge_lab.layers.hetero.host import HostMemory
from narrowgauge_lab.layers.hetero.ledger import Ledger

_CPU = torch.device("cpu")


class _Locking:
    """Memory that says it is page-locked, up to so many bytes at once."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.locked: List[Tuple[int, int]] = []
        self.asked = 0

    def empty(self, shape: Any, **options: Any) -> torch.Tensor:
        pin = options.pop("pin_memory", False)
        made = torch.empty(shape, **options)
        if pin:
            self.asked += 1
            size = made.numel() * made.element_size()
            if size > self.largest:
                raise RuntimeError("CUDA error: out of memory")
            self.locked.append((made.data_ptr(), made.data_ptr() + size))
        return made

    def is_locked(self, tensor: torch.Tensor) -> bool:
        return any(low <= tensor.data_ptr() < high for low, high in self.locked)


@pytest.fixture
def no_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_locks_by_itself", lambda: False)


def _locking(model: nn.Module, largest: int, **said: Any) -> Tuple[Converted, _Locking]:
    """A placed model whose bus thinks that it page-locks."""
    locking = _Locking(largest)
    converted = convert(model, plan(**said), _CPU, Ledger("serial"))
    converted.bus.host.locks = True
    converted.bus.host._empty = locking.empty
    converted.bus.host._is_locked = locking.is_locked
    return converted, locking


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.usefixtures("no_allocator")
def test_pageable_tensors_are_copied_aside_and_results_are_page_locked(wire: str) -> None:
    model = residual()
    expected = gradients(model, images())
    converted, locking = _locking(model, 1 << 30, wire=wire, pieces=2)
    found = gradients(model, images())
    if wire == "fp32":
        for ours, theirs in zip(found, expected):
            assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
    stages = [e for e in converted.ledger.intervals() if e.stage == "reshape"]
    assert stages
    assert not converted.bus.notes()
    y = model.stem(images())
    assert locking.is_locked(y) is (wire == "fp32")


@pytest.mark.usefixtures("no_allocator")
def test_page_locked_memory_that_runs_out_is_noted_and_not_asked_for_again() -> None:
    model = residual()
    expected = gradients(model, images())
    converted, locking = _locking(model, largest=2048, pieces=1)
    for ours, theirs in zip(gradients(model, images()), expected):
        assert torch.equal(ours, theirs)
    notes = converted.bus.notes()
    assert any("no page-locked memory from" in note for note in notes)
    assert any(note.startswith("pageable memory used") for note in notes)
    assert converted.facts()["notes"] == notes
    asked = locking.asked
    model.stem(images())
    assert locking.asked == asked


@pytest.mark.usefixtures("no_allocator")
def test_other_errors_are_not_taken_for_a_refusal() -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no such thing")

    memory = HostMemory(True, broken)
    with pytest.raises(RuntimeError, match="no such thing"):
        memory.fresh((2,), torch.float32)


def test_an_installed_allocator_locks_what_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[Optional[bool]] = []

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        asked.append(options.get("pin_memory"))
        return torch.empty(*shape, **options)

    memory = HostMemory(True, empty)
    monkeypatch.setattr(host_module, "_locks_by_itself", lambda: True)
    made = memory.fresh((2, 3, 4, 4), torch.float32, channels_last=True)
    assert memory.page_locking() == "all CPU tensors"
    assert asked == [None]
    assert made.shape == (2, 3, 4, 4)
    assert made.stride() == (48, 1, 12, 3)


def test_an_allocator_that_ran_out_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = types.SimpleNamespace(pageable_allocations=3, pageable_bytes=12288, limit=1 << 20)
    monkeypatch.setattr(host_module, "_locks_by_itself", lambda: True)
    monkeypatch.setattr(host_module, "_statistics", lambda: seen)
    (note,) = HostMemory(True).notes()
    assert "3 times, 12288 bytes" in note
    assert HostMemory(False).notes() == []


def test_staging_memory_is_the_same_at_each_call_and_grows() -> None:
    memory = HostMemory(False)
    first = memory.staging("x", 8, torch.int8)
    assert memory.staging("x", 4, torch.int8).data_ptr() == first.data_ptr()
    assert memory.staging("y", 8, torch.int8).data_ptr() != first.data_ptr()
    assert memory.staging("x", 8, torch.float16).dtype == torch.float16
    assert memory.staging("x", 9, torch.int8).numel() == 9


@pytest.mark.parametrize(
    ("batch", "size", "said", "count"),
    [
        (32, 2 * PIECE_BYTES, {}, 2),
        (32, 2 * PIECE_BYTES - 1, {}, 1),
        (32, 100 * PIECE_BYTES, {}, MOST_PIECES),
        (3, 100 * PIECE_BYTES, {}, 3),
        (32, 100 * PIECE_BYTES, {"policy": "pinned"}, 1),
        (32, 8, {"pieces": 5}, 5),
        (0, 0, {}, 1),
    ],
)
def test_pieces(batch: int, size: int, said: Any, count: int) -> None:
    found = Bus(_CPU, plan(**said).transfers).pieces(batch, size)
    assert len(found) == count
    assert found[0][0] == 0
    assert found[-1][1] == batch
    assert all(one[1] == other[0] for one, other in zip(found, found[1:]))
    sizes = [high - low for low, high in found]
    assert max(sizes) - min(sizes) <= 1


def test_a_serial_ledger_sees_one_piece() -> None:
    bus = Bus(_CPU, plan().transfers, Ledger("serial"))
    assert len(bus.pieces(32, 100 * PIECE_BYTES)) == 1
    assert not bus.may_defer()
    assert Bus(_CPU, plan().transfers).may_defer()
    assert not Bus(_CPU, plan(policy="pageable").transfers).may_defer()


def _chooser(crossing: int) -> Chooser:
    """Mapped copies win below `crossing` bytes, up; never down."""
    return Chooser(
        tuple(
            Choice(direction, size, 1.0, 0.5 if direction == "up" and size < crossing else 2.0)
            for size in SIZES
            for direction in ("up", "down")
        )
    )


@pytest.mark.parametrize("crossing", [SIZES[0], 1 << 16, 1 << 30])
def test_the_chooser_picks_what_was_faster_at_the_nearest_size(crossing: int) -> None:
    chooser = _chooser(crossing)
    for size in (1, 4096, 5000, 40_000, 65_535, 70_000, 1 << 20, 1 << 28):
        nearest = min(SIZES, key=lambda each: abs(math.log(each / size)))
        assert chooser.maps("up", size) is (nearest < crossing), size
        assert not chooser.maps("down", size)
    assert len(chooser.document()) == 2 * len(SIZES)
