"""A short training on of a network that was changed after its training: one pass, and no record of
its own, for experiments that do it to many variants of one network. Longer ones are `training`'s.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.distributed import ALONE
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.precision import Mode
from narrowgauge_lab.stepping import Stepper

__all__ = ["fine_tune"]


def fine_tune(
    net: nn.Module,
    feed: Feed,
    mode: Mode,
    *,
    images: int,
    batch_size: int,
    rate: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    seed: int = 0,
) -> bool:
    """Train `net`, which gives logits [B, classes], in place by cross entropy and SGD at a constant
    rate, on `images` images of `feed` (at most all of them), each once, drawn and augmented by
    `seed`; its mode stays. False where a loss was not finite: the weights are then of no use.

    Steps run launch by launch: to capture one takes longer than a short pass saves.
    """
    count = min(images, len(feed))
    if count < 1:
        return True
    if feed.augmentation.active:
        feed.redraw(torch_compat.generator_for(mode.device, seed))
    generator = torch_compat.generator_for(torch.device("cpu"), seed)
    order = torch.randperm(len(feed), generator=generator)[:count].to(mode.device)
    optimizer = SGD(net, rate, momentum, weight_decay)
    step = Stepper(net, optimizer, feed, mode, ALONE, batch_size, "off")
    training = net.training
    net.train()
    step.begin()
    for indices in order.split(batch_size):
        step(indices)
        if step.stopped():
            break
    net.train(training)
    return math.isfinite(float(step.totals[0]))
