"""From a trained float network to what runs it in integers, by each method."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.codec import write_atomic
from narrowgauge_contract.errors import BadValueError, SkippedError
from narrowgauge_contract.placement import document_hash
from narrowgauge_lab import training
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.anytime.objective import ExitLosses
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.optim import Adam
from narrowgauge_lab.quant import allocation, executors, qat
from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
from narrowgauge_lab.quant.dynamic import dynamic, dynamic_int8, linear_layers
from narrowgauge_lab.quant.energy import LayerWork, Widths, layer_work
from narrowgauge_lab.quant.layers import LayerScales, fake_quantized
from narrowgauge_lab.schedule import Cosine

from .nets import NETS

__all__ = ["LADDER", "WIDTHS", "Quantised", "Source", "quantise", "require_method", "rungs"]

#: What greedy search chooses from, and what a ladder has on its rungs.
WIDTHS = (8, 6, 4, 2)
#: Images that go through together where nothing is trained.
_TOGETHER = 100
#: The same where the loss of a whole split is summed.
_SCORED_TOGETHER = 500
#: The parameters of a row that say what its layers lose: all of a run are alike in the others.
_OF_THE_TABLE = ("net", "width", "observer", "weight_observer", "calibration", "executor")
#: The method that has several answers.
LADDER = "ladder"
_TRAINED = ("qat", "greedy-qat")
#: Methods that choose no range beforehand.
_UNCALIBRATED = ("fp32", "dynamic")


@dataclasses.dataclass(frozen=True)
class Source:
    """A float network in eval mode with BatchNorm folded, the images it was trained on and, of
    those held out, the ones to calibrate on. `work`: what its layers do to one image."""

    model: nn.Module
    splits: Splits
    images: torch.Tensor
    work: Mapping[str, LayerWork]

    @classmethod
    def of(cls, ctx: RowContext, model: nn.Module, splits: Splits) -> Source:
        wanted = torch.arange(ctx.parameters["calibration"], device=ctx.device)
        images, _ = splits.validation.batch(wanted)
        example, _ = splits.test.batch(torch.arange(1, device=ctx.device))
        return cls(model, splits, images, layer_work(model, example))

    def batches(self) -> Tuple[torch.Tensor, ...]:
        """None at all where there are no images: `calibrate` says so."""
        return self.images.split(_TOGETHER) if len(self.images) else ()


@dataclasses.dataclass(frozen=True)
class Quantised:
    """`forward` answers with logits, or is a network with exits; `twin` is the same in float32 by
    the same means. `widths`: of the layers that run integers. `clocked`: whether time means
    anything, which it does not where integers are only simulated."""

    forward: Callable[[torch.Tensor], Any]
    twin: Callable[[torch.Tensor], Any]
    widths: Widths
    how: str
    clocked: bool
    file_bytes: Optional[int] = None


def require_method(ctx: RowContext, exits: int) -> None:
    """Before anything is trained: raises what `require_executor` raises, SkippedError for what an
    executor does not do, BadValueError for more images to calibrate on than are held out, and
    CalibrationError for none where ranges are of them."""
    method, executor = ctx.parameters["method"], ctx.parameters["executor"]
    executors.require_executor(executor, ctx.parameters["bits"], ctx.device)
    _require_images(method, ctx.parameters["calibration"], ctx.parameters["validation"])
    if executor in ("onnxruntime", "tensorrt") and exits > 1:
        raise SkippedError(
            f"{executor} runs networks of one answer here",
            why=f"this one has {exits}, and a file is of one",
            next_step="-p executor=torch, or fake",
        )
    if executor in ("onnxruntime", "tensorrt") and method == "dynamic":
        raise SkippedError(
            f"{executor} runs nothing dynamic here",
            why="its files have the ranges of activations written into them",
            next_step="-p executor=torch, or fake",
        )
    if executor == "torch" and method == "dynamic" and ctx.parameters["bits"] != 8:
        raise SkippedError(
            f"torch runs nothing dynamic of {ctx.parameters['bits']} bits",
            why="its operator takes the range of the inputs and rounds them to a byte itself",
            next_step="-p bits=8, or -p executor=fake",
        )
    if executor == "tensorrt" and method not in ("static", "fp32"):
        raise SkippedError(
            f"tensorrt runs no {method} here",
            why="it finds scales of its own, so what another method finds is lost",
            next_step="-p method=static",
        )


def _require_images(method: str, wanted: int, held: int) -> None:
    if wanted > held:
        raise BadValueError(
            f"{wanted} images to calibrate on",
            why=f"{held} training images are held out for it",
            next_step=f"-p validation={wanted}, or fewer to calibrate on",
        )
    if not wanted and method not in _UNCALIBRATED:
        raise CalibrationError(
            "there is no calibration data",
            why=f"calibration=0, and {method} takes the ranges of activations from images",
            next_step="-p calibration=500, or -p method=dynamic",
        )


def quantise(ctx: RowContext, source: Source) -> Optional[Quantised]:
    """By the row's method, bits, observers and executor. None where a training diverged: the row
    is then INVALID."""
    method, executor = ctx.parameters["method"], ctx.parameters["executor"]
    if method == "fp32":
        twin = _twin(ctx, source)
        return Quantised(twin.forward, twin.forward, {}, twin.how, False, twin.file_bytes)
    if method == "dynamic":
        return _dynamic(ctx, source)
    if executor == "tensorrt":
        return _by_tensorrt(ctx, source)
    scales = _scales(ctx, source)
    model = source.model
    if method in _TRAINED:
        trained = _trained(ctx, source, scales)
        if trained is None:
            return None
        model, scales = qat.float_of(trained), qat.scales_of(trained)
    return executed(ctx, source, model, scales)


def rungs(ctx: RowContext, source: Source) -> Dict[int, Quantised]:
    """Bits -> the network statically quantised to them, fewest first, up to the row's bits."""
    widths = [width for width in sorted(WIDTHS) if width <= ctx.parameters["bits"]]
    return {
        width: executed(
            ctx, source, source.model,
            calibrate(source.model, source.batches(), config_of(ctx, width)),
        )
        for width in widths
    }  # fmt: skip


