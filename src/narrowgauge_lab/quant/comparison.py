"""Our scales beside those that other tools would choose for the same model and data.

    for each in compare(model, [images]):
        print(each.text())

A tool that is not installed is SKIPPED, with the reason; so is a tensor for which it has no choice.
Tools here round symmetrically, so our activations are calibrated symmetrically too.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.quant.calibration import Batch, QuantConfig, calibrate
from narrowgauge_lab.quant.layers import LayerScales, layers_of
from narrowgauge_lab.quant.parameters import QuantParams
from narrowgauge_lab.quant.peers import INPUT, WEIGHT, Choice, Peer, Place, first_of, seeing_inputs
from narrowgauge_lab.quant.toolkit import PytorchQuantization
from narrowgauge_lab.quant.trt import TensorRT

__all__ = ["SYMMETRIC", "Comparison", "Pair", "compare"]

#: 8 bits, weights narrow and per output channel, activations without a zero point.
SYMMETRIC = QuantConfig(activation_symmetric=True)
_COLUMNS = ("layer", "tensor", "method", "amax", "theirs", "scale", "theirs", "same", "steps off")


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One tensor by us and by a tool; `skipped` says why the tool has no choice for it."""

    layer: str
    tensor: str
    ours: Choice
    theirs: Optional[Choice]
    skipped: str = ""

    def to_fact(self) -> Dict[str, Any]:
        """For a record: of channels the extremes."""
        fact: Dict[str, Any] = {"layer": self.layer, "tensor": self.tensor, "skipped": self.skipped}
        fact["ours"] = _numbers(self.ours)
        if self.theirs is not None:
            fact["theirs"] = _numbers(self.theirs)
            fact["equal_codes"], fact["steps_off"] = self.equal_codes, self.steps_off
        return fact

    @property
    def equal_codes(self) -> float:
        """The share of the sample's values that both round to the same integer."""
        assert self.theirs is not None
        if not self.ours.codes.numel():
            return 1.0
        return float((self.ours.codes == self.theirs.codes).double().mean())

    @property
    def steps_off(self) -> int:
        """The most that integers of the sample differ."""
        assert self.theirs is not None
        if not self.ours.codes.numel():
            return 0
        return int((self.ours.codes - self.theirs.codes).abs().max())


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """One tool. `skipped` says why there are no pairs."""

    tool: str
    version: str
    pairs: Tuple[Pair, ...]
    skipped: str = ""

    def to_fact(self) -> Dict[str, Any]:
        """For a record."""
        return {
            "tool": self.tool,
            "version": self.version,
            "skipped": self.skipped,
            "pairs": [pair.to_fact() for pair in self.pairs],
        }

    def text(self) -> str:
        """For a terminal: of channels the largest."""
        if self.skipped:
            return f"{self.tool}: SKIPPED: {self.skipped}\n"
        rows: List[Tuple[str, ...]] = [_COLUMNS, *map(_cells, self.pairs)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = [f"{self.tool} {self.version}: ours, then theirs"]
        for row, pair in zip(rows, (None, *self.pairs)):
            words = [cell.ljust(width) for cell, width in zip(row, widths)]
            lines.append("  ".join(words).rstrip())
            if pair is not None and pair.skipped:
                lines[-1] += f"  SKIPPED: {pair.skipped}"
        return "\n".join(lines) + "\n"


def compare(
    model: nn.Module,
    batches: Sequence[Batch],
    config: QuantConfig = SYMMETRIC,
    peers: Optional[Sequence[Peer]] = None,
) -> Tuple[Comparison, ...]:
    """Calibrate `model` (float32) on `batches` by our observers and by every tool, and round the
    weights and the first batch's activations by both. `peers`: other tools than all that are known.

    Raises what `calibrate` raises, BadValueError where activations are affine.
    """
    if not config.activation_symmetric or not config.weight_symmetric:
        raise BadValueError(
            "scales with a zero point have nothing to stand beside",
            why="the other tools round symmetrically",
            next_step="QuantConfig(activation_symmetric=True)",
        )
    scales = calibrate(model, batches, dataclasses.replace(config, outputs=False))
    samples = _samples(model, batches[0], scales)
    ours = {
        (layer, tensor): _own(_params(scales, layer, tensor), sample, config, tensor)
        for (layer, tensor), sample in samples.items()
    }
    tools = (PytorchQuantization(), TensorRT()) if peers is None else peers
    return tuple(_compared(tool, model, batches, config, scales, samples, ours) for tool in tools)


def _compared(
    tool: Peer, model: nn.Module, batches: Sequence[Batch], config: QuantConfig,
    scales: Mapping[str, LayerScales], samples: Mapping[Place, torch.Tensor],
    ours: Mapping[Place, Choice],
) -> Comparison:  # fmt: skip
    missing = tool.missing()
    if missing:
        return Comparison(tool.name, "", (), missing)
    found = tool.choose(model, batches, config, scales, samples)
    pairs = []
    for place, own in ours.items():
        theirs = found[place]
        if isinstance(theirs, str):
            pairs.append(Pair(*place, own, None, theirs))
        else:
            pairs.append(Pair(*place, own, theirs))
    return Comparison(tool.name, tool.version(), tuple(pairs))


def _samples(
    model: nn.Module, batch: Batch, scales: Mapping[str, LayerScales]
) -> Dict[Place, torch.Tensor]:
    """What everybody rounds: weights, and inputs at the first batch, a layer's first where it runs
    more than once."""
    inputs: Dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def act(x: torch.Tensor) -> None:
            inputs.setdefault(name, x.float().clone())

        return act

    with seeing_inputs(model, {name: keep(name) for name in scales}):
        model(first_of(batch))
    layers = layers_of(model)
    samples: Dict[Place, torch.Tensor] = {}
    for name in scales:
        samples[name, INPUT] = inputs[name]
        samples[name, WEIGHT] = layers[name].weight.detach().float()
    return samples


def _params(scales: Mapping[str, LayerScales], layer: str, tensor: str) -> QuantParams:
    return scales[layer].input if tensor == INPUT else scales[layer].weight


def _own(params: QuantParams, sample: torch.Tensor, config: QuantConfig, tensor: str) -> Choice:
    method = config.activation_observer if tensor == INPUT else config.weight_observer
    params = params.to(sample.device)
    amax = params.scale * params.quant_max
    return Choice(amax, params.scale, params.quantize(sample), method)


def _numbers(choice: Choice) -> Dict[str, Any]:
    return {
        "method": choice.method,
        "amax": [float(choice.amax.min()), float(choice.amax.max())],
        "scale": [float(choice.scale.min()), float(choice.scale.max())],
    }


def _cells(pair: Pair) -> Tuple[str, ...]:
    ours, theirs = pair.ours, pair.theirs
    own = (f"{float(ours.amax.max()):.6g}", f"{float(ours.scale.max()):.6g}")
    if theirs is None:
        return (pair.layer, pair.tensor, ours.method, own[0], "-", own[1], "-", "-", "-")
    return (
        pair.layer, pair.tensor, theirs.method, own[0], f"{float(theirs.amax.max()):.6g}",
        own[1], f"{float(theirs.scale.max()):.6g}", f"{100 * pair.equal_codes:.2f} %",
        str(pair.steps_off),
    )  # fmt: skip
