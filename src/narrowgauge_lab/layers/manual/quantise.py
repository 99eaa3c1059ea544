"""Operands of 8-bit policies: codes with their scales, by `quant`'s formulas.

A multiplier of signed codes gets a symmetric operand (zero point 0), one of unsigned codes an
affine one, whose zero point is taken out of the sum again (`codes`). Activations have one scale;
weights have one for each output channel, or one.

Where an operand has no calibrated scale, its least and greatest value of the moment give one. That
waits for no GPU. Then a NaN or an infinity in the operand makes its scale NaN, and with it every
result that this scale stands for. With a calibrated scale an infinity saturates, and only NaN does
that.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Iterable, Mapping, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import UsageError
from narrowgauge_kernels.wire import pack_int8
from narrowgauge_lab.quant.calibration import Batch, QuantConfig, calibrate
from narrowgauge_lab.quant.layers import LayerScales
from narrowgauge_lab.quant.parameters import QuantParams, parameters_of

__all__ = ["Coded", "Format", "Scales", "calibrated", "coded_input", "coded_weight"]

#: What the wire packs to.
_PACKED_BITS = 8


@dataclasses.dataclass(frozen=True)
class Format:
    """What a multiplier takes, and whether weights have a scale for each output channel. `bits`: of
    either operand's codes, which lie in bytes."""

    input_signed: bool
    weight_signed: bool
    per_channel: bool = True
    bits: int = 8

    def config(self, observer: str = "min-max", skip: Tuple[str, ...] = ()) -> QuantConfig:
        """How `quant.calibration` makes parameters of this format."""
        return QuantConfig(
            activation_bits=self.bits,
            weight_bits=self.bits,
            activation_symmetric=self.input_signed,
            activation_observer=observer,
            weight_symmetric=self.weight_signed,
            weight_narrow=self.weight_signed,
            per_channel=self.per_channel,
            outputs=False,
            skip=skip,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Scales:
    """Calibrated parameters of one layer; None where the values of the moment are to give them.

    `input_zero` is the input's zero point as a number, so that no GPU is asked for it.
    """

    input: Optional[QuantParams] = None
    weight: Optional[QuantParams] = None
    input_zero: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.input is not None:
            object.__setattr__(self, "input_zero", int(self.input.zero_point))

    def to(self, device: torch.device) -> Scales:
        """The same on another device; itself where it is there."""
        moved = {
            name: params.to(device)
            for name, params in (("input", self.input), ("weight", self.weight))
            if params is not None and params.scale.device != device
        }
        return dataclasses.replace(self, **moved) if moved else self

    def require(self, form: Format) -> None:
        """UsageError where these are not of that format."""
        sides = (
            ("input", self.input, form.input_signed),
            ("weight", self.weight, form.weight_signed),
        )
        for name, params, signed in sides:
            if params is None:
                continue
            axes = (None,) if name == "input" else (None, 0)
            if (params.symmetric, params.bits) != (signed, form.bits) or params.axis not in axes:
                raise UsageError(
                    f"the calibrated {name} scale is {_described(params)}, and this multiplier "
                    f"takes {name} codes of {form.bits} bits, {'' if signed else 'un'}signed",
                    why="signed codes are symmetric, unsigned ones affine; inputs have one scale",
                    next_step="calibrate for this policy: quantise.calibrated(model, format, ...)",
                )


@dataclasses.dataclass(frozen=True, eq=False)
class Coded:
    """An operand: (codes - zero) · scale. `scale` float32 and `zero` int32 have no dimension, or
    that of the output channels. `inside`: where nothing saturated, None where nothing can have."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    inside: Optional[torch.Tensor] = None

    def tensors(self) -> Tuple[Optional[torch.Tensor], ...]:
        """The four, for autograd to keep."""
        return self.codes, self.scale, self.zero, self.inside

    @property
    def signed(self) -> bool:
        return self.codes.dtype == torch.int8

    def centred(self) -> torch.Tensor:
        """codes - zero, float32."""
        return self.codes.float().sub_(self.along(self.zero))

    def values(self) -> torch.Tensor:
        """What the codes stand for, float32."""
        return self.centred().mul_(self.along(self.scale))

    def along(self, values: torch.Tensor) -> torch.Tensor:
        """One value, or one per channel, shaped to meet the codes of a weight."""
        if values.dim() == 0:
            return values
        return values.reshape(-1, *[1] * (self.codes.dim() - 1))


def coded_input(
    x: torch.Tensor, form: Format, params: Optional[QuantParams], *, differentiated: bool
) -> Coded:
    """An activation's codes. `differentiated`: whether its gradient may be asked for."""
    if params is None:
        if form.input_signed and form.bits == _PACKED_BITS:
            return _packed(x, 1)
        return _coded(x, parameters_of((x.min(), x.max()), form.bits, form.input_signed))
    inside = params.inside(x) if differentiated else None
    scale = torch.where(torch.isnan(x).any(), _nan(params.scale), params.scale)
    return Coded(params.codes(x), scale, params.zero_point, inside)


def coded_weight(
    weight: torch.Tensor, form: Format, params: Optional[QuantParams], *, differentiated: bool
) -> Coded:
    """A weight's codes, by dimension 0."""
    channels = len(weight) if form.per_channel else 1
    if params is None and form.weight_signed and form.bits == _PACKED_BITS:
        return _packed(weight, channels)
    if params is None:
        axis, rows = 0 if form.per_channel else None, weight.reshape(channels, -1)
        low, high = rows.min(dim=1).values, rows.max(dim=1).values
        extent = (low, high) if form.per_channel else (low[0], high[0])
        signed = form.weight_signed
        return _coded(weight, parameters_of(extent, form.bits, signed, signed, axis))
    inside = params.inside(weight) if differentiated else None
    lost = torch.isnan(weight.reshape(max(1, params.scale.numel()), -1)).any(dim=1)
    lost = lost.reshape(params.scale.shape)
    scale = torch.where(lost, _nan(params.scale), params.scale)
    return Coded(params.codes(weight), scale, params.zero_point, inside)


def calibrated(
    model: nn.Module,
    form: Format,
    batches: Iterable[Batch],
    *,
    observer: str = "min-max",
    weights: bool = False,
    skip: Tuple[str, ...] = (),
) -> Dict[str, Scales]:
    """Scales for `convert(model, ..., scales=)`, from batches through the float `model`.

    `weights`: fix the scales of the weights too, for a model that is not trained further; else they
    follow the weights. `skip`: patterns of names of layers, as in `QuantConfig`. Raises
    CalibrationError.
    """
    found: Mapping[str, LayerScales] = calibrate(model, batches, form.config(observer, skip))
    return {
        name: Scales(scales.input, scales.weight if weights else None)
        for name, scales in found.items()
    }


def _packed(values: torch.Tensor, channels: int) -> Coded:
    """Symmetric, by the wire's kernel, which reads the values twice and writes the codes, where the
    formulas take many times that. It has the same scales: the largest magnitude over 127."""
    dense = values.detach()
    if channels > 1 or not _is_dense(dense):
        dense = dense.contiguous()
    # In the order of memory, one channel is a row of whatever shape.
    size = dense.numel() // channels
    codes, scale = pack_int8(dense.as_strided((1, channels, size), (dense.numel(), size, 1)))
    # Of what was not finite the codes are 0, which a table need not multiply to 0.
    scale = scale + 0 * scale
    if channels == 1:
        scale = scale[0]
    codes = codes.as_strided(dense.shape, dense.stride())
    return Coded(codes, scale, torch.zeros_like(scale, dtype=torch.int32))


def _coded(values: torch.Tensor, params: QuantParams) -> Coded:
    """By parameters that these very values gave: nothing saturates."""
    return Coded(params.codes(values), params.scale, params.zero_point)


def _is_dense(values: torch.Tensor) -> bool:
    """Whether it has no gaps, in one of torch's two orders."""
    last = values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)
    return last or values.is_contiguous()


def _nan(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, float("nan"))


def _described(params: QuantParams) -> str:
    where = "per tensor" if params.axis is None else f"along axis {params.axis}"
    return f"{'symmetric' if params.symmetric else 'affine'}, {params.bits} bits, {where}"
