"""Affine steps that ride in their readers: computed where they are read, and never stored."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Tuple

from torch import nn

from narrowgauge_lab.engines.own.gpu.steps import (
    AffineStep,
    ConvStep,
    PoolStep,
    Prologue,
    Step,
    sources,
)

__all__ = ["pair", "ride"]


def ride(
    steps: Tuple[Step, ...], modules: Mapping[str, nn.Module], output: str
) -> Tuple[Step, ...]:
    """Let each affine step ride in its only reader where that can take it: a 1 × 1 convolution or a
    mean, neither of which pads after it."""
    readers: Dict[str, List[Step]] = {}
    for step in steps:
        for name in sources(step):
            readers.setdefault(name, []).append(step)
    ridden: Dict[str, AffineStep] = {}
    for step in steps:
        if not isinstance(step, AffineStep) or not step.module or step.output == output:
            continue
        reading = readers.get(step.output, [])
        if len(reading) == 1 and _takes(reading[0], step, modules):
            ridden[step.output] = step
    kept: List[Step] = []
    for step in steps:
        if step.output in ridden:
            continue
        affine = ridden.get(getattr(step, "source", ""))
        if affine is not None and isinstance(step, (ConvStep, PoolStep)):
            prologue = Prologue(affine.module, affine.activation, affine.output)
            step = dataclasses.replace(step, source=affine.source, prologue=prologue)
        kept.append(step)
    return tuple(kept)


def _takes(step: Step, affine: AffineStep, modules: Mapping[str, nn.Module]) -> bool:
    if isinstance(step, ConvStep):
        conv = modules[step.module]
        assert isinstance(conv, nn.Conv2d)
        window = pair(conv.kernel_size) == (1, 1) and pair(conv.padding) == (0, 0)
        return step.source == affine.output and window and not step.depthwise
    return isinstance(step, PoolStep) and step.kind == "mean" and step.padding == 0


def pair(value: Any) -> Tuple[Any, Any]:
    """What torch takes as one number for both directions, or as two."""
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, value)
