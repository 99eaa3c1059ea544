"""Passes whose buffers, pieces and products are kept from step to step, on a stand-in: the same
bits as without, leases, what is not kept, and what is captured."""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any, List, Tuple

import pytest
import torch
from placed_cases import (
    STAND_IN,
    Checkpointed,
    Often,
    gradients,
    images,
    loss_of,
    placed,
    residual,
    same,
)
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.hetero import prepared, replay
from narrowgauge_lab.layers.hetero.bus import Bus
from narrowgauge_lab.layers.hetero.convert import Converted
from narrowgauge_lab.layers.hetero.host import HostMemory
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.measure.watch import is_watched, watch
from narrowgauge_lab.optim import SGD

_X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(2))


def _pair(model: nn.Module, **said: Any) -> Tuple[nn.Module, Converted, nn.Module, Converted]:
    """Two placed copies of a model, of which the second one prepares nothing."""
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    one, other = placed(first, **said), placed(second, **said)
    other.bus.prepares = False
    return first, one, second, other


def _trips(converted: Converted) -> List[prepared.Trip]:
    found = []
    for runner in converted.runners:
        keeper = runner._away._kept
        for forms in (keeper._outwards, keeper._backwards, keeper._upwards):
            found += [trip for trips in forms._trips.values() for trip in trips]
    return found


class _Fixed:
    """Work whose results lie at one place for good, as a graph's do."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.results = [each.clone() for each in work()]

    def replay(self) -> None:
        for kept, made in zip(self.results, self.work()):
            kept.copy_(made)


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes to a result too early, or takes it for a new one, shows."""

    def record(self: Any, work: Any, lane: Any, *, may_capture: bool = True) -> replay.Replay:
        graph = _Fixed(work)
        return replay.Replay(work, graph, graph.results)

    monkeypatch.setattr(replay.Recorder, "record", record)


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])
def test_steps_have_the_bits_of_unprepared_ones(wire: str, pieces: int, late: bool) -> None:
    model, one, twin, other = _pair(residual(), wire=wire, pieces=pieces)
    optimisers = [SGD(model, 0.1), SGD(twin, 0.1)]
    for handle, optimiser in zip((one, other), optimisers):
        handle.watch(optimiser.values)
    for step, batch in enumerate((4, 4, 3, 4, 3, 4)):
        found = []
        for each, optimiser in zip((model, twin), optimisers):
            torch.manual_seed(step)  # of what int8 draws
            with deferred_weight_grads() if late else contextlib.nullcontext():
                optimiser.differentiate(loss_of(each, images(batch, seed=step)))
            optimiser.step()
            found.append(optimiser.gradient.clone())
        assert bool(torch.isfinite(found[0]).all())
        assert torch.equal(found[0], found[1]), f"step {step}"
    # Of each layer: forward passes and gradients of two batches, the second leased beside.
    assert len(_trips(one)) >= 5 * 4
    assert not _trips(other)


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize("said", [{"resident": False}, {"weights": "each-call"}], ids=str)
def test_nor_do_other_ways_to_send(said: Any) -> None:
    model, one, twin, _ = _pair(residual(), **said)
    for step in range(3):
        x = images(seed=step)
        assert same(gradients(model, x), gradients(twin, x))
    assert _trips(one)


def test_bytes_and_stages_are_those_of_unprepared_steps() -> None:
    model, one, twin, other = _pair(residual(), mode="overlapped", wire="int8", pieces=2)
    seen = []
    for _ in range(3):
        seen = []
        for each, handle in ((model, one), (twin, other)):
            handle.ledger.clear()
            gradients(each, images())
            stages = [(e.layer, e.pass_, e.stage, e.to_device, e.from_device)
                      for e in handle.ledger.intervals() if e.stage != "refit"]  # fmt: skip
            seen.append((handle.ledger.bytes_moved(), stages))
    assert _trips(one)
    assert seen[0] == seen[1]


def test_a_ledger_may_be_switched_on_and_off_between_steps() -> None:
    model, one, twin, other = _pair(residual(), mode="off", wire="int8")
    for mode in ("off", "off", "overlapped", "overlapped", "serial", "serial", "off"):
        for handle in (one, other):
            handle.ledger.mode = mode
            handle.ledger.clear()
        torch.manual_seed(1)
        ours = gradients(model, images())
        torch.manual_seed(1)
        assert same(ours, gradients(twin, images()))
        assert one.ledger.bytes_moved() == other.ledger.bytes_moved()


