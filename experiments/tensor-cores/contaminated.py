"""The original's protocol on purpose: all levels in one process, apex's patch and all.

A row is one level, measured in a process that went through the levels before it in the original's
order, each with its warm-up and its loop. So five rows show what the original's five lines showed,
and each can be repeated.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.agreement import check_output
from narrowgauge_lab.measure.cost import Cost, count
from narrowgauge_lab.measure.energy import Source
from narrowgauge_lab.measure.probe import (
    observe,
    precision_ran,
    require_precision,
    tf32_by_arithmetic,
)
from narrowgauge_lab.measure.recording import record_cost, record_energy, record_kernels

from . import setups
from .apex import Amp, patched_functions
from .evidence import check_loss, reference_output
from .inference import loop_for, make_images
from .linear import TRAINING_WARM_UPS, Bench
from .network import Inference, Training
from .setups import LEVELS, MODES, Setup
from .times import Loop, measure_times, record_times, run_unsynchronised, synchronise

__all__ = [
    "INFERENCE_ORDER",
    "TRAINING_ORDER",
    "measure_inference",
    "measure_training",
    "predicted",
]

Call = Callable[[], torch.Tensor]
Prepare = Callable[[str], Call]

INFERENCE_ORDER = ("O3", "O2", "O1", "O0", "fp32")
TRAINING_ORDER = ("fp32", "O0", "O1", "O2", "O3")
#: The original's, before each loop.
_INFERENCE_WARM_UPS = 3


def predicted(order: Tuple[str, ...], level: str) -> str:
    """What convolutions and products run in at `level`, if the mechanism is what we say it is.

    O2 and O3 convert the model. From O1 on the patch is there, and everything after it is fp16.
    """
    reduced = level in ("O2", "O3") or order.index(level) >= order.index("O1")
    return "fp16" if reduced else "fp32"


def measure_inference(ctx: RowContext, workload: Inference, source: Optional[Source]) -> None:
    """One level of the ResNet-50 bench."""
    level = _require(ctx, INFERENCE_ORDER)
    batch, device = int(ctx.parameters["batch"]), ctx.device
    images = make_images(ctx, workload)
    model = workload.build()
    cost = count(model, images[:1])
    # Before the patch, which would make the reference half as well.
    reference = reference_output(model, images, device)
    full = images.to(device)
    half = full.half()
    amp = Amp()

    def prepare(name: str) -> Call:
        network = (model if name == level else workload.build()).to(device)
        if name == "fp32":
            return _without_gradients(network, full)
        return _without_gradients(amp.initialize(network, name), half)

    loop = loop_for(ctx)
    call = _go_through(ctx, INFERENCE_ORDER, prepare, _INFERENCE_WARM_UPS, loop)
    check_output(ctx, call().clone(), reference, predicted(INFERENCE_ORDER, level))
    _record(ctx, call, batch, loop, cost, predicted(INFERENCE_ORDER, level), source)


def measure_training(ctx: RowContext, workload: Training, source: Optional[Source]) -> None:
    """One level of a linear training bench."""
    level = _require(ctx, TRAINING_ORDER)
    amp, batch = Amp(), int(ctx.parameters["batch"])
    kept: List[Bench] = []

    def prepare(name: str) -> Call:
        kept.clear()  # as in the original, the next layer takes the place of the last
        mode = MODES[name]
        setup = Setup(precision=mode.precision, form=mode.form)
        kept.append(Bench(workload, batch, setup, ctx.device, amp, name))
        if name == level:
            found = kept[0].predict()
            check_output(ctx, found, kept[0].reference, predicted(TRAINING_ORDER, name))
        return kept[0]

    loop = Loop(workload.iterations, f"{workload.iterations} iterations")
    call = _go_through(ctx, TRAINING_ORDER, prepare, TRAINING_WARM_UPS, loop)
    check_loss(ctx, call())
    cost = kept[0].cost()
    _record(ctx, call, batch, loop, cost, predicted(TRAINING_ORDER, level), source)


def _go_through(
    ctx: RowContext, order: Tuple[str, ...], prepare: Prepare, warm_ups: int, loop: Loop
) -> Call:
    """Take this process through the levels up to the row's own; the call of that one.

    Records what each of them ran in; the row is INVALID where the mechanism predicts otherwise.
    """
    tf32_flags.allow_tf32(False)
    if ctx.device.type == "cuda":
        torch.backends.cudnn.benchmark = False
    tf32 = tf32_by_arithmetic(ctx.device)
    history: List[Dict[str, Any]] = []
    for name in order[: order.index(ctx.parameters["mode"]) + 1]:
        call = prepare(name)
        for _ in range(warm_ups):
            call()
        seconds = run_unsynchronised(call, loop.calls)
        synchronise(ctx.device)
        seen = observe(call)
        ran, expected = precision_ran(seen, tf32), predicted(order, name)
        if ran != expected:
            ctx.invalid(f"{LEVELS[name]} ran in {ran} where the mechanism to show says {expected}")
        history.append(
            {
                "level": LEVELS[name],
                "patched": patched_functions(),
                "operators": [str(each) for each in seen],
                "ran": ran,
                "seconds_unsynchronised": seconds,
            }
        )
    ctx.fact("history", history)
    ctx.fact("patched_functions", patched_functions())
    if loop.calls > 0:
        ctx.metric("seconds_unsynchronised", seconds, unit="s", source="monotonic")
    require_precision(ctx, expected, seen, tf32)
    return call


def _record(
    ctx: RowContext,
    call: Call,
    batch: int,
    loop: Loop,
    cost: Cost,
    precision: str,
    source: Optional[Source],
) -> None:
    """The level's times as they really are, and what every row says beside them."""
    times = measure_times(ctx, call, loop, eager=True)
    record_times(ctx, times, batch, loop)
    record_cost(ctx, cost, call, batch, times.latency, precision)
    record_kernels(ctx, call)
    record_energy(ctx, call, batch, source)


def _require(ctx: RowContext, order: Tuple[str, ...]) -> str:
    """The row's level. Raises NotApplicableError for what the original did not do."""
    level: str = ctx.parameters["mode"]
    if level not in order:
        raise NotApplicableError(
            f"the contaminated protocol has no level '{level}'",
            why="it repeats the original, in the original's order",
            next_step="-p mode=" + ",".join(order),
        )
    mode = MODES[level]
    if setups.from_parameters(ctx.parameters) != Setup(precision=mode.precision, form=mode.form):
        raise NotApplicableError(
            "the contaminated protocol has the original's settings",
            why="eager, NCHW, nothing folded, cudnn.benchmark off",
            next_step="leave layout, engine, fold, cudnn_benchmark and rung at their defaults",
        )
    setups.require(Setup(precision="fp16"), ctx.device)
    return level


def _without_gradients(forward: Callable[[torch.Tensor], torch.Tensor], images: Any) -> Call:
    def call() -> torch.Tensor:
        with torch.no_grad():
            return forward(images)

    return call
