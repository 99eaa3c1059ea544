"""Statistics of batch normalisation taken anew, as weights or inputs have changed since training.

Plain means over some batches, of all batches alike, in place of the running averages that training
left; nothing learns. Only normalisation is in training mode meanwhile, so that nothing is dropped
out and no block is left out.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Iterable, Iterator, List

import torch
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.precision import Mode

__all__ = ["normalisations", "reestimate", "reestimate_from"]


def reestimate(
    net: nn.Module, feed: Feed, mode: Mode, *, images: int, batch_size: int, seed: int
) -> int:
    """Take the running statistics anew over the first `images` of `feed` in batches, with
    augmentation drawn by `seed`; weights and modes stay. The images that it took: 0 changes
    nothing.
    """
    count = min(images, len(feed))
    if count > 0 and feed.augmentation.active:
        feed.redraw(torch_compat.generator_for(mode.device, seed))
    parts = torch.arange(count, device=mode.device).split(batch_size) if count > 0 else ()
    return reestimate_from(net, (feed.batch(indices)[0] for indices in parts), mode.autocast)


def reestimate_from(
    net: nn.Module,
    batches: Iterable[torch.Tensor],
    context: Callable[[], ContextManager[Any]] = contextlib.nullcontext,
) -> int:
    """The same over `batches`, each what `net` takes [B, …], every forward pass within `context()`;
    the images that it took. Batches count alike, whatever their sizes."""
    norms = normalisations(net)
    taken = 0
    with _measuring(net, norms), torch.no_grad():
        for number, images in enumerate(batches):
            for norm in norms:
                norm.momentum = 1.0 / (number + 1)  # of all batches alike; the first forgets
            with context():
                net(images)
            taken += len(images)
    return taken


def normalisations(net: nn.Module) -> List[Any]:
    """The modules of `net` that keep running statistics with a momentum: torch's batch
    normalisations, and others of that form."""
    return [
        each
        for each in net.modules()
        if isinstance(getattr(each, "running_mean", None), torch.Tensor)
        and hasattr(each, "momentum")
    ]


@contextlib.contextmanager
def _measuring(net: nn.Module, norms: List[Any]) -> Iterator[None]:
    """Only `norms` in training mode; then modes and momenta are as they were."""
    before = [norm.momentum for norm in norms]
    with in_eval_mode(net):
        try:
            for norm in norms:
                norm.training = True
            yield
        finally:
            for norm, momentum in zip(norms, before):
                norm.momentum = momentum