def config_of(ctx: RowContext, bits: int) -> QuantConfig:
    """At so many bits, activations at fewer where the executor needs it."""
    parameters = ctx.parameters
    return QuantConfig(
        activation_bits=executors.activation_bits(parameters["executor"], bits),
        weight_bits=bits,
        activation_observer=parameters["observer"],
        weight_observer=parameters["weight_observer"],
    )


def executed(
    ctx: RowContext, source: Source, model: nn.Module, scales: Mapping[str, LayerScales]
) -> Quantised:
    """`model`, which has the layers of the source, by `scales`."""
    name = ctx.parameters["executor"]
    with torch.no_grad():
        done = executors.execute(name, model, scales, _example(source), _threads(ctx))
    return Quantised(
        done.forward,
        _twin(ctx, source).forward,
        {layer: (each.weight.bits, each.input.bits) for layer, each in scales.items()},
        done.how,
        name != "fake",
        done.file_bytes,
    )


def _scales(ctx: RowContext, source: Source) -> Dict[str, LayerScales]:
    bits = ctx.parameters["bits"]
    if not ctx.parameters["method"].startswith("greedy"):
        return calibrate(source.model, source.batches(), config_of(ctx, bits))
    tables = {
        width: calibrate(source.model, source.batches(), config_of(ctx, width)) for width in WIDTHS
    }
    losses = _losses(ctx, source, tables)
    costs = {
        name: {width: float(each.macs * width * width) for width in WIDTHS}
        for name, each in source.work.items()
        if name in losses
    }
    budget = sum(each.macs * bits * bits for each in source.work.values())

    def judge(widths: Mapping[str, int]) -> float:
        return _likelihood(
            ctx, source, fake_quantized(source.model, allocation.mixed(tables, widths))
        )

    search = allocation.search(losses, costs, budget, judge)
    found = search.best
    ctx.fact("allocation", found.widths)
    ctx.fact("allocation_steps", [list(step) for step in found.steps])
    tried = [{"widths": each.widths, "log_likelihood": score} for each, score in search.tried]
    ctx.fact("allocations_tried", tried)
    ctx.fact("budget_bit_operations", budget)
    rows = [
        {"layer": name, "bits": width, "loss": loss}
        for name, row in losses.items()
        for width, loss in row.items()
    ]
    ctx.fact("sensitivity", rows)
    return allocation.mixed(tables, found.widths)