@pytest.mark.usefixtures("fixed")
@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_layer_has_an_input_for_each_use_as_far_as_leases_go(times: int) -> None:
    model, one, twin, _ = _pair(Often(times, 4))
    for step in range(4):
        x = _X * (step + 1)
        with deferred_weight_grads():
            assert same(gradients(model, x), gradients(twin, x))
    outwards = one.runners[0]._away._kept._outwards
    (kept,) = outwards._trips.values()
    assert len(kept) == min(times, prepared._LEASES)
    assert not any(trip.leased for trip in kept)


@pytest.mark.usefixtures("fixed")
def test_an_old_loss_that_is_held_keeps_its_inputs() -> None:
    """Its backward pass comes after forward passes of later steps."""
    model, one, twin, _ = _pair(Often(1, 4))
    losses = [(loss_of(model, _X * step), loss_of(twin, _X * step)) for step in range(1, 8)]
    assert sum(trip.leased for trip in _trips(one)) == prepared._LEASES
    for ours, theirs in reversed(losses):
        assert same(*(torch.autograd.grad(loss, list(each.parameters()), retain_graph=True)
                       for loss, each in ((ours, model), (theirs, twin))))  # fmt: skip
    for ours, theirs in losses:
        assert same(*(torch.autograd.grad(loss, list(each.parameters()))
                       for loss, each in ((ours, model), (theirs, twin))))  # fmt: skip
    del losses, ours, theirs
    assert not any(trip.leased for trip in _trips(one))


@pytest.mark.usefixtures("fixed")
def test_what_nobody_differentiates_is_not_leased() -> None:
    model, one, _, _ = _pair(Often(1, 4))
    with torch.no_grad():
        results = [model(_X * step) for step in range(1, 5)]
    assert len(_trips(one)) == 1
    assert len({each.data_ptr() for each in results}) == 4
    assert torch.equal(results[1], torch.tanh(one.runners[0].forward(
        _X * 2, model.layer.weight, model.layer.bias)[0]))  # fmt: skip


@pytest.mark.usefixtures("fixed")
@pytest.mark.skipif(
    not torch_compat.backward_is_visible(), reason="backward passes cannot be told apart"
)
def test_a_pass_inside_of_a_pass_leaves_pending_gradients_alone() -> None:
    model, one, twin, _ = _pair(Checkpointed(4))
    for step in range(1, 5):
        for each in (model, twin):
            each.zero_grad(set_to_none=True)
            with deferred_weight_grads():
                loss_of(each, _X * step).backward()
        assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert _trips(one)


@pytest.mark.usefixtures("fixed")
def test_weights_that_are_watched_anew_move_and_products_follow() -> None:
    model, one, twin, _ = _pair(residual(), pieces=2)
    gradients(model, images())
    gradients(model, images())
    optimiser = SGD(model, 0.1)
    one.watch(optimiser.values)
    with torch.no_grad():
        optimiser.values.mul_(0.5)
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    for _ in range(3):
        assert same(gradients(model, images()), gradients(twin, images()))


def test_host_tensors_are_not_kept() -> None:
    model, one, _, _ = _pair(Often(1, 4))
    for _ in range(3):
        x = _X.clone().requires_grad_()
        y = model.layer(x)
        above = torch.ones_like(y)
        torch.autograd.grad(y, [x, model.layer.weight], above)
    assert _trips(one)
    gone = [weakref.ref(each) for each in (x, y, above)]
    del x, y, above
    assert [ref() for ref in gone] == [None, None, None]


