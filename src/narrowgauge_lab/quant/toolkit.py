"""NVIDIA's pytorch-quantization toolkit as a peer. The one module that imports it.

By its documented interface: a TensorQuantizer for every tensor, told what to do by a
QuantDescriptor, sees the data while calibration is on, then loads its amax from its calibrator:
MaxCalibrator, or HistogramCalibrator by `compute_amax(method=...)`.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from narrowgauge_lab.quant.calibration import Batch, QuantConfig
from narrowgauge_lab.quant.layers import LayerScales
from narrowgauge_lab.quant.peers import INPUT, Choice, Peer, Place, first_of, seeing_inputs

__all__ = ["PytorchQuantization"]

#: Our observer -> its calibrator, and what that is asked for.
_METHODS: Mapping[str, Tuple[str, str]] = {
    "min-max": ("max", ""),
    "percentile": ("histogram", "percentile"),
    "mse": ("histogram", "mse"),
    "entropy": ("histogram", "entropy"),
}
_GET = "it comes from NVIDIA, with its containers or by the sources beside those of TensorRT"
Found = Union[Choice, str]


# Held against a stand-in of its documented interface.
# unverified: pytorch-quantization itself | not obtainable here | quant.comparison where it is
class PytorchQuantization(Peer):
    """`module`: a toolkit other than the installed one, called when it is needed."""

    name = "pytorch-quantization"

    def __init__(self, module: Optional[Callable[[], Any]] = None) -> None:
        self._module = module or _load

    def missing(self) -> str:
        try:
            self._module()
        # Its extension for CUDA may lack libraries, or not fit this torch.
        except (ImportError, OSError) as error:
            absent = isinstance(error, ModuleNotFoundError) and error.name == "pytorch_quantization"
            if absent:
                return f"pytorch-quantization is not installed: {_GET}"
            return f"pytorch-quantization cannot be imported ({error})"
        return ""

    def version(self) -> str:
        return str(getattr(self._module(), "__version__", ""))

    def choose(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        config: QuantConfig,
        scales: Mapping[str, LayerScales],
        samples: Mapping[Place, torch.Tensor],
    ) -> Dict[Place, Found]:
        toolkit = self._module()
        found: Dict[Place, Found] = {}
        found.update(_inputs(toolkit, model, batches, config, samples))
        for place, sample in samples.items():
            if place not in found:
                axis = scales[place[0]].weight.axis
                found[place] = _weight(toolkit, sample, config, axis)
        return found


def _load() -> Any:
    """The toolkit, with the submodules used here."""
    import pytorch_quantization
    import pytorch_quantization.calib
    import pytorch_quantization.nn
    import pytorch_quantization.tensor_quant

    return pytorch_quantization


def _inputs(
    toolkit: Any,
    model: nn.Module,
    batches: Sequence[Batch],
    config: QuantConfig,
    samples: Mapping[Place, torch.Tensor],
) -> Dict[Place, Found]:
    """Of every layer's input: all batches go through the model once."""
    places = [place for place in samples if place[1] == INPUT]
    if config.activation_observer not in _METHODS:
        reason = f"the toolkit has no calibrator like {config.activation_observer}"
        return dict.fromkeys(places, reason)
    kind, method = _METHODS[config.activation_observer]
    watching = {
        place[0]: _calibrating(toolkit, config.activation_bits, None, narrow=False, kind=kind)
        for place in places
    }
    with seeing_inputs(model, watching):
        for batch in batches:
            model(first_of(batch))
    options: Dict[str, Any] = {"method": method} if method else {}
    if method == "percentile":
        options["percentile"] = config.percentile
    return {place: _rounded(watching[place[0]], samples[place], options, kind) for place in places}


def _weight(toolkit: Any, sample: torch.Tensor, config: QuantConfig, axis: Optional[int]) -> Found:
    if config.weight_observer != "min-max":
        return f"the toolkit's quantisers of weights take the maximum, not {config.weight_observer}"
    quantizer = _calibrating(toolkit, config.weight_bits, axis, config.weight_narrow, "max")
    quantizer(sample)
    return _rounded(quantizer, sample, {}, "max")


def _calibrating(toolkit: Any, bits: int, axis: Optional[int], narrow: bool, kind: str) -> Any:
    """A quantiser that sees what it is called with, and leaves it as it is."""
    descriptor = toolkit.tensor_quant.QuantDescriptor(
        num_bits=bits, axis=axis, calib_method=kind, unsigned=False, narrow_range=narrow
    )
    quantizer = toolkit.nn.TensorQuantizer(descriptor)
    quantizer.disable_quant()
    quantizer.enable_calib()
    return quantizer


def _rounded(quantizer: Any, sample: torch.Tensor, options: Mapping[str, Any], kind: str) -> Found:
    """What it chose, and what it makes of the sample."""
    method = " ".join([kind, *(str(value) for value in options.values())])
    try:
        quantizer.load_calib_amax(**options)
        quantizer.disable_calib()
        quantizer.enable_quant()
        quantizer.to(sample.device)
        values, step = quantizer(sample), quantizer.step_size
        amax = quantizer.amax
    except Exception as error:  # whatever the toolkit raises: its search by mse needs CUDA, say
        first = (str(error).splitlines() or [""])[0]
        return f"the toolkit failed by {method}: {type(error).__name__}: {first}"
    # It gives the values that integers stand for, not the integers.
    codes = torch.where(step > 0, values / step, torch.zeros_like(values)).round().to(torch.int32)
    return Choice(_flat(amax), _flat(step), codes, method)


def _flat(values: torch.Tensor) -> torch.Tensor:
    """It keeps the dimensions that it takes the maximum over."""
    values = values.detach().float()
    return values.reshape(()) if values.numel() == 1 else values.reshape(-1)