def _losses(
    ctx: RowContext, source: Source, tables: Mapping[int, Mapping[str, LayerScales]]
) -> Dict[str, Dict[int, float]]:
    """What each layer loses at each width: of rows that differ in the budget or in what is done
    afterwards the first leaves it for the others, in the run's folder."""
    asked = {name: ctx.parameters[name] for name in _OF_THE_TABLE}
    path = ctx.out / f"sensitivity-{document_hash([ctx.seed, asked])[:12]}.json"
    if not path.is_file():
        found = allocation.width_losses(
            source.model, tables, functools.partial(_likelihood, ctx, source)
        )
        write_atomic(path, json.dumps(found).encode())
    # Numbers come back as they were, bit for bit; widths, as names of an object, as text.
    kept: Mapping[str, Mapping[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    return {name: {int(bits): loss for bits, loss in row.items()} for name, row in kept.items()}


def _likelihood(ctx: RowContext, source: Source, model: nn.Module) -> float:
    """Mean log-likelihood of the true classes on the held-out images, mean over the exits [nats]:
    larger is better, and finer than an accuracy."""
    feed, total = source.splits.validation, 0.0
    model.eval()
    with torch.no_grad():
        for indices in torch.arange(len(feed), device=ctx.device).split(_SCORED_TOGETHER):
            images, labels = feed.batch(indices)
            given = model(images)
            answers = [given] if isinstance(given, torch.Tensor) else given
            losses = [F.cross_entropy(each.float(), labels, reduction="sum") for each in answers]
            total -= float(sum(losses)) / len(losses)
    return total / len(feed)


def _trained(
    ctx: RowContext, source: Source, scales: Mapping[str, LayerScales]
) -> Optional[nn.Module]:
    parameters = ctx.parameters
    net = qat.trainable(source.model, scales, steps=parameters["qat_steps"] == "trained")
    exits = getattr(net, "exits", 0)
    rate = parameters["qat_lr"] or NETS[parameters["net"]].qat_rate
    epochs = parameters["qat_epochs"]
    recipe = training.Recipe(
        epochs=epochs,
        batch_size=parameters["batch_size"],
        precision="fp32",
        schedule=Cosine(rate, epochs),
        optimizer=functools.partial(Adam, rate=rate),
        graphs="off",
        objective=ExitLosses(exits) if exits else None,
    )
    # A seed of its own: or a row that trained before would draw other things than those after it.
    training.seed_everything(ctx.seed)
    splits = source.splits
    done = training.train(ctx, net, splits.training, splits.test, splits.classes, recipe)
    return net if done else None


def _dynamic(ctx: RowContext, source: Source) -> Quantised:
    executor, bits = ctx.parameters["executor"], ctx.parameters["bits"]
    config = config_of(ctx, bits)
    make = dynamic if executor == "fake" else dynamic_int8
    widths = dict.fromkeys(
        linear_layers(source.model), (config.weight_bits, config.activation_bits)
    )
    how = "linear layers alone, inputs ranged batch by batch"
    return Quantised(make(source.model, config), source.model, widths, how, executor != "fake")


# unverified: rows by TensorRT | needs a GPU and TensorRT | -p executor=tensorrt -p method=static
def _by_tensorrt(ctx: RowContext, source: Source) -> Quantised:
    most = max(_TOGETHER, ctx.parameters["test_batch_size"])
    model = source.model.cpu()
    done, twin = (
        executors.by_tensorrt(model, source.images, ctx.device, most, precision)
        for precision in ("int8", "fp32")
    )
    widths = dict.fromkeys(source.work, (8, 8))
    source.model.to(ctx.device)
    return Quantised(done.forward, twin.forward, widths, done.how, True)


def _twin(ctx: RowContext, source: Source) -> executors.Executed:
    name = ctx.parameters["executor"]
    return executors.float_twin(name, source.model, _example(source), _threads(ctx))


def _threads(ctx: RowContext) -> Optional[int]:
    """Of ONNX Runtime, whose sessions have the threads that they were made with, whatever torch is
    told while they are timed. None: as many as torch takes."""
    return ctx.parameters["threads"] or None


def _example(source: Source) -> torch.Tensor:
    return source.splits.test.batch(torch.arange(1, device=source.splits.test.labels.device))[0]
