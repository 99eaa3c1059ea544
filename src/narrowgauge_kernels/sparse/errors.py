"""What can go wrong with generated kernels, beyond the errors of building the others."""

from __future__ import annotations

from narrowgauge_kernels.errors import KernelsError

__all__ = ["DeviceError", "SparseArgumentError"]


class SparseArgumentError(KernelsError):
    """A shape, tile, variant or tensor that no kernel can be generated or launched for."""

    exit_code = 2


class DeviceError(KernelsError):
    """The CUDA driver is not there, or refused what it was asked."""

    exit_code = 4
