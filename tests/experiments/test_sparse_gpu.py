"""`sparse-layers`, `sparse-network` and `sparse-energy` on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

import pytest
import torch
import torch.nn.functional as F
from one_row import Rows

from narrowgauge_contract.errors import SkippedError
from narrowgauge_lab.engines.own import cudnn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GPU = torch.device("cuda", 0)
LAYER = "128-32-3x3s1-14"
LAYERS = Rows(
    "sparse-layers",
    (f"shapes={LAYER}", "maps=matched", "plans=6", "plan_s=5", "tune_s=2", "pairs=3",
     "limit_s=0.05"),
)  # fmt: skip
NETWORK = Rows(
    "sparse-network",
    ("model=resnet50-tiny", "weights=random", "images=noise", "limit_s=0.05", "calibrate_s=0.01"),
)
ENERGY = Rows(
    "sparse-energy",
    ("model=resnet50-tiny", "weights=random", "images=noise", "calibrate_s=0.01", "window_s=5"),
)


@pytest.mark.parametrize(
    "words",
    [("precision=fp32", "peers=all"), ("precision=fp16", "batch=8"), ("precision=tf32", "batch=8"),
     ("precision=fp16", "batch=8", "granularity=tensor-core", "maps=blocky", "zeros=0.7")],
)  # fmt: skip
def test_a_layer_beside_every_dense_one(tmp_path: Path, words: Tuple[str, ...]) -> None:
    row = LAYERS.run(tmp_path, *words, device=GPU)

    assert row.validity.valid, row.validity.reasons
    (layer,) = row.facts["layers"]
    fp32 = "precision=fp32" in words
    assert ("times_gemm" in row.facts["layers_beside"]) is fp32
    if fp32:
        assert not {"t1", "t2", "t3"} & set(layer["peers_missing"])
    if not cudnn.missing():
        assert layer["engines"][0]["seconds"] <= layer["engines"][-1]["seconds"]
        assert "times_cudnn" in row.facts["layers_beside"]
        # Only who asks for all peers gets cuDNN without the ReLU too.
        assert ("times_cudnn_alone" in row.facts["layers_beside"]) is ("peers=all" in words)
    if "granularity=tensor-core" in words:
        assert layer["ours"]["granularity"] == "tensor-core"


def test_strict_float32_has_no_tensor_core_path(tmp_path: Path) -> None:
    with pytest.raises(SkippedError, match="no tensor-core kernel in fp32"):
        LAYERS.run(tmp_path, "granularity=tensor-core", device=GPU)


@pytest.mark.parametrize("stride", [1, 2])
def test_cudnns_three_algorithms_compute_a_convolution(stride: int) -> None:
    x, weight = torch.randn(2, 16, 9, 9, device=GPU), torch.randn(8, 16, 3, 3, device=GPU)

    found, missing = LAYERS.module("gemm").all_of(x, weight, (stride, stride), (1, 1))

    assert missing == {}
    wanted = F.conv2d(x.double(), weight.double(), None, stride, 1)
    for each in found.values():
        assert set(each.tried) == {"NHWC", "NCHW"}
        assert float((each.gemm().double() - wanted).abs().max()) < 1e-4


def test_halved_weights_beside_dense_ones(tmp_path: Path) -> None:
    row = LAYERS.run(tmp_path, "measure=weights", "precision=fp16", device=GPU)

    assert row.validity.valid, row.validity.reasons
    metric = row.metric("times_2to4")
    assert metric is not None
    assert len(metric.values) == len(LAYERS.module("two_to_four").SIZES)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_network_in_a_graph_agrees(tmp_path: Path, precision: str) -> None:
    row = NETWORK.run(tmp_path, "engine=sparse", f"precision={precision}", device=GPU)

    assert row.validity.valid, row.validity.reasons
    metric = row.metric("largest_difference")
    assert metric is not None
    assert metric.values[0] < (1e-4 if precision == "fp32" else 5e-2)


@pytest.mark.slow
def test_a_window_of_energy(tmp_path: Path) -> None:
    row = ENERGY.run(tmp_path, "engine=sparse", "energy=nvml", device=GPU)

    assert row.validity.valid, row.validity.reasons
    gross, net = row.metric("energy_gross"), row.metric("energy_net")
    assert gross is not None
    assert net is not None
    assert gross.values[0] > net.values[0] > 0
