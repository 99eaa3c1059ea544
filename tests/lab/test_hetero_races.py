"""Nothing on one lane touches what another still uses: by a detector, since a CPU cannot race."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Tuple

import pytest
import torch
from placed_cases import images, loss_of, plan, residual

from narrowgauge_kernels import wire
from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.hetero.convert import Converted, convert
from narrowgauge_lab.layers.hetero.keeping import Keeper
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.optim import SGD

pytestmark = pytest.mark.skipif(
    torch_compat.torch_version() < (2, 2), reason="the detector stands where operators are executed"
)


#: The first is launched one by one; from the second on memory is kept, and the third uses it over.
_STEPS = 3


@pytest.fixture(autouse=True)
def _nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 by its reference, rounded to the nearest: the reference's random numbers are made on
    `x.device`, which does not say that it is the pretended one."""
    packed = wire.pack_int8_ref
    monkeypatch.setattr(wire, "pack_int8_ref", lambda x, seed, first: packed(x, None, first))


def _watched(ignored: str = "", **said: Any) -> Tuple[torch.nn.Module, Converted, Any]:
    """A placed model on pretended lanes, and its detector."""
    from race_watch import PRETENDED, Order, PretendedLanes, RaceWatch

    model = residual()
    converted = convert(model, plan(**said), PRETENDED)
    bus = converted.bus
    lanes = PretendedLanes(Order(), ignored)
    bus.lanes = bus.late._lanes = lanes
    # Its copies are queued from page-locked memory, which all of it pretends to be.
    bus.host._is_locked = lambda _: True
    for codec in (bus.codecs.near, bus.codecs.far):
        codec.compiled = False
    return model, converted, RaceWatch(lanes)


def _steps(late: bool, ignored: str = "", steps: int = _STEPS, **said: Any) -> Any:
    model, converted, watch = _watched(ignored, **said)
    optimiser = SGD(model, 0.1)
    converted.watch(optimiser.values)
    with watch:
        for step in range(steps):
            with deferred_weight_grads() if late else contextlib.nullcontext():
                optimiser.differentiate(loss_of(model, images(seed=step)))
            optimiser.step()
        with torch.no_grad():
            model(images())
    return watch


@pytest.mark.parametrize(("wire", "steps"), [("fp32", _STEPS), ("int8", 2)])
def test_no_two_lanes_touch_the_same_memory_unordered(wire: str, steps: int) -> None:
    watch = _steps(late=True, pieces=2, wire=wire, steps=steps)
    assert watch.seen > 300
    assert sorted(set(watch.races)) == []


@pytest.mark.slow
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize(
    "said",
    [{}, {"wire": "fp16"}, {"wire": "int8"}, {"resident": False, "weights": "each-call"}],
    ids=str,
)
def test_nor_in_any_other_way_to_run(late: bool, pieces: int, said: Any) -> None:
    assert sorted(set(_steps(late, pieces=pieces, **said).races)) == []


def test_memory_that_is_kept_is_written_when_the_side_lane_is_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one backward pass a layer's gradient buffer is used twice: the host waits for nothing."""
    from race_watch import PRETENDED, Order, PretendedLanes, RaceWatch

    def races() -> int:
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(3, 3, 3, padding=1)
        bus = convert(layer, plan(pieces=2), PRETENDED).bus
        bus.open()
        lanes = PretendedLanes(Order())
        bus.lanes = bus.late._lanes = lanes
        bus.host._is_locked = lambda _: True
        for codec in (bus.codecs.near, bus.codecs.far):
            codec.compiled = False
        watch = RaceWatch(lanes)
        with watch:
            for step in range(_STEPS):
                with deferred_weight_grads():
                    x = images(seed=step).requires_grad_()
                    torch.autograd.grad(layer(layer(x)).sum(), [x, layer.weight])
        return len(watch.races)

    assert races() == 0
    monkeypatch.setattr(Keeper, "busy", lambda self, trip, inputs: None)
    assert races() > 0


@pytest.mark.parametrize("ignored", ["wait", "sync"])
def test_the_detector_notices_what_is_not_waited_for(ignored: str) -> None:
    assert _steps(late=True, ignored=ignored, pieces=2, steps=2).races


def test_what_a_lane_still_reads_is_held_until_it_is_through() -> None:
    _, converted, watch = _watched()
    bus, lanes = converted.bus, watch.lanes
    tensors = [torch.ones(3), torch.ones(3)]
    gone = [weakref.ref(each) for each in tensors]
    lanes.order.tick("side")
    event = lanes.mark("side")
    bus.hold("side", tensors.pop(0))
    lanes.order.tick("side")
    bus.hold("side", tensors.pop(0))
    assert [ref() is None for ref in gone] == [False, False]
    lanes.sync(event)
    bus.hold("side")
    assert [ref() is None for ref in gone] == [True, False]
