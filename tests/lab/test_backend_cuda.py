"""The original's algorithm on a GPU: what it computes and moves."""

from __future__ import annotations

import pytest
import torch
from hetero_cases import CASES, Case, conv, gradients, make, relative_error

from narrowgauge_lab.layers.hetero.backends import BackendOptions, make_backend
from narrowgauge_lab.layers.hetero.backends.faithful import bytes_per_call
from narrowgauge_lab.layers.hetero.ledger import Ledger

pytestmark = pytest.mark.gpu

TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3}
#: And a layer of the original's tables: 512 groups of 32 x 32 windows.
LAYERS = [*CASES, make("layer 2", conv(padding=(1, 1)), (32, 16, 32, 32), 16, (3, 3))]


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("mode", ["serial", "overlapped"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_products_and_bytes_on_a_gpu(
    case: Case, precision: str, mode: str, device: torch.device
) -> None:
    ledger = Ledger(mode, device)
    made = make_backend(
        "faithful", "conv", case.problem, precision, device, ledger, BackendOptions()
    )

    found = (
        made.forward(case.x, case.weight, case.bias),
        made.input_grad(case.grad, case.weight, case.x.shape),
        made.weight_grad(case.grad, case.x, case.weight.shape),
    )

    for name, result, wanted in zip(("y", "gx", "gw"), found, gradients(case)):
        assert (name, result.device.type, result.dtype) == (name, "cpu", torch.float32)
        assert relative_error(result, wanted) <= TOLERANCE[precision], name
    told = bytes_per_call(case.problem, case.x.shape, case.weight.shape, precision)
    assert ledger.bytes_moved() == tuple(map(sum, zip(*told.values())))
    stages = {each.stage for each in ledger.intervals() if each.lane != "host" or mode == "serial"}
    assert {"to_device", "refit", "compute", "from_device"} <= stages
