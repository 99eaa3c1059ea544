"""Weight gradients of batches that travel in pieces: in which parts they are multiplied, when, and
that they add up to those of the whole."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, List, Optional, Tuple

import pytest
import torch
from placed_cases import Often, gradients, placed, same
from torch import nn

from narrowgauge_lab.layers.hetero.bus import Bus
from narrowgauge_lab.layers.hetero.gradients import Sums, halves
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.replay import Replay
from narrowgauge_lab.layers.hetero.wire import images
from narrowgauge_lab.layers.passes import Quantised
from narrowgauge_lab.layers.passes.eight_bit import EightBitPasses
from narrowgauge_lab.layers.passes.floats import FloatPasses


def _images(batch: int, channels: int = 4) -> torch.Tensor:
    return torch.randn(batch, channels, 7, 5, generator=torch.Generator().manual_seed(batch))


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> List[int]:
    """The images of each product of a weight gradient."""
    found: List[int] = []
    for kind in (FloatPasses, EightBitPasses):
        true = kind.weight_grad

        def counted(self: Any, grad: Any, x: Any, *rest: Any, true: Any = true) -> Any:
            assert grad.shape[0] == x.shape[0]
            found.append(grad.shape[0])
            return true(self, grad, x, *rest)

        monkeypatch.setattr(kind, "weight_grad", counted)
    return found


def test_each_part_takes_half_of_the_pieces_that_are_left() -> None:
    def parts(*cuts: int) -> List[Tuple[int, int]]:
        return halves(list(zip(cuts, cuts[1:])))

    assert parts(0, 0) == [(0, 0)]
    assert parts(0, 7) == [(0, 7)]
    assert parts(0, 3, 7) == [(0, 3), (3, 7)]
    assert parts(0, 2, 4, 7) == [(0, 4), (4, 7)]
    assert parts(*range(0, 18, 2)) == [(0, 8), (8, 12), (12, 14), (14, 16)]
    for count in range(1, 40):
        found = parts(*range(count + 1))
        assert [low for low, _ in found[1:]] == [high for _, high in found[:-1]]
        assert (found[0][0], found[-1][1]) == (0, count)
        assert len(found) <= count.bit_length() + 1
        assert count == 1 or found[-1] == (count - 1, count)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"pieces": 1}, [5]),
        ({"pieces": 2}, [2, 3]),
        ({"pieces": 4}, [2, 1, 2]),
        ({"pieces": 9}, [3, 1, 1]),
        ({"pieces": 4, "wire": "fp16"}, [2, 1, 2]),
        ({"pieces": 4, "wire": "int8"}, [2, 1, 2]),
        ({"pieces": 4, "wire": "int8", "precision": "int8"}, [2, 1, 2]),
        # It rounds its operands itself, by scales of the whole.
        ({"pieces": 4, "precision": "int8"}, [5]),
        # The input comes again, in one piece.
        ({"pieces": 4, "resident": False}, [5]),
    ],
    ids=str,
)
def test_the_parts_of_a_pass(said: Any, expected: List[int], multiplied: List[int]) -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1)
    placed(layer, **said)
    for _ in range(3):  # launched, recorded, kept
        multiplied.clear()
        x = _images(5).requires_grad_()
        torch.autograd.grad(layer(x).square().sum(), [x, layer.weight, layer.bias])
        assert multiplied == expected


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("wire", "limit"), [("fp32", 1e-5), ("int8", 0.05)])
@pytest.mark.parametrize("kind", ["conv2d", "linear"])
def test_parts_add_up_to_the_whole(kind: str, wire: str, limit: float, late: bool) -> None:
    """Of odd batches, one image and none. At int8 outputs that come in pieces have other scales."""
    layer = nn.Conv2d(4, 6, 3, stride=2, padding=1) if kind == "conv2d" else nn.Linear(4, 3)
    for batch in (7, 1, 0, 7):
        x = _images(batch) if kind == "conv2d" else _images(batch)[:, :, 0, 0].contiguous()
        found = []
        for pieces in (1, 3):
            placed(layer, wire=wire, pieces=pieces)
            image = x.clone().requires_grad_()
            torch.manual_seed(3)  # of what int8 draws
            with deferred_weight_grads() if late else contextlib.nullcontext():
                loss = layer(image).square().sum()
                found.append(torch.autograd.grad(loss, [image, layer.weight, layer.bias]))
        for one, other in list(zip(*found))[1:]:
            assert bool(torch.isfinite(other).all())
            assert float((one - other).norm()) <= limit * float(one.norm())


def test_a_sum_is_as_exact_as_its_parts() -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1).double()
    x, above = _images(11), torch.randn(11, 6, 7, 5)
    exact = torch.autograd.grad(layer(x.double()), layer.weight, above.double())[0]
    layer.float()
    placed(layer, pieces=8)
    for _ in range(3):
        image = x.clone().requires_grad_()
        _, found = torch.autograd.grad(layer(image), [image, layer.weight], above)
        assert float((found.double() - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_what_is_not_a_number_stays_none(at: int, bad: float) -> None:
    """Whichever part it is in."""
    layer = nn.Conv2d(4, 6, 3, padding=1)
    placed(layer, pieces=4)
    for _ in range(3):
        x, above = _images(7).requires_grad_(), torch.ones(7, 6, 7, 5)
        above[at] = bad
        _, found = torch.autograd.grad(layer(x), [x, layer.weight], above)
        assert not bool(torch.isfinite(found).any())


def test_a_part_is_queued_while_the_rest_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: List[str] = []
    move, product = Bus.move, FloatPasses.weight_grad

    def moved(self: Any, copies: Any, *, up: bool) -> None:
        seen.append("up" if up else "down")
        move(self, copies, up=up)

    def multiplied(self: Any, *operands: Any) -> torch.Tensor:
        seen.append("product")
        return product(self, *operands)

    layer = nn.Conv2d(4, 6, 3, padding=1, bias=False)
    placed(layer, pieces=4)
    x = _images(8).requires_grad_()
    y = layer(x)
    monkeypatch.setattr(Bus, "move", moved)
    monkeypatch.setattr(FloatPasses, "weight_grad", multiplied)
    torch.autograd.grad(y.sum(), [x, layer.weight])

    assert seen == [
        "up", "down", "up", "down", "product", "up", "down", "product", "up", "down", "product",
        "down",
    ]  # fmt: skip


def test_a_layer_used_over_has_parts_of_its_own() -> None:
    for times in (1, 3):
        model, twin = Often(times, 4), Often(times, 4)
        twin.load_state_dict(model.state_dict())
        placed(model, pieces=3)
        placed(twin, pieces=3).bus.prepares = False
        for step in range(4):
            x = _images(5) * (step + 1)
            with deferred_weight_grads():
                assert same(gradients(model, x), gradients(twin, x))


class _Graph:
    """As a CUDA graph: nothing ran when it was captured, and its results stay where they are."""

    def __init__(self, work: Any) -> None:
        self.work, self.results = work, [torch.full((2,), float("nan"))]

    def replay(self) -> None:
        (made,) = self.work()
        self.results[0].copy_(made)


def _recorded(work: Any) -> Replay:
    graph = _Graph(work)
    return Replay(work, graph, graph.results)


@pytest.mark.parametrize("record", [None, Replay, _recorded], ids=["launched", "called", "graph"])
def test_sums_of_all_kinds_begin_anew_each_time(record: Optional[Any]) -> None:
    sums = Sums(record)
    values = [torch.ones(2), torch.ones(2), torch.ones(2)]

    def product(at: int) -> Any:
        return lambda: [values[at].clone()]

    for step in range(3):
        for at, value in enumerate(values):
            value.fill_(10.0**at + step)
        sums.begin()
        for at in range(3):
            sums.add(product(at))
        (total,) = sums.end()
        assert total.tolist() == [111.0 + 3 * step] * 2
        if step == 1:  # a pass that failed in between
            sums.begin()
            sums.add(product(2))
    assert sums.kept is (record is not None)
    assert not sums._far
    gone = weakref.ref(sums)
    del sums
    assert gone() is None, "its buffers would be kept until the collector runs"


def test_images_of_an_operand() -> None:
    x = _images(5)
    eight = Quantised(torch.ones(5, 4, dtype=torch.int8), torch.ones(4))

    assert images(x, 0, 5) is x
    assert images(eight, 0, 5) is eight
    assert torch.equal(images(x, 1, 3), x[1:3])
    part = images(eight, 1, 3)
    assert isinstance(part, Quantised)
    assert part.shape == (2, 4)
    assert part.scale is eight.scale
