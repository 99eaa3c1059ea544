"""Our scales beside other tools': pytorch-quantization by a stand-in, TensorRT by its own."""

from __future__ import annotations

import json
import sys
import types
from typing import Any, Dict, List

import pytest
import toolkit_stand_in
import torch
from quant_models import images, small_network
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
from narrowgauge_lab.quant.comparison import SYMMETRIC, Comparison, Pair, compare
from narrowgauge_lab.quant.toolkit import PytorchQuantization
from narrowgauge_lab.quant.trt import TensorRT

LAYERS = ("0", "2", "4", "8")


def _batches() -> List[torch.Tensor]:
    return [images(4, seed=1), 1.5 * images(4, seed=2)]


def _config(**changes: Any) -> QuantConfig:
    return QuantConfig(activation_symmetric=True, **changes)


def _compared(config: QuantConfig = SYMMETRIC, model: Any = None) -> Comparison:
    toolkit = toolkit_stand_in.module()
    torch.manual_seed(3)
    (found,) = compare(
        model or small_network(), _batches(), config, [PytorchQuantization(lambda: toolkit)]
    )
    return found


def _by_place(found: Comparison) -> Dict[Any, Pair]:
    return {(pair.layer, pair.tensor): pair for pair in found.pairs}


def test_by_the_maximum_both_choose_the_same() -> None:
    found = _compared()

    pairs = _by_place(found)
    assert set(pairs) == {(name, tensor) for name in LAYERS for tensor in ("input", "weight")}
    assert (found.tool, found.version) == ("pytorch-quantization", toolkit_stand_in.VERSION)
    for (_, tensor), pair in pairs.items():
        assert pair.theirs is not None
        assert pair.theirs.method == "max"
        assert torch.allclose(pair.ours.amax, pair.theirs.amax, rtol=1e-6, atol=0)
        assert torch.allclose(pair.ours.scale, pair.theirs.scale, rtol=1e-6, atol=0)
        assert pair.ours.scale.shape == pair.theirs.scale.shape
        assert pair.ours.codes.shape == pair.theirs.codes.shape
        # Values next to a tie go by the last bit of the scale.
        assert pair.equal_codes > 0.999
        assert pair.steps_off <= 1
        lowest = int(pair.theirs.codes.min())
        assert lowest >= (-127 if tensor == "weight" else -128)
        # The second batch's images, which the sample is not of, reach further.
        assert int(pair.theirs.codes.abs().max()) >= (127 if tensor == "weight" else 64)


def test_all_batches_go_to_the_calibrators_and_the_model_stays() -> None:
    model = small_network().train()
    _compared(model=model)

    first = toolkit_stand_in.TensorQuantizer.made[0]
    assert [x.shape[0] for x in first.calibrator.seen] == [4, 4]
    assert torch.equal(first.calibrator.seen[1], _batches()[1].abs())
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_percentiles_are_asked_for_and_cut() -> None:
    pair = _by_place(_compared(_config(activation_observer="percentile", percentile=99.0)))[
        "0", "input"
    ]
    seen = torch.cat([batch.flatten() for batch in _batches()]).abs()

    assert pair.theirs is not None
    assert pair.theirs.method == "histogram percentile 99.0"
    assert float(pair.theirs.amax) == pytest.approx(float(torch.quantile(seen, 0.99)))
    # Ours cuts off 1 % at each end, theirs 1 % of the magnitudes: another amax, other codes.
    assert float(pair.ours.amax) < 0.95 * float(pair.theirs.amax)
    assert pair.equal_codes < 0.9
    assert pair.steps_off > 1


def test_entropy_is_asked_for() -> None:
    pair = _by_place(_compared(_config(activation_observer="entropy")))["0", "input"]
    most = max(float(batch.abs().max()) for batch in _batches())

    assert pair.theirs is not None
    assert pair.theirs.method == "histogram entropy"
    assert float(pair.theirs.amax) == pytest.approx(toolkit_stand_in.ENTROPY_SHARE * most)
    assert float(pair.theirs.scale) == pytest.approx(float(pair.theirs.amax) / 127)


