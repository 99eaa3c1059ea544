"""What manual layers and the operators below them cost: a MAC for each product, however formed."""

from __future__ import annotations

from typing import Any, Tuple

import pytest
import torch
from torch import nn

from narrowgauge_kernels.codes import CodeMac, Term, conv2d_codes, linear_codes
from narrowgauge_kernels.mac import Mac
from narrowgauge_kernels.manual import conv2d, linear
from narrowgauge_lab.layers.manual.convert import convert
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.networks.manual_mnist import ManualNet

TERMS = CodeMac("structured", terms=(Term(0xF0, 0xFF), Term(0x0F, 0xFF)))
CODES = CodeMac("exact_int8")


def _codes(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int8)


@pytest.mark.parametrize("name", ["exact_fp32", "mitchell"])
@pytest.mark.parametrize(
    ("weight", "geometry", "results"),
    [
        ((4, 6, 3, 3), (1, 1, 1, 1), 2 * 4 * 9 * 7),
        ((4, 3, 3, 2), ((2, 1), (1, 2), (1, 2), 2), 2 * 4 * 5 * 9),
        ((4, 6, 1, 1), (1, 0, 1, 1), 2 * 4 * 9 * 7),
    ],
)
def test_a_convolution_forms_every_product(
    name: str, weight: Tuple[int, ...], geometry: Tuple[Any, ...], results: int
) -> None:
    kernel = torch.ones(weight)
    found = count(lambda x: conv2d(x, kernel, None, Mac(name), *geometry), torch.ones(2, 6, 9, 7))

    assert found.macs == results * kernel[0].numel()
    # Winograd's algorithm multiplies sums of operands: other products than the policy's.
    assert found.least_macs == found.macs
    assert set(found.per_operator) == {"narrowgauge::manual_conv2d"}


@pytest.mark.parametrize("mac", [CODES, TERMS], ids=["exact", "structured"])
def test_products_of_codes_count_once_however_many_masks_they_take(mac: CodeMac) -> None:
    kernel, matrix = _codes(4, 3, 3, 3), _codes(5, 7)
    pixels = count(
        lambda x: conv2d_codes(x, kernel, mac, (2, 2), (1, 1), (1, 1), 2), _codes(2, 6, 9, 7)
    )
    rows = count(lambda x: linear_codes(x, matrix, mac), _codes(2, 3, 7))

    assert pixels.macs == pixels.least_macs == 2 * 4 * 5 * 4 * 27
    assert rows.macs == rows.least_macs == 2 * 3 * 7 * 5
    assert set(pixels.per_operator) == {"narrowgauge::conv2d_codes"}
    assert set(rows.per_operator) == {"narrowgauge::linear_codes"}


def test_a_linear_layer_forms_every_product() -> None:
    matrix, bias = torch.ones(5, 7), torch.ones(5)
    found = count(lambda x: linear(x, matrix, bias, Mac("truncated", 7)), torch.ones(2, 3, 7))

    assert found.macs == found.least_macs == 2 * 3 * 7 * 5
    assert set(found.per_operator) == {"narrowgauge::manual_linear"}


@pytest.mark.parametrize("policy", ["axfpm", "exact_int8"])
def test_a_converted_network_costs_what_the_network_does(policy: str) -> None:
    images = torch.randn(2, 1, 28, 28)
    before: nn.Module = ManualNet()
    plain = count(before, images)
    manual = count(convert(before, policy).model, images)

    assert (manual.macs, manual.parameters, manual.bytes) == (
        plain.macs, plain.parameters, plain.bytes,
    )  # fmt: skip
    assert all(name.startswith("narrowgauge::") for name in manual.per_operator)
