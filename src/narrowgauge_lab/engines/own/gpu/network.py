"""A network of our own kernels on a CUDA device: made ready for a batch size, replayed as a graph.

Activations never leave the format: each kernel adds bias and residual, clamps and writes what the
next one reads. In 8 bits weights have one scale per output channel and activations one per tensor;
int8 sums are int32, fp8 sums are as wide as the tensor cores keep them, which on Hopper is less
than float32. int8 has no NaN: one in the images becomes some number, and the logits do not show it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple

import torch

from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.engines.base import LayerFact
from narrowgauge_lab.engines.graph import CapturedCall, capture
from narrowgauge_lab.engines.own.gpu.lowered import Lowered
from narrowgauge_lab.engines.own.gpu.memory import Memory
from narrowgauge_lab.engines.own.gpu.phases import Phases
from narrowgauge_lab.engines.own.gpu.tuning import Settled, Tuned, faster, restore, tune
from narrowgauge_lab.engines.own.gpu.work import Work
from narrowgauge_lab.measure.probe import Observation, observe

__all__ = ["OwnNetwork"]


class OwnNetwork:
    """Takes float images [B, C, H, W] of any strides and gives logits [B, …] in float32, in memory
    that the next call with the same batch size writes over.

    The first call with a batch size allocates, settles the kernels that `settled` does not know
    and, with `graph`, captures; later ones copy the images and replay. Images that lie where those
    of the first call lay are not copied: a second graph reads them there.
    """

    def __init__(
        self,
        network: Lowered,
        settled: Optional[Settled] = None,
        *,
        graph: bool = True,
        tuned: bool = True,
        search_s: float = 40.0,
        phases: Optional[Phases] = None,
    ) -> None:
        """`search_s`: about so many seconds may be spent where problems are not settled yet.
        `phases`: which has phases from before, and gets those of here."""
        self.network = network
        self.settled: Settled = {} if settled is None else settled
        #: What was measured because nobody knew it, for each batch size that was prepared.
        self.tunings: List[Tuned] = []
        self.phases = phases or Phases()
        self._graph, self._tuned, self._search_s = graph, tuned, search_s
        self._ready: Dict[Tuple[int, torch.dtype], _Ready] = {}
        #: All that were prepared, in order.
        self._made: List[_Ready] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        key = (int(x.shape[0]), x.dtype)
        # Buffers may be written both by callers in inference mode and by others.
        with torch_compat.inference_mode():
            if key not in self._ready:
                images = torch.empty(x.shape, dtype=x.dtype, device=self.network.device)
                images.copy_(x)
                self._ready[key] = self._strictly_prepared(images, x)
            return self._ready[key](x)

    def bound(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A call for what is in `x` then, on the device: it is read where it lies, not copied."""
        with torch_compat.inference_mode():
            ready = self._strictly_prepared(x)
        if ready.replay is not None:
            return ready.replay

        def call() -> torch.Tensor:
            with torch_compat.inference_mode():
                return ready.run()

        return call

    def layers(self) -> Tuple[LayerFact, ...]:
        """What each step of the last prepared batch size runs as."""
        if not self._made:
            return ()
        work, form = self._made[-1].work, self.network.form
        return tuple(
            LayerFact(each.layer, each.operator, each.running().provider, each.running().kernel,
                      form.name)
            for each in work.launches()
        )  # fmt: skip

    def observations(self) -> Tuple[Observation, ...]:
        """The products of the last prepared batch size, as they were captured."""
        return self._made[-1].observations if self._made else ()

    @property
    def measured(self) -> int:
        """How many problems were measured."""
        return sum(each.problems for each in self.tunings)

    def nbytes(self) -> int:
        return self.network.nbytes() + sum(each.nbytes() for each in self._made)

    def _strictly_prepared(
        self, images: torch.Tensor, given: Optional[torch.Tensor] = None
    ) -> _Ready:
        """What torch runs is captured in the network's own float32, whatever is allowed then.
        `given`: where images may lie too."""
        tf32 = tf32_flags.tf32_set_to(self.network.form.name == "tf32")
        with _on(self.network.device), tf32:
            return self._prepare(images, given)

    def _prepare(self, images: torch.Tensor, given: Optional[torch.Tensor]) -> _Ready:
        network, batch = self.network, int(images.shape[0])
        with self.phases.of("launches"):
            memory = network.memory(batch)
            work = Work(network, memory, images)
        self._settle(work)
        with self.phases.of("capture"):
            replay = self._captured(work, batch) if self._graph else None
        seen = observe(work.run) if replay is None else replay.observations
        there = None
        if replay is not None and given is not None and given.device == images.device:
            given = given.detach()
            with self.phases.of("capture in place"):
                there = _There(given, capture(work.reading(given), network.device))
        self._made.append(_Ready(images, memory, work, replay, seen, there))
        return self._made[-1]

    def _settle(self, work: Work) -> None:
        """Choose what every step runs as. Afterwards all of it has run once, or will run before it
        is captured."""
        launches, fresh = work.launches(), {}
        if self._tuned:
            with self.phases.of("restore"):
                fresh = restore(launches, self.settled)
        if not self._tuned:
            work.run()
        if fresh:
            self.tunings.append(
                tune(launches, fresh, self.settled, work.run, self._search_s, self.phases)
            )

    def _captured(self, work: Work, batch: int) -> CapturedCall[torch.Tensor]:
        """The network as a graph, with some steps beside others where that is faster."""
        device, name = self.network.device, f"beside {batch}"
        if not work.has_besides or not self._tuned:
            return capture(work.run, device)
        known = self.settled.get(name)
        if known is not None:
            work.beside = bool(known.get("beside"))
            return capture(work.run, device)
        graphs = {}
        for work.beside in (False, True):
            graphs[work.beside] = capture(work.run, device)
        work.beside = faster(graphs[True], graphs[False])
        self.settled[name] = {"beside": work.beside}
        return graphs[work.beside]


@dataclasses.dataclass(frozen=True)
class _There:
    """The network as a graph that reads `images` where they lie: the caller's, kept with it."""

    images: torch.Tensor
    replay: CapturedCall[torch.Tensor]

    def is_at(self, x: torch.Tensor) -> bool:
        """Whether x is that memory, in that order."""
        mine = self.images
        return (
            x.data_ptr() == mine.data_ptr()
            and x.stride() == mine.stride()
            and x.shape == mine.shape
            and x.dtype == mine.dtype
            and x.device == mine.device
        )


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A network at one batch size; `replay`: None where it is launched step by step."""

    images: torch.Tensor
    memory: Memory
    work: Work
    replay: Optional[CapturedCall[torch.Tensor]]
    observations: Tuple[Observation, ...]
    there: Optional[_There] = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.there is not None and self.there.is_at(x):
            return self.there.replay()
        self.images.copy_(x)
        return self.run()

    def run(self) -> torch.Tensor:
        if self.replay is not None:
            return self.replay()
        with _on(self.images.device):
            return self.work.run()

    def nbytes(self) -> int:
        images = self.images.numel() * self.images.element_size()
        pool = self.replay.pool_bytes if self.replay is not None else 0
        pool += self.there.replay.pool_bytes if self.there is not None else 0
        return images + self.memory.nbytes() + pool


def _on(device: torch.device) -> ContextManager[Any]:
    """Triton and cuDNN launch on the current device, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