@pytest.mark.parametrize(
    ("changes", "tensor", "said"),
    [
        ({"activation_observer": "mse"}, "input", "AssertionError: Torch not compiled with CUDA"),
        ({"activation_observer": "moving-average"}, "input", "no calibrator like moving-average"),
        ({"weight_observer": "mse"}, "weight", "take the maximum, not mse"),
    ],
)
def test_what_the_tool_has_not_is_skipped_and_the_rest_is_not(
    changes: Dict[str, str], tensor: str, said: str
) -> None:
    found = _compared(_config(**changes))

    for (_, where), pair in _by_place(found).items():
        assert (pair.theirs is None) == (where == tensor)
        assert (said in pair.skipped) == (where == tensor)
    assert "SKIPPED: the toolkit" in found.text()


def test_fewer_bits_and_one_scale_for_a_weight() -> None:
    found = _compared(_config(activation_bits=4, weight_bits=4, per_channel=False))

    for pair in found.pairs:
        assert pair.theirs is not None
        assert pair.theirs.scale.shape == ()
        assert int(pair.theirs.codes.abs().max()) <= 8
        assert pair.equal_codes > 0.999


def test_channels_of_a_transposed_convolution_are_along_its_second_dimension() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 5, 2)).eval()
    pair = _by_place(_compared(model=model))["0", "weight"]

    assert pair.theirs is not None
    assert pair.theirs.scale.shape == (5,)
    assert pair.equal_codes > 0.999


def test_zeros_stay_zeros() -> None:
    model = small_network()
    with torch.no_grad():
        model[0].weight[3] = 0
    pair = _by_place(_compared(model=model))["0", "weight"]

    assert pair.theirs is not None
    assert not pair.theirs.codes[3].any()
    assert pair.equal_codes > 0.999


def test_text_and_fact_have_both(capsys: pytest.CaptureFixture[str]) -> None:
    found = _compared()
    lines = found.text().splitlines()
    fact = json.loads(json.dumps(found.to_fact()))

    assert lines[0].startswith("pytorch-quantization 2.1.3")
    assert len(lines) == 2 + 2 * len(LAYERS)
    assert len({len(line) for line in lines[2:]}) == 1
    assert [pair["layer"] for pair in fact["pairs"][::2]] == list(LAYERS)
    assert fact["pairs"][0]["ours"]["amax"] == pytest.approx(fact["pairs"][0]["theirs"]["amax"])
    assert capsys.readouterr().out == ""


def test_ours_are_what_calibrate_gives() -> None:
    model = small_network()
    pairs = _by_place(_compared(model=model))
    scales = calibrate(model, _batches(), SYMMETRIC)

    for name, each in scales.items():
        assert torch.equal(pairs[name, "input"].ours.scale, each.input.scale)
        codes = each.weight.quantize(dict(model.named_modules())[name].weight)
        assert torch.equal(pairs[name, "weight"].ours.codes, codes)


def test_what_is_not_there_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pytorch_quantization", "tensorrt"):
        monkeypatch.setitem(sys.modules, name, None)
    toolkit, tensorrt = compare(small_network(), _batches())

    assert (toolkit.pairs, tensorrt.pairs) == ((), ())
    assert toolkit.text().startswith("pytorch-quantization: SKIPPED: ")
    assert tensorrt.to_fact()["skipped"].startswith("tensorrt is not installed")
    on_cpu = TensorRT(device=torch.device("cpu"))
    assert "runs on NVIDIA GPUs, not on cpu" in on_cpu.missing()


def test_none_and_a_broken_one_are_told_apart() -> None:
    def absent() -> Any:
        raise ModuleNotFoundError("No module", name="pytorch_quantization")

    def broken() -> Any:
        raise ImportError("libcudart.so.11.0: cannot open shared object file")

    assert "is not installed: it comes from NVIDIA" in PytorchQuantization(absent).missing()
    assert "libcudart.so.11.0" in PytorchQuantization(broken).missing()
    assert PytorchQuantization(lambda: types.SimpleNamespace()).missing() == ""


@pytest.mark.parametrize("changes", [{"activation_symmetric": False}, {"weight_symmetric": False}])
def test_zero_points_have_nothing_to_stand_beside(changes: Dict[str, bool]) -> None:
    with pytest.raises(BadValueError, match="a zero point"):
        compare(
            small_network(), _batches(), QuantConfig(**{"activation_symmetric": True, **changes})
        )


def test_no_data_is_said_by_us() -> None:
    with pytest.raises(CalibrationError, match="no calibration data"):
        compare(small_network(), [])
