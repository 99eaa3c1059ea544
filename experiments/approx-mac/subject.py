"""The kernel that is measured: a policy's, on one layer's operands, and what it should give."""

from __future__ import annotations

import dataclasses
from typing import Callable, Optional

import numpy as np
import torch

from narrowgauge_kernels.codes import CodeMac, linear_codes_ref
from narrowgauge_kernels.mac import CUSTOM, Mac
from narrowgauge_kernels.manual import conv2d, linear_ref
from narrowgauge_lab.layers.manual import kernels
from narrowgauge_lab.layers.manual.codes import CodeLayer
from narrowgauge_lab.layers.manual.dispatch import Choice, choose, layer_for
from narrowgauge_lab.layers.manual.factors import exact, factored_sums
from narrowgauge_lab.layers.manual.floats import FloatLayer
from narrowgauge_lab.layers.manual.multiplier import multiplier_of
from narrowgauge_lab.layers.manual.settings import Settings
from narrowgauge_lab.networks.layer_shapes import LayerShape

from .operands import Drawn, Operands, operands_of

__all__ = ["EXACT_FP32", "Call", "Subject", "subject_of"]

EXACT_FP32 = Mac("exact_fp32")

Call = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """`call`: the kernel alone, without quantising, scales and bias. `wanted`: what the sample of
    its results is by the policy's own definition, on the CPU, float64 or int64. `exact`: whether
    it is our kernel of exact products. `table`: of codes, int32 [256, 256] on the CPU."""

    operands: Operands
    choice: Choice
    call: Call
    wanted: torch.Tensor
    exact: bool
    table: Optional[torch.Tensor] = None

    @property
    def codes(self) -> bool:
        return self.operands.x.dtype != torch.float32

    def exact_call(self) -> Call:
        """Our kernel of exact products, float32 or of codes, on the same operands."""
        operands = self.operands
        x, weight = operands.x, operands.weight
        if self.codes:
            mac = exact(x.dtype == torch.int8, weight.dtype == torch.int8)
            return lambda: kernels.code_sums(operands.problem, x, weight, mac, 0)
        return lambda: kernels.float_layer(operands.problem, x, weight, None, EXACT_FP32)


def subject_of(settings: Settings, shape: LayerShape, batch: int, drawn: Drawn) -> Subject:
    """The kernel that the settings get on the device; `drawn.form` becomes the policy's.

    Raises what `choose` raises, and KernelsNotBuiltError.
    """
    if not settings.policy.eight_bit:
        operands = operands_of(shape, batch, drawn)
        layer = layer_for(settings, operands.problem, drawn.device, operands.depth)
        assert isinstance(layer, FloatLayer)
        choice = choose(settings, drawn.device, operands.depth)
        call, wanted = _float_call(operands, layer), _float(operands, layer.mac)
        return Subject(operands, choice, call, wanted, layer.mac == EXACT_FP32)
    multiplier = multiplier_of(settings.policy)
    form = multiplier.form(settings.per_channel)
    operands = operands_of(shape, batch, dataclasses.replace(drawn, form=form))
    choice = choose(settings, drawn.device, operands.depth)
    layer = layer_for(settings, operands.problem, drawn.device, operands.depth)
    assert isinstance(layer, CodeLayer)
    table = torch.from_numpy(multiplier.table.values.astype(np.int32))
    by_table = CodeMac("lut8x8", table, form.input_signed, form.weight_signed)
    wanted = linear_codes_ref(operands.sample.windows, operands.sample.weights, by_table)
    call = _code_call(operands, layer)
    return Subject(operands, choice, call, wanted, layer.mac.name == "exact_int8", table)


def _float_call(operands: Operands, layer: FloatLayer) -> Call:
    x, weight, problem, mac = operands.x, operands.weight, operands.problem, layer.mac
    return lambda: kernels.float_layer(problem, x, weight, None, mac)


def _code_call(operands: Operands, layer: CodeLayer) -> Call:
    """Padding is of zeros, as where zero points are zero."""
    x, weight, problem = operands.x, operands.weight, operands.problem
    factors, mac = layer.factors, layer.mac
    if factors:
        return lambda: factored_sums(problem, x, weight, factors, 0)
    return lambda: kernels.code_sums(problem, x, weight, mac, 0)


def _float(operands: Operands, mac: Mac) -> torch.Tensor:
    """Products by the policy's definition, summed in float64."""
    windows, weights = operands.sample.windows, operands.sample.weights
    if mac.name != CUSTOM:
        return linear_ref(windows, weights, None, mac)
    # Only its own library knows a user's function: a group for each product lets none be summed.
    images, depth = windows[:, :, None, None], windows.shape[1]
    columns = [
        conv2d(images, weight.reshape(depth, 1, 1, 1), None, mac, groups=depth)
        .double()
        .sum(dim=(1, 2, 3))
        for weight in weights
    ]
    return torch.stack(columns, dim=1)
