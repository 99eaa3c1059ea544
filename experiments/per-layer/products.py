"""What the GPU and the host compute in a step, on operands that were sent beforehand.

The GPU's products are called in two ways: whole, one after another, and in parts as the pass takes
them, the weight gradient on a stream of its own where the pass has one. Which is the faster depends
on the layer: small products fill a GPU only together, and a library may have a faster kernel for a
part than for the whole.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F

from narrowgauge_contract.placement import PASSES
from narrowgauge_lab.layers.hetero.convert import problem_of
from narrowgauge_lab.layers.hetero.gradients import parts_of
from narrowgauge_lab.layers.hetero.host import HostMemory
from narrowgauge_lab.layers.hetero.wire import DTYPES, Incoming, Outgoing, images
from narrowgauge_lab.layers.passes import Operand, Passes, Problem, passes_for

from .subject import LAYER, Training

__all__ = ["IN_PARTS", "WHOLE", "Call", "Products"]

Call = Callable[[], Any]
Spans = List[Tuple[int, int]]
#: The ways of the GPU's products.
WHOLE, IN_PARTS = "whole", "in parts"


class Products:
    """The calls of `forward` and `backward`, on the GPU by way, and on the host.

    `gpu` lacks `IN_PARTS` where that is `WHOLE`: one piece, and no stream aside.
    """

    def __init__(self, training: Training, memory: HostMemory) -> None:
        self._training, self._memory = training, memory
        self._bus = training.converted.bus
        self._wire = training.plan.transfers.wire
        conv = training.model.conv
        problem = problem_of(conv)
        assert isinstance(problem, Problem)
        batch = training.batches[0].detach()
        outputs = problem.output_shape(batch.shape, conv.weight.shape)
        above = torch.rand(outputs)
        weight = conv.weight.detach().to(training.device)
        x, fill_x = self._sent(batch, "input")
        grad, fill_grad = self._sent(above, "grad_output")
        self._x, self._grad, self._far = x, grad, weight
        self._shapes = (tuple(batch.shape), tuple(outputs), tuple(conv.weight.shape))
        self._forward, self._by_input, self._by_weight = (
            self._passes(name, problem) for name in PASSES
        )
        # Some kernels are chosen at a first call.
        self._by_weight.weight_grad(grad, x, self._shapes[2])
        self.gpu: Dict[str, Dict[str, List[Call]]] = {
            "forward": self._forwards(),
            "backward": self._backwards(),
        }
        self.cpu: Dict[str, List[Call]] = {
            "forward": [*fill_x, *self._unpacked(outputs, "output")],
            "backward": [*fill_grad, *self._unpacked(batch.shape, "grad_input")],
        }
        self.elsewhere = [self._elsewhere(above)]

    def _passes(self, name: str, problem: Problem) -> Passes:
        placed = self._training.plan.placement(LAYER).of(name)
        received = {"forward": "output", "input_grad": "grad_input"}.get(name)
        wire = self._wire[received] if received else "fp32"
        dtype = torch.float32 if wire == "int8" else DTYPES[wire]
        return passes_for(placed.precision, self._training.device, problem, dtype)

    def _sent(self, tensor: torch.Tensor, name: str) -> Tuple[Operand, List[Call]]:
        """The tensor on the device as it arrives there, and what the host does to send it."""
        count = len(tensor)
        outgoing = Outgoing(
            tensor, self._wire[name], name, device=self._training.device, host=self._memory,
            codecs=self._bus.codecs, seed=None, direct=self._bus.direct(tensor),
        )  # fmt: skip
        if outgoing.fills:
            outgoing.fill(0, count)
        self._bus.move(outgoing.copies(0, count), up=True)
        self._training.finish()
        return outgoing.piece(0, count), [lambda: outgoing.fill(0, count)] if outgoing.fills else []

    def _forwards(self) -> Dict[str, List[Call]]:
        inputs, outputs, _ = self._shapes

        def calls(pieces: Spans) -> List[Call]:
            return self._packed(
                lambda piece: self._forward.forward(piece, self._far, None),
                self._x, pieces, outputs, "output",
            )  # fmt: skip

        pieces = self._bus.pieces_of(inputs, "input", outputs, "output")
        ways = {WHOLE: calls([(0, inputs[0])])}
        if len(pieces) > 1:
            ways[IN_PARTS] = calls(pieces)
        return ways

    def _backwards(self) -> Dict[str, List[Call]]:
        inputs, outputs, _ = self._shapes

        def by_input(pieces: Spans) -> List[Call]:
            def product(piece: Operand) -> torch.Tensor:
                shape = (piece.shape[0], *inputs[1:])
                return self._by_input.input_grad(piece, self._far, shape)

            return self._packed(product, self._grad, pieces, inputs, "grad_input")

        whole = [(0, inputs[0])]
        pieces = self._bus.pieces_of(outputs, "grad_output", inputs, "grad_input")
        stays = self._x if self._training.plan.transfers.resident else None
        parts = parts_of(pieces, self._grad, stays, self._by_weight)
        lanes = self._bus.lanes
        ways = {WHOLE: [*by_input(whole), self._weight_grad(whole)]}
        if lanes.side is not lanes.work:
            aside = self._weight_grad(parts)
            ways[IN_PARTS] = [_beside(lanes.side, by_input(pieces), aside)]
        elif len(pieces) > 1:
            ways[IN_PARTS] = [*by_input(pieces), self._weight_grad(parts)]
        return ways

    def _weight_grad(self, parts: Spans) -> Call:
        """The sum of the parts' products, in their order."""
        pairs = [(images(self._grad, *each), images(self._x, *each)) for each in parts]
        window = self._shapes[2]

        def run() -> torch.Tensor:
            total = self._by_weight.weight_grad(*pairs[0], window)
            for grad, x in pairs[1:]:
                total = self._by_weight.weight_grad(grad, x, window).add_(total)
            return total

        return run

    def _packed(
        self,
        product: Callable[[Operand], torch.Tensor],
        operand: Operand,
        pieces: Spans,
        shape: Sequence[int],
        name: str,
    ) -> List[Call]:
        """Each piece's product, and what the GPU does to it before it goes."""
        incoming = Incoming(
            shape, self._wire[name], name, host=self._memory, codecs=self._bus.codecs
        )
        incoming.begin(product(images(operand, *pieces[0])))

        def call(low: int, high: int) -> Call:
            piece = images(operand, low, high)
            return lambda: incoming.copies(product(piece), low, high, None)

        return [call(*each) for each in pieces]

    def _unpacked(self, shape: Sequence[int], name: str) -> List[Call]:
        """What the host does to a result that has come, in memory that is new to it as there."""
        wire, near = self._wire[name], self._bus.codecs.near
        if wire == "fp32":
            return []
        came = torch.ones(tuple(shape), dtype=DTYPES[wire])
        if wire != "int8":
            return [lambda: torch.empty(tuple(shape)).copy_(came)]
        scale = torch.ones(shape[1])
        return [lambda: near.unpack(torch.empty(tuple(shape)), came, scale)]

    def _elsewhere(self, outputs: torch.Tensor) -> Call:
        """Loss and optimiser, on tensors of their own."""
        leaf = outputs.clone().requires_grad_()
        weight = torch.nn.Parameter(self._training.weight.detach().clone())
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.RMSprop([weight], lr=1e-3)
        target = self._training.target

        def run() -> None:
            leaf.grad = None
            F.mse_loss(leaf, target, reduction="sum").backward()
            optimizer.step()

        return run


def _beside(side: Any, calls: Sequence[Call], aside: Call) -> Call:
    """The calls on the current stream while `aside` runs on `side`; done when both are."""

    def run() -> None:
        home = torch.cuda.current_stream()
        side.wait_stream(home)
        with torch.cuda.stream(side):
            aside()
        for call in calls:
            call()
        home.wait_stream(side)

    return run
