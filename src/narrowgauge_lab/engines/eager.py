"""torch, operator by operator: `eager` as models come, `channels_last` in that memory format."""

from __future__ import annotations

from typing import ClassVar, Mapping

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines.base import Engine, Preparation, Runner
from narrowgauge_lab.engines.native import TorchRunner, converted, float_refused
from narrowgauge_lab.engines.onnx_export import cpu_int8_config
from narrowgauge_lab.quant.calibration import calibrate
from narrowgauge_lab.quant.x86 import choose_engine, to_int8
from narrowgauge_lab.transforms import fold_batch_norm

__all__ = ["ENGINES", "EagerEngine"]


class EagerEngine(Engine):
    """int8 by torch's own operators for it, on a CPU; they keep activations in channels_last.

    The option `cudnn_benchmark` lets cuDNN try its algorithms out at the first call of a shape.
    """

    options: ClassVar[Mapping[str, Scalar]] = {"cudnn_benchmark": True}

    def __init__(self, name: str, layout: str) -> None:
        self.name = name
        self._layout = layout

    def missing(self, device: torch.device) -> str:
        if device.type == "cuda" and not torch.cuda.is_available():
            return "torch sees no GPU here"
        return ""

    def refuses(self, precision: str, device: torch.device) -> str:
        if precision != "int8" or device.type != "cpu":
            return float_refused(precision, device)
        if self._layout == "channels_last":
            return "torch's int8 operators have one layout, whatever is asked: engine=eager"
        try:
            choose_engine()
        except NotApplicableError as error:
            return str(error)
        return ""

    def prepare(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
        benchmark = bool(self.chosen(wanted)["cudnn_benchmark"])
        if wanted.precision != "int8":
            module = converted(model, wanted, self._layout)
            return TorchRunner(module, module, wanted, example, self._layout, benchmark)
        folded = fold_batch_norm(model)
        scales = calibrate(folded, wanted.calibration, cpu_int8_config())
        module = to_int8(folded, scales)
        return TorchRunner(module, module, wanted, example, "channels_last")


ENGINES = (EagerEngine("eager", "contiguous"), EagerEngine("channels_last", "channels_last"))