@pytest.mark.parametrize("why", ["policy", "forms", "room", "size", "empty"])
def test_what_is_not_kept(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, one, twin, _ = _pair(Often(1, 4), policy="pinned" if why == "policy" else "overlapped")
    one.bus.open()
    sizes = [1] * 3
    if why == "forms":
        sizes = [*range(1, 9), 9, 9, 10, 10]
    elif why == "room":
        one.bus._room = 100
    elif why == "size":
        monkeypatch.setattr("narrowgauge_lab.layers.hetero.keeping.MOST_BYTES", 100)
    elif why == "empty":
        sizes = [0] * 3
    for size in sizes:
        x = _X[:1].repeat(size, 1, 1, 1)
        assert same(gradients(model, x), gradients(twin, x))
    assert not _trips(one)


def test_whoever_watches_sees_every_product() -> None:
    layer = nn.Conv2d(4, 4, 3, bias=False)
    converted = placed(layer)

    def step() -> None:
        torch.autograd.grad(layer(_X).sum(), layer.weight)

    for _ in range(3):
        step()
    before, kept = len(watch(step)), len(_trips(converted))
    assert kept
    converted.bus.prepares = False
    assert before == len(watch(step)) > 0
    assert not is_watched()


def test_the_views_of_watched_weights_stay() -> None:
    model = residual()
    converted = placed(model)
    optimiser = SGD(model, 0.1)
    converted.watch(optimiser.values)
    views = []
    for _ in range(3):
        optimiser.differentiate(loss_of(model, images()))
        optimiser.step()
        views.append([runner._away._weight.view for runner in converted.runners])
    assert all(one is other for one, other in zip(views[0], views[2]))


def test_page_locked_memory_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[int] = []

    def is_locked(tensor: torch.Tensor) -> bool:
        asked.append(tensor.data_ptr())
        return tensor.numel() > 1

    memory = HostMemory(True, torch.empty, is_locked)
    one, other = torch.ones(4), torch.ones(1)
    assert [memory.locked(one) for _ in range(2)] == [True, True]
    assert len(asked) == 2  # torch's pool may give memory back: it is asked each time
    monkeypatch.setattr("narrowgauge_lab.layers.hetero.host._locks_by_itself", lambda: True)
    assert [memory.locked(each) for each in (one, one, other, other)] == [True, True, False, False]
    assert asked[2:] == [one.data_ptr(), other.data_ptr(), other.data_ptr()]


class _Graph:
    """Stands in for torch.cuda.CUDAGraph: remembers what it was asked."""

    error = ""

    def __init__(self) -> None:
        self.calls: List[Any] = []

    def capture_begin(self, pool: Any, **_: str) -> None:
        self.calls.append(pool)

    def capture_end(self) -> None:
        self.calls.append("end")

    def replay(self) -> None:
        self.calls.append("replay")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Tuple[replay.Recorder, List[str]]:
    notes: List[str] = []
    handles = iter(range(10))
    monkeypatch.setattr(torch_compat, "graphs_available", lambda device: True)
    monkeypatch.setattr(torch_compat, "capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles), raising=False)
    return replay.Recorder(STAND_IN, notes.append), notes


def test_a_lanes_graphs_share_a_pool_and_run_once_each(recorder: Any) -> None:
    record, notes = recorder
    calls: List[int] = []

    def work() -> List[torch.Tensor]:
        calls.append(1)
        return [_X]

    replays = [record.record(work, lane) for lane in ("work", "work", "side")]
    assert len(calls) == record.captured == 3
    for each in replays:
        assert each.captured
        assert each()[0] is _X
    assert len(calls) == 3  # a replay calls nothing
    assert [each._graph.calls for each in replays] == [
        [0, "end", "replay"], [0, "end", "replay"], [1, "end", "replay"],
    ]  # fmt: skip
    loose = record.record(work, "work", may_capture=False)
    assert not loose.captured
    assert loose()[0] is _X
    assert len(calls) == 4
    assert not notes


def test_what_cannot_be_captured_is_launched_and_noted(recorder: Any) -> None:
    record, notes = recorder
    fails = [True]

    def work() -> List[torch.Tensor]:
        if fails:
            raise RuntimeError(fails.pop() and "operation not permitted when stream is capturing")
        return [_X]

    found = record.record(work, "work")
    assert not found.captured
    assert found()[0] is _X
    assert len(notes) == 1
    assert "not permitted" in notes[0]

    def starved() -> List[torch.Tensor]:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(RuntimeError, match="out of memory"):
        record.record(starved, "work")


def test_products_with_graphs_and_without(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which products may be captured: not a linear layer's, which are cuBLAS's, and not those that
    round by numbers drawn anew."""
    captured: List[Any] = []

    def record(self: Any, work: Any, lane: Any, *, may_capture: bool = True) -> replay.Replay:
        captured.append(may_capture)
        return replay.Replay(work)

    monkeypatch.setattr(replay.Recorder, "record", record)
    layers = {
        "conv": (lambda: nn.Conv2d(4, 4, 3, bias=False), _X, {}, [True, True, True]),
        "linear": (lambda: nn.Linear(6, 3, bias=False), _X[0, 0], {}, [False] * 3),
        "int8": (
            lambda: nn.Conv2d(4, 8, 3, bias=False), _X, {"precision": "int8"}, [False],
        ),
        "int8 both": (
            lambda: nn.Conv2d(4, 8, 3, bias=False), _X, {"precision": "int8", "wire": "int8"},
            [False] * 3,
        ),
    }  # fmt: skip
    for name, (make, x, said, expected) in layers.items():
        captured.clear()
        layer = make()
        placed(layer, **said)
        for _ in range(3):
            image = x.clone().requires_grad_()
            torch.autograd.grad(layer(image).sum(), [image, layer.weight])
        assert captured == expected, name


def test_a_bus_that_is_copied_keeps_nothing() -> None:
    model = Often(1, 4)
    converted = placed(model)
    gradients(model, _X)
    gradients(model, _X)
    other = copy.deepcopy(model)
    assert _trips(converted)
    bus = other.layer.runner.bus
    assert isinstance(bus, Bus)
    assert same(gradients(other, _X), gradients(model, _X))
