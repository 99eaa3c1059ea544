"""Manual operators given tensors of two devices."""

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


def _conv2d(x, weight):
    if x.dtype == torch.float32:
        return conv2d(x, weight, None, FLOAT)
    return conv2d_codes(x, weight, CODES)


def _linear(x, weight):
    if x.dtype == torch.float32:
        return linear(x, weight, None, FLOAT)
    return linear_codes(x, weight, CODES)
