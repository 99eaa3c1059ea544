"""Seeding of every global generator a row has."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch; an experiment calls it before the model is made."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
