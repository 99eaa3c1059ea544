"""What a network of given widths costs, before it is converted: multiply-accumulates, bits of
weights, and a proxy of energy.

The proxy is the field's bit operations: the sum over layers of MACs · weight bits · activation
bits, as the area and energy of an array multiplier grow. It knows nothing of memory, and no device
draws it: it ranks allocations of one network, and is no figure in joules. All of it is counted on
the float network: a converted one hides its weights and shapes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.measure.cost import UncountableError, count
from narrowgauge_lab.quant.converted import converted_layers
from narrowgauge_lab.quant.layers import layers_of

__all__ = ["FLOAT_BITS", "LayerWork", "Widths", "bit_operations", "layer_work", "stored_bytes"]

FLOAT_BITS = 32
#: Layer -> bits of its weights and of its inputs. Layers that are not named stay in float.
Widths = Mapping[str, Tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class LayerWork:
    """Of one layer and one image: multiply-accumulates of all its calls, and how many weights and
    output channels it has."""

    macs: int
    weights: int
    channels: int


def layer_work(model: nn.Module, example: torch.Tensor) -> Dict[str, LayerWork]:
    """Run `model`, in float, once on `example` [B, …] and count each of its convolutions and linear
    layers, in the model's order; one that is never reached has no MACs.

    Raises UncountableError for a converted network, BadValueError for one without such layers, as
    a fake-quantised one is: what it was made of counts.
    """
    hidden = converted_layers(model)
    if hidden:
        raise UncountableError(
            "the cost of a converted network cannot be counted",
            why=f"{', '.join(hidden[:3])} hide their weights, so they would count as nothing",
            next_step="count the float network before it is converted",
        )
    layers = layers_of(model)
    if not layers:
        raise BadValueError(
            f"this {type(model).__name__} has no layer whose work is counted",
            why="convolutions and linear layers are, as torch has them",
            next_step="count the float network, before anything of it is replaced",
        )
    macs = dict.fromkeys(layers, 0)
    inputs: Dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, given: Tuple[Any, ...]) -> None:
            inputs.setdefault(name, []).append(given[0].detach())

        return hook

    handles = [layer.register_forward_pre_hook(keep(name)) for name, layer in layers.items()]
    try:
        with in_eval_mode(model), torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    for name, calls in inputs.items():
        macs[name] = sum(count(layers[name], each).macs for each in calls) // len(example)
    return {
        name: LayerWork(macs[name], layer.weight.numel(), _channels(layer))
        for name, layer in layers.items()
    }


def bit_operations(work: Mapping[str, LayerWork], widths: Widths) -> int:
    """Σ MACs · weight bits · activation bits; of layers without widths 32 bits each."""
    total = 0
    for name, each in work.items():
        weight, activation = widths.get(name, (FLOAT_BITS, FLOAT_BITS))
        total += each.macs * weight * activation
    return total


def stored_bytes(model: nn.Module, work: Mapping[str, LayerWork], widths: Widths) -> int:
    """Bytes of `model` (float) with the weights of the layers in `widths` packed at their bits, a
    float32 scale for each output channel, and all else (biases, statistics) as it is now. Neither
    names nor an archive around it: those are the format's."""
    tensors = (*model.parameters(), *model.buffers())
    total = sum(each.numel() * each.element_size() for each in tensors)
    layers = layers_of(model)
    for name, (bits, _) in widths.items():
        each, element = work[name], layers[name].weight.element_size()
        total += -(-each.weights * bits // 8) + 4 * each.channels - each.weights * element
    return total


def _channels(layer: nn.Module) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)
