"""From batches of data to the scales of every layer."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.quant.layers import LayerScales, layers_of
from narrowgauge_lab.quant.observers import Observer, make_observer
from narrowgauge_lab.quant.parameters import QuantParams, choose

__all__ = ["Batch", "QuantConfig", "calibrate"]

#: A model's input, or a sequence that begins with it (input and label, say).
Batch = Union[torch.Tensor, Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """How a model is quantised. The default is 8 bits as arXiv 2004.09602 recommends them:
    activations affine per tensor, weights symmetric, narrow and per output channel.

    `outputs`: whether the outputs of layers are rounded as well, which int8 execution needs.
    `skip`: patterns of the names of layers left in float (partial quantisation).
    """

    activation_bits: int = 8
    activation_symmetric: bool = False
    activation_observer: str = "min-max"
    weight_bits: int = 8
    weight_symmetric: bool = True
    weight_narrow: bool = True
    weight_observer: str = "min-max"
    per_channel: bool = True
    outputs: bool = True
    percentile: float = 99.99
    averaging: float = 0.01
    skip: Tuple[str, ...] = ()

    def activation(self) -> Observer:
        """A fresh observer of activations."""
        return make_observer(
            self.activation_observer,
            bits=self.activation_bits,
            symmetric=self.activation_symmetric,
            percentile=self.percentile,
            averaging=self.averaging,
        )

    def weight(self, layer: nn.Module) -> QuantParams:
        """The parameters of a layer's weight, from the weight itself."""
        axis = None
        if self.per_channel:
            # [inputs, outputs / groups, ...] there: groups share the scales of their outputs.
            axis = 1 if isinstance(layer, nn.modules.conv._ConvTransposeNd) else 0
        observer = make_observer(
            self.weight_observer,
            axis,
            self.weight_bits,
            self.weight_symmetric,
            self.weight_narrow,
            self.percentile,
            self.averaging,
        )
        observer.update(layer.weight)
        return choose(
            observer.range(), self.weight_bits, self.weight_symmetric, self.weight_narrow, axis
        )


class _Watch:
    """The observers of one layer, and the hook that feeds them."""

    def __init__(self, name: str, config: QuantConfig) -> None:
        self.name = name
        self.config = config
        self.input = config.activation()
        self.output = config.activation() if config.outputs else None

    def hook(self, _module: nn.Module, inputs: Tuple[Any, ...], output: torch.Tensor) -> None:
        self._update(self.input, "input", inputs[0])
        if self.output is not None:
            self._update(self.output, "output", output)

    def params(self, layer: nn.Module) -> LayerScales:
        output = None if self.output is None else self._choose(self.output)
        return LayerScales(
            self._choose(self.input),
            self._named("weight", lambda: self.config.weight(layer)),
            output,
        )

    def _choose(self, observer: Observer) -> QuantParams:
        extent = self._named("activation", observer.range)
        return choose(extent, self.config.activation_bits, self.config.activation_symmetric)

    def _update(self, observer: Observer, place: str, values: torch.Tensor) -> None:
        self._named(place, lambda: observer.update(values))

    def _named(self, place: str, act: Callable[[], Any]) -> Any:
        """What `act` gives; its error says which layer and which of its tensors."""
        try:
            return act()
        except CalibrationError as error:
            raise CalibrationError(
                f"{place} of layer {self.name}: {error.what}",
                why=error.why,
                next_step=error.next_step,
            ) from error


def calibrate(
    model: nn.Module, batches: Iterable[Batch], config: Optional[QuantConfig] = None
) -> Dict[str, LayerScales]:
    """Run `batches` through `model` in eval mode and choose the scales of each of its layers.

    The model is left as it was. Raises CalibrationError where there are no batches, where one is
    empty, NaN or infinite at any layer, and where a layer is never reached.
    """
    config = config or QuantConfig()
    layers = _wanted(model, config)
    watches = {name: _Watch(name, config) for name in layers}
    handles = [layer.register_forward_hook(watches[name].hook) for name, layer in layers.items()]
    count = 0
    try:
        with in_eval_mode(model), torch.no_grad():
            for batch in batches:
                model(batch if isinstance(batch, torch.Tensor) else batch[0])
                count += 1
    finally:
        for handle in handles:
            handle.remove()
    if count == 0:
        raise CalibrationError(
            "there is no calibration data",
            why="the batches ended before the first",
            next_step="give a few hundred samples like those the model will see; "
            "an iterator that was read before is at its end: make a new one",
        )
    return {name: watches[name].params(layer) for name, layer in layers.items()}


def _wanted(model: nn.Module, config: QuantConfig) -> Dict[str, nn.Module]:
    """The layers to quantise; BadValueError where a pattern or the model leaves nothing to do."""
    layers = layers_of(model)
    unused: List[str] = [p for p in config.skip if not any(re.fullmatch(p, n) for n in layers)]
    if unused:
        raise BadValueError(
            f"no layer to skip is called {', '.join(unused)}",
            next_step=f"the layers are {', '.join(layers)}",
        )
    wanted = {
        name: layer
        for name, layer in layers.items()
        if not any(re.fullmatch(pattern, name) for pattern in config.skip)
    }
    if not wanted:
        raise BadValueError(
            "this model has no layer to quantise",
            why="convolutions and linear layers are quantised, those in `skip` left out",
        )
    return wanted
