"""Manual operators given tensors of two devices, or sizes whose result no memory holds."""

from __future__ import annotations

import pytest
import torch

from narrowgauge_kernels.codes import CodeMac, conv2d_codes, linear_codes
from narrowgauge_kernels.mac import Mac
from narrowgauge_kernels.manual import conv2d, linear

pytestmark = pytest.mark.usefixtures("kernels")

FLOAT, CODES = Mac("exact_fp32"), CodeMac("exact_int8")
TABLE = CodeMac("lut8x8", torch.zeros(256, 256, dtype=torch.int32))


def _meta(*shape, dtype=torch.float32):
    try:
        return torch.empty(*shape, dtype=dtype, device="meta")
    except RuntimeError:
        pytest.skip("this torch has no meta device in Python (1.9 or later)")


def _wide(*shape, dtype=torch.float32):
    """Of any size, in the memory of one value."""
    return torch.zeros([1] * len(shape), dtype=dtype).expand(*shape)


class TestTwoDevices:
    """Both are named; nothing is copied from one to the other behind one's back."""

    @pytest.mark.parametrize("meta", ["x", "weight"])
    def test_operands(self, meta):
        there, here = ("meta", "cpu") if meta == "weight" else ("cpu", "meta")
        said = f"weight is on {there} but x is on {here}"
        for dtype in (torch.float32, torch.int8):
            shapes = {"x": (1, 2, 5, 5), "weight": (3, 2, 3, 3)}
            image, kernel = (
                _meta(*shape, dtype=dtype) if name == meta else torch.zeros(*shape, dtype=dtype)
                for name, shape in shapes.items()
            )
            x, weight = image[0, 0], kernel[0, :, 0].repeat(1, 2)[:, :5]
            with pytest.raises(RuntimeError, match=said):
                _conv2d(image, kernel)
            with pytest.raises(RuntimeError, match=said):
                _linear(x, weight)

    def test_a_bias(self):
        bias = _meta(3)
        with pytest.raises(RuntimeError, match="bias is on meta but x is on cpu"):
            conv2d(torch.zeros(1, 2, 5, 5), torch.zeros(3, 2, 3, 3), bias, FLOAT)
        with pytest.raises(RuntimeError, match="bias is on meta but x is on cpu"):
            linear(torch.zeros(2, 4), torch.zeros(3, 4), bias, FLOAT)

    def test_a_table(self):
        """By the operator itself: the functions bring the table along."""
        _, terms, largest = TABLE.arguments(torch.device("cpu"))
        x, table = torch.zeros(2, 4, dtype=torch.int8), _meta(256, 256, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="table is on meta but x is on cpu"):
            torch.ops.narrowgauge.linear_codes(x, x, table, terms, largest)


def _conv2d(x, weight, padding=0, dilation=1):
    if x.dtype == torch.float32:
        return conv2d(x, weight, None, FLOAT, padding=padding, dilation=dilation)
    both = (padding, padding), (dilation, dilation)
    return conv2d_codes(x, weight, CODES, (1, 1), *both)


def _linear(x, weight):
    if x.dtype == torch.float32:
        return linear(x, weight, None, FLOAT)
    return linear_codes(x, weight, CODES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
class TestSizes:
    """Operands fit in the memory of one value; torch 1.8 gives such results no memory at all."""

    def test_more_values_than_64_bits_count(self, dtype):
        with pytest.raises(RuntimeError, match=r"shape \[17179869184, 1073741824\]"):
            _linear(_wide(2**34, 1, dtype=dtype), _wide(2**30, 1, dtype=dtype))
        image, kernel = (2**20, 1, 2**20, 2**20), (4, 1, 1, 1)
        with pytest.raises(RuntimeError, match=r"shape \[1048576, 4, 1048576, 1048576\]"):
            _conv2d(_wide(*image, dtype=dtype), _wide(*kernel, dtype=dtype))

    def test_more_bytes_than_64_bits_count(self, dtype):
        """2^62 values of four bytes."""
        with pytest.raises(RuntimeError, match="more than 64 bits address"):
            _linear(_wide(2**31, 1, dtype=dtype), _wide(2**31, 1, dtype=dtype))

    def test_padding_alone(self, dtype):
        with pytest.raises(RuntimeError, match=r"shape \[1, 1, 4294967297, 4294967297\]"):
            _conv2d(_wide(1, 1, 3, 3, dtype=dtype), _wide(1, 1, 1, 1, dtype=dtype), 2**31 - 1)

    def test_a_kernel_whose_reach_wraps_around(self, dtype):
        """Dilation times its height is below 0 in 64 bits, which would fit into anything."""
        kernel = _wide(1, 1, 2**33 + 1, 1, dtype=dtype)
        with pytest.raises(RuntimeError, match="and int32"):
            _conv2d(_wide(1, 1, 3, 3, dtype=dtype), kernel, dilation=2**31 - 1)

    def test_no_value_at_all_is_a_result(self, dtype):
        result = _linear(_wide(2**40, 0, 1, dtype=dtype), _wide(3, 1, dtype=dtype))
        assert result.shape == (2**40, 0, 3)
