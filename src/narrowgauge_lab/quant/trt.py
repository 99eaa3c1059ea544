"""TensorRT as a peer: the scales that its calibrators find, by `engines.tensorrt`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Mapping, Optional, Sequence, Union

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.quant.calibration import Batch, QuantConfig
from narrowgauge_lab.quant.layers import LayerScales
from narrowgauge_lab.quant.peers import INPUT, Choice, Peer, Place, first_of

if TYPE_CHECKING:
    from narrowgauge_lab.engines.cache import EngineCache
    from narrowgauge_lab.engines.tensorrt.engine import TensorRTEngine

__all__ = ["TensorRT"]

#: Our observer -> its calibrator.
_METHODS = {"min-max": "minmax", "entropy": "entropy"}
_LOW, _HIGH = -128, 127
_GPU = torch.device("cuda")
_WEIGHTS = "TensorRT rounds weights itself, and does not say how"
Found = Union[Choice, str]


# Tables in the format of published ones were read.
# unverified: scales of TensorRT's calibrators | needs a GPU and TensorRT | quant.comparison there
class TensorRT(Peer):
    """`engine`: an adapter other than the installed library's. `cache`: keeps its tables."""

    name = "tensorrt"

    def __init__(
        self,
        engine: Optional[TensorRTEngine] = None,
        device: torch.device = _GPU,
        cache: Optional[EngineCache] = None,
    ) -> None:
        self._given = engine
        self._device = device
        self._cache = cache

    def _engine(self) -> TensorRTEngine:
        if self._given is None:
            # Here: the engines take their scales from this package.
            from narrowgauge_lab.engines.tensorrt import ENGINE

            self._given = ENGINE
        return self._given

    def missing(self) -> str:
        reason = self._engine().missing(self._device)
        if not reason and self._device.type == "cuda" and not torch.cuda.is_available():
            return "TensorRT calibrates on a GPU, and there is none"
        return reason

    def version(self) -> str:
        return self._engine().version

    def choose(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        config: QuantConfig,
        scales: Mapping[str, LayerScales],
        samples: Mapping[Place, torch.Tensor],
    ) -> Dict[Place, Found]:
        from narrowgauge_lab.engines.base import Preparation

        del scales  # of weights it says nothing
        found: Dict[Place, Found] = dict.fromkeys(samples, _WEIGHTS)
        inputs = [place for place in samples if place[1] == INPUT]
        method = _METHODS.get(config.activation_observer)
        if method is None or config.activation_bits != 8:
            said = (
                config.activation_observer if method is None else f"{config.activation_bits} bits"
            )
            found.update(dict.fromkeys(inputs, f"TensorRT has no calibrator like {said}"))
            return found
        images = tuple(first_of(batch).detach().float().cpu() for batch in batches)
        wanted = Preparation(
            "int8", self._device, images, cache=self._cache, options={"int8": method}
        )
        try:
            steps = self._engine().calibration_scales(model, images[0].to(self._device), wanted)
        except NotApplicableError as error:
            found.update(dict.fromkeys(inputs, f"{error.what}: {error.why}"))
            return found
        for place in inputs:
            step = steps.get(place[0])
            if step is None:
                found[place] = "its table has no entry for what this layer reads"
            else:
                found[place] = _rounded(step, samples[place], method)
        return found


def _rounded(step: float, sample: torch.Tensor, method: str) -> Choice:
    """As NVIDIA documents int8: round(x / scale), ties to even, saturated at -128 and 127."""
    scale = torch.tensor(step, device=sample.device)
    codes = (sample / scale).round().clamp(_LOW, _HIGH).to(torch.int32)
    return Choice(scale * _HIGH, scale, codes, method)
