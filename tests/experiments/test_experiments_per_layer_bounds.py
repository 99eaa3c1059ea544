"""`per-layer`: what its bounds are of, and what they make of a row that is faster."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
import torch
from one_row import CPU, Rows

from narrowgauge_contract.events import EVENTS_FILE, EventLog
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.hetero.host import HostMemory

QUICK = ("group=7", "batch=2", "plan=hetero-fp32", "mode=overlapped", "limit_s=0.01")
_ROWS = Rows("per-layer")
module = _ROWS.module


def _training(out: Path, pieces: int = 0) -> Any:
    """Group 7 at batch 2, overlapped; 0 leaves the pieces to the plan."""
    made = _ROWS.job(*QUICK)
    log = EventLog(out / EVENTS_FILE)
    ctx = RowContext(made.rows[0], log, out, device=CPU, profile="smoke", plans=made.plan)
    plan = ctx.plan(str(ctx.parameters["plan"]))
    plan = dataclasses.replace(plan, transfers=dataclasses.replace(plan.transfers, pieces=pieces))
    shapes = module("shapes")
    return ctx, module("subject").Training(ctx, shapes.GROUPS["7"], 2, plan)


def test_the_gpus_bound_is_of_its_products_whole_or_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is the faster. Seconds by how many calls there are: forward has one whole and two
    in parts, backward two and three, and a step those that were chosen."""
    bounds = module("bounds")
    seconds = {1: 1.0, 2: 2.0, 3: 1.5, 4: 4.0}

    def timed(work: Any, *_: Any) -> Any:
        return _samples(seconds[len(work.calls)])

    ctx, training = _training(tmp_path, pieces=2)
    monkeypatch.setattr(bounds, "_timed", timed)
    said, recorded = _heard(ctx, monkeypatch, bounds)

    bounds.record_bounds(ctx, training, [], dict.fromkeys(("forward", "backward", "step"), _ONE))

    assert recorded["forward_gpu_alone"] == 1.0
    assert recorded["backward_gpu_alone"] == 1.5
    assert recorded["step_gpu_alone"] == 4.0
    assert said["bound_products"] == {"forward": "whole", "backward": "in parts"}


def test_products_in_parts_are_those_of_the_pass(tmp_path: Path) -> None:
    """Two pieces, and of the weight gradient as many parts: what they sum up to is the whole's."""
    _, training = _training(tmp_path, pieces=2)
    products = _products(training)

    assert {way: len(calls) for way, calls in products.gpu["forward"].items()} == {
        "whole": 1, "in parts": 2,
    }  # fmt: skip
    whole, parts = (products.gpu["backward"][way][-1]() for way in ("whole", "in parts"))
    assert torch.allclose(parts, whole, rtol=1e-4, atol=1e-5)
    ((_, far),) = products.gpu["forward"]["whole"][0]()
    pieces = [call()[0][1] for call in products.gpu["forward"]["in parts"]]
    assert [len(each) for each in pieces] == [1, 1]
    assert torch.allclose(torch.cat(pieces), far, rtol=1e-4, atol=1e-5)


def test_a_batch_in_one_piece_has_no_parts_without_a_stream_aside(tmp_path: Path) -> None:
    _, training = _training(tmp_path)
    products = _products(training)
    assert {part: list(ways) for part, ways in products.gpu.items()} == {
        "forward": ["whole"], "backward": ["whole"],
    }  # fmt: skip


def test_the_weight_gradient_runs_beside_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    log: List[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    current = [Stream("home")]

    @contextlib.contextmanager
    def stream(side: Stream) -> Iterator[None]:
        current.append(side)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)

    def call(name: str) -> Any:
        return lambda: log.append(f"{name} on {current[-1].name}")

    module("products")._beside(
        Stream("side"), [call("piece 1"), call("piece 2")], call("weights")
    )()

    assert log == [
        "side waits for home", "weights on side", "piece 1 on home", "piece 2 on home",
        "home waits for side",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("alone", "stands_in", "valid"),
    [(0.9, False, True), (1.04, False, True), (1.33, False, False), (1.33, True, True)],
)
def test_a_pass_that_is_faster_than_its_bound_makes_a_row_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: float, stands_in: bool, valid: bool
) -> None:
    """A pass of one second whose products alone are said to take longer, on a GPU."""
    bounds = module("bounds")
    ctx, training = _training(tmp_path)
    assert bounds._stands_in(training), "there is no GPU in it"
    monkeypatch.setattr(bounds, "_stands_in", lambda _: stands_in)
    monkeypatch.setattr(bounds, "_timed", lambda *_: _samples(alone))
    reasons: List[str] = []
    ctx.invalid = reasons.append  # type: ignore[method-assign]
    _heard(ctx, monkeypatch, bounds)

    bounds.record_bounds(ctx, training, [], dict.fromkeys(("forward", "backward", "step"), _ONE))

    assert (not reasons) is valid
    assert valid or "forward takes 0.752 of the time that gpu alone takes" in reasons[0]


def _samples(seconds: float) -> Any:
    return types.SimpleNamespace(seconds=(seconds,))


_ONE = _samples(1.0)


def _heard(ctx: RowContext, monkeypatch: pytest.MonkeyPatch, bounds: Any) -> Any:
    """The facts, and the medians, that are recorded from now on."""
    said: Dict[str, Any] = {}
    recorded: Dict[str, float] = {}
    ctx.fact = said.__setitem__  # type: ignore[method-assign]

    def record(_: Any, name: str, samples: Any, *rest: Any) -> None:
        recorded[name] = samples.seconds[0]

    monkeypatch.setattr(bounds, "record_samples", record)
    return said, recorded


def _products(training: Any) -> Any:
    training.converted.bus.open()
    return module("products").Products(training, HostMemory(False))
