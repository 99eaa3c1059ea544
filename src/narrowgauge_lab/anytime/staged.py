"""A network's stages by torch.compile, each by itself.

Gradients that are projected are taken exit by exit, each by a backward pass of its own. Of a whole
network that is compiled each would go through all of it, and free what the next one needs. Compiled
by stages, the pass of an exit goes through those up to it, and leaves what they keep.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.compiling import Forward

__all__ = ["StagedForward"]

_Parts = Tuple[torch.Tensor, State, Optional[torch.Tensor]]


class StagedForward(Forward):
    """`call`, which runs `model`, with the model's stages compiled, for batches of `batch` images.

    What is compiled may be differentiated again and again.
    """

    def __init__(self, call: Callable[..., Any], model: AnytimeNetwork, batch: int) -> None:
        super().__init__(call, batch, self._by_stages)
        self._model = model
        #: By exit, and whether with its head.
        self._stages: Dict[Tuple[int, bool], Callable[[State], _Parts]] = {}

    def _by_stages(self, *given: Any) -> Any:
        with self._answering_by_stages(), torch_compat.keeping_buffers():
            return self._call(*given)

    @contextlib.contextmanager
    def _answering_by_stages(self) -> Iterator[None]:
        """The model answers by compiled stages."""
        # An object's own name goes before its class's method.
        self._model.__dict__["advance"] = self._advance
        try:
            with warnings.catch_warnings():
                # A compiler looks whether what it is given has a gradient; a state has none.
                warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor")
                yield
        finally:
            del self._model.__dict__["advance"]

    def _advance(self, exit: int, state: State, head: bool = True) -> Answer:
        key = (exit, head)
        if key not in self._stages:
            self._stages[key] = torch_compat.compiled(self._stage(*key), "default", whole=True)
        return Answer(*self._stages[key](state))

    def _stage(self, exit: int, head: bool) -> Callable[[State], _Parts]:
        model, advance = self._model, type(self._model).advance

        def stage(state: State) -> _Parts:
            found = advance(model, exit, state, head)
            return found.logits, found.state, found.macs

        # The compiler keeps eight versions of a code object at most: each stage has one of its own.
        stage.__code__ = stage.__code__.replace(co_name=f"stage{exit}")
        return stage
