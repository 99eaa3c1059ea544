"""A STAND-IN for NVIDIA's pytorch-quantization, whose wheels are NVIDIA's own and need CUDA.

It is not the toolkit. It has the documented interface that the adapter uses, classes, arguments and
the order of calls (pytorch-quantization 2.1, user guide and docstrings), and is stricter about them
than Python: what the guide does not name is a TypeError. Maximum and percentile are computed as the
guide says; in place of the search by entropy stands ENTROPY_SHARE of the maximum; the one by mse
fails without CUDA, as the toolkit's does.
"""

from __future__ import annotations

import types
from typing import Any, ClassVar, List, Optional

import torch
from torch import nn

ENTROPY_SHARE = 0.75
VERSION = "2.1.3 (stand-in)"


class QuantDescriptor:
    def __init__(
        self, num_bits: int = 8, name: Optional[str] = None, *, fake_quant: bool = True,
        axis: Any = None, amax: Any = None, learn_amax: bool = False, scale_amax: Any = None,
        calib_method: str = "max", unsigned: bool = False, narrow_range: bool = False,
    ) -> None:  # fmt: skip
        assert (name, fake_quant, amax, learn_amax, scale_amax) == (None, True, None, False, None)
        assert calib_method in ("max", "histogram")
        self.num_bits, self.axis, self.unsigned = num_bits, axis, unsigned
        self.calib_method, self.narrow_range = calib_method, narrow_range


class _Calibrator:
    def __init__(self, num_bits: int, axis: Any, unsigned: bool) -> None:
        self.num_bits, self.axis, self.unsigned = num_bits, axis, unsigned
        self.seen: List[torch.Tensor] = []

    def collect(self, x: torch.Tensor) -> None:
        self.seen.append(x.abs())


class MaxCalibrator(_Calibrator):
    def compute_amax(self) -> Optional[torch.Tensor]:
        """Its dimensions are the tensor's, all 1 but the axis."""
        if not self.seen:
            return None
        largest = []
        for x in self.seen:
            for dimension in range(x.dim()):
                if dimension != self.axis:
                    x = x.max(dim=dimension, keepdim=True).values
            largest.append(x)
        return torch.stack(largest).max(dim=0).values


class HistogramCalibrator(_Calibrator):
    def __init__(self, num_bits: int, axis: Any, unsigned: bool) -> None:
        if axis is not None:
            raise NotImplementedError("histogram collection only supports per tensor scaling")
        super().__init__(num_bits, axis, unsigned)

    def compute_amax(
        self, method: str, *, stride: int = 1, start_bin: int = 128, percentile: float = 99.99
    ) -> Optional[torch.Tensor]:
        if not self.seen:
            return None
        assert (stride, start_bin) == (1, 128)
        values = torch.cat([x.flatten() for x in self.seen])
        if method == "entropy":
            return ENTROPY_SHARE * values.max()
        if method == "mse":
            raise AssertionError("Torch not compiled with CUDA enabled")
        if method != "percentile":
            raise TypeError(f"Unknown calibration method {method}")
        return torch.quantile(values, percentile / 100)


class TensorQuantizer(nn.Module):
    #: Every one that was made, for tests.
    made: ClassVar[List[TensorQuantizer]] = []

    def __init__(
        self, quant_desc: QuantDescriptor, disabled: bool = False, if_quant: bool = True,
        if_clip: bool = False, if_calib: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        assert (disabled, if_clip) == (False, False)
        self.descriptor = quant_desc
        self._if_quant, self._if_calib = if_quant, if_calib
        kind = {"max": MaxCalibrator, "histogram": HistogramCalibrator}[quant_desc.calib_method]
        self.calibrator = kind(
            num_bits=quant_desc.num_bits, axis=quant_desc.axis, unsigned=quant_desc.unsigned
        )
        TensorQuantizer.made.append(self)

    def enable_calib(self) -> None:
        self._if_calib = True

    def disable_calib(self) -> None:
        self._if_calib = False

    def enable_quant(self) -> None:
        self._if_quant = True

    def disable_quant(self) -> None:
        self._if_quant = False

    def load_calib_amax(self, *args: Any, **kwargs: Any) -> None:
        found = self.calibrator.compute_amax(*args, **kwargs)
        if found is None:
            raise RuntimeError("Calibrator returned None.")
        self.register_buffer("_amax", found)

    @property
    def amax(self) -> Any:
        return self._amax

    @property
    def step_size(self) -> Any:
        return self._amax / self._bound()

    def _bound(self) -> float:
        return 2.0 ** (self.descriptor.num_bits - 1 + int(self.descriptor.unsigned)) - 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._if_calib:
            self.calibrator.collect(inputs)
        if not self._if_quant:
            return inputs
        bound = self._bound()
        least = -bound if self.descriptor.narrow_range else -bound - 1
        # What is too small for a scale is zero.
        scale = torch.where(self._amax > 2.0**-24, bound / self._amax, torch.zeros_like(self._amax))
        steps = (inputs * scale).round().clamp(least, bound)
        return torch.where(scale > 0, steps / scale, torch.zeros_like(inputs))


def module() -> Any:
    """As `import pytorch_quantization` gives it, with its submodules."""
    TensorQuantizer.made = []
    return types.SimpleNamespace(
        __version__=VERSION,
        tensor_quant=types.SimpleNamespace(QuantDescriptor=QuantDescriptor),
        calib=types.SimpleNamespace(
            MaxCalibrator=MaxCalibrator, HistogramCalibrator=HistogramCalibrator
        ),
        nn=types.SimpleNamespace(TensorQuantizer=TensorQuantizer),
    )
