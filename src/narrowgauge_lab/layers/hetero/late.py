"""Weight gradients that come back late: together, at the end of a backward pass, on their own
stream.

Inside `deferred_weight_grads` the tensor that a layer's backward returns is not filled yet; the
engine fills it before `backward` or `autograd.grad` return. Nothing may read it in between. What
autograd itself would read there is settled first (a weight used twice, one with a gradient to add
to, with hooks, or that is no leaf); a weight that reaches the loss by another way than its layer
cannot be seen from here. Such memory holds NaN until it is filled: what reads it too early is wrong
for all to see.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.hetero.host import HostMemory
from narrowgauge_lab.layers.hetero.lanes import Lanes
from narrowgauge_lab.layers.hetero.ledger import ALL_LAYERS, Ledger

__all__ = ["CHUNK_BYTES", "LateGradients", "deferred_weight_grads", "deferring"]

#: Gradients go down in copies of about this size: a copy costs some 10 us to start, which 55 GB/s
#: make up for in 0.5 MB, and a larger network's should not all wait for the end.
CHUNK_BYTES = 4 << 20

#: Backward passes inside of each other that are told apart.
_PASSES = 16

#: How many `deferred_weight_grads` are open. Of the process: on CUDA, backward passes run in
#: threads of the engine.
_open: Dict[str, int] = {"count": 0}


@contextlib.contextmanager
def deferred_weight_grads() -> Iterator[None]:
    """Let weight gradients of backward passes in this block come back at each pass's end."""
    _open["count"] += 1
    try:
        yield
    finally:
        _open["count"] -= 1


def deferring() -> bool:
    """Whether backward passes may return weight gradients that are filled later."""
    return _open["count"] > 0


class _Chunk:
    """Gradients that go down in one copy: [room] floats on the host, and what fills them."""

    def __init__(self, near: torch.Tensor) -> None:
        self.near = near
        self.used = 0
        self.far: List[torch.Tensor] = []
        self.flat: Optional[torch.Tensor] = None
        self.event: Any = None


class LateGradients:
    """The unfilled gradients of backward passes, on their way by the lane `side`. Passes may run
    inside of others (a checkpointed block's): what is pending is filled when another one begins."""

    def __init__(self, lanes: Lanes, host: HostMemory, ledger: Ledger) -> None:
        self._lanes, self._host, self._ledger = lanes, host, ledger
        self._chunks: List[_Chunk] = []
        #: Per pass, the addresses of parameters that have a gradient from it.
        self._seen: Dict[int, Set[int]] = {}
        self._pass: Optional[int] = None
        #: Floats of the last pass, so that the next one's memory is not larger than it needs.
        self._expected = CHUNK_BYTES // 4

    def may_wait(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether autograd will only pass these parameters' gradients on. What is pending is
        filled where it will be added to, and where it is of a pass that failed or that this one is
        inside of: the same layers may be about to write to the same memory. Never before torch 2.0,
        where a pass cannot be told from one inside of it."""
        current = torch_compat.backward_id()
        if current is None:
            return False
        if current != self._pass:
            self._fill()
        seen = self._seen.get(current, ())
        if any(each.data_ptr() in seen for each in parameters):
            self._fill()
            return False
        return all(_is_left_alone(each) for each in parameters)

    def add(
        self, parameters: Sequence[torch.Tensor], far: Sequence[torch.Tensor]
    ) -> List[torch.Tensor]:
        """Host tensors that will hold `far`, the parameters' gradients, which the side lane is
        computing. Only for what `may_wait`."""
        current = torch_compat.backward_id()
        assert current is not None
        if current not in self._seen:
            engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(lambda: self._settle(current))
            self._seen[current] = set()
            if len(self._seen) > _PASSES:  # passes that failed never settle
                del self._seen[min(self._seen)]
        self._pass = current
        self._seen[current].update(each.data_ptr() for each in parameters)
        return [self._placed(each) for each in far]

    def _settle(self, current: int) -> None:
        """The pass is over."""
        self._seen.pop(current, None)
        self._fill()

    def _fill(self) -> None:
        chunks, self._chunks = self._chunks, []
        if not chunks:
            return
        home = self._lanes.begin()
        try:
            for chunk in chunks:
                self._send(chunk)
            with self._ledger.stage(ALL_LAYERS, "weight_grad", "wait"):
                for chunk in chunks:
                    self._lanes.sync(chunk.event)
        finally:
            self._lanes.end(home)
        self._expected = sum(chunk.used for chunk in chunks)

    def _placed(self, far: torch.Tensor) -> torch.Tensor:
        count = far.numel()
        if not self._chunks or self._chunks[-1].used + count > self._chunks[-1].near.numel():
            if self._chunks:
                self._send(self._chunks[-1])
            self._chunks.append(self._chunk(count))
        chunk = self._chunks[-1]
        # One operator in place of two: this is done for each layer while the host is what is late.
        near = chunk.near.as_strided(far.shape, _strides(far.shape), chunk.used)
        chunk.used += count
        chunk.far.append(far)
        return near

    def _chunk(self, least: int) -> _Chunk:
        room = max(least, min(self._expected, CHUNK_BYTES // 4))
        return _Chunk(self._host.fresh((room,), torch.float32).fill_(float("nan")))

    def _send(self, chunk: _Chunk) -> None:
        """Queue a chunk's copy, once."""
        if chunk.flat is not None:
            return
        ledger, lanes, side = self._ledger, self._lanes, self._lanes.side
        lanes.on(side)
        with ledger.stage(ALL_LAYERS, "weight_grad", "reshape", stream=side):
            parts = [each.reshape(-1) for each in chunk.far]
            chunk.flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        with ledger.stage(
            ALL_LAYERS, "weight_grad", "from_device", stream=side, from_device=4 * chunk.used
        ):
            chunk.near[: chunk.used].copy_(chunk.flat, non_blocking=True)
        chunk.event = lanes.own_mark(side)
        chunk.far = []


def _strides(shape: Sequence[int]) -> List[int]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def _is_left_alone(parameter: torch.Tensor) -> bool:
    """Whether nothing will read its gradient before the pass ends, as far as its own state says.
    Late ones are contiguous: for a parameter of another order `backward` would copy them."""
    hooks = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    plain = parameter.is_leaf and parameter.is_contiguous()
    return plain and parameter.grad is None and not any(hooks)
