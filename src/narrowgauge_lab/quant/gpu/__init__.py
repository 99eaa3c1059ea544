"""Really-8-bit convolutional networks on CUDA: int8 and fp8 on tensor cores, by Triton kernels."""

from narrowgauge_lab.quant.gpu.network import QuantizedNetwork, lower

__all__ = ["QuantizedNetwork", "lower"]
