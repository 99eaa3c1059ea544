"""XLA: the translator's operators against torch's, one by one; whole networks in the slow tier,
which brings jax."""

from __future__ import annotations

import math
import sys
from typing import Any, Callable

import pytest
import torch
from engine_cases import (
    CPU,
    NETWORKS,
    Unknown,
    check_float32,
    images,
    network,
)
from torch import nn
from torch.nn import functional as F

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import engines
from narrowgauge_lab.engines import Preparation, registry
from narrowgauge_lab.engines.errors import EngineBuildError, OperatorNotTakenError
from narrowgauge_lab.engines.xla import layer_facts
from narrowgauge_lab.engines.xla_operators import Library, translate

NO_JAX = Library(None, None, None, None)
FP32 = Preparation("fp32", CPU)


@pytest.fixture(scope="module")
def _there() -> None:
    reason = engines.missing("xla", CPU)
    if reason:
        pytest.skip(reason)


def test_without_its_library_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge_lab.engines import xla

    xla._jax.cache_clear()
    monkeypatch.setitem(sys.modules, "jax", None)
    assert engines.missing("xla", CPU) == "jax is not installed: pip install jax"


class _Layer(nn.Module):
    """One layer, or one function, behind another."""

    def __init__(self, layer: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@pytest.mark.parametrize(
    ("layer", "operator", "name"),
    [
        (nn.Conv2d(3, 3, 3, padding_mode="circular", padding=1), "Conv2d", "layer"),
        (nn.ConvTranspose2d(3, 3, 3), "ConvTranspose2d", "layer"),
        (nn.GELU(), "GELU", "layer"),
        (nn.MaxPool2d(2, return_indices=True), "MaxPool2d", "layer"),
        (nn.BatchNorm2d(3, track_running_stats=False), "BatchNorm2d", "layer"),
        (F.softmax, "softmax", "softmax"),
        (torch.sigmoid, "sigmoid", "sigmoid"),
        (lambda x: x.tanh(), "tanh", "tanh"),
    ],
)
def test_an_operator_that_it_has_not_is_named(layer: Any, operator: str, name: str) -> None:
    """Before jax is needed: the translator looks at the network alone."""
    with pytest.raises(OperatorNotTakenError) as caught:
        translate(_Layer(layer).eval(), NO_JAX)
    assert (caught.value.engine, caught.value.operator) == ("xla", operator)
    assert f"does not take the operator {operator}, which is layer {name}" in caught.value.what


def test_a_network_that_cannot_be_read_is_said() -> None:
    with pytest.raises(EngineBuildError, match=r"torch\.fx cannot read this _Layer") as caught:
        translate(_Layer(lambda x: x if x.sum() > 0 else -x), NO_JAX)
    assert caught.value.why


def test_what_a_program_says_of_its_products() -> None:
    """Lines as XLA 0.10 writes them on a CPU, and as it writes calls of cuDNN's and cuBLAS's."""
    asked = ", operand_precision={highest,highest}"
    lines = [
        "  %convolution.1 = f32[2,17,17,8]{3,2,1,0} convolution(%a, %b), dim_labels=b01f_01io->b01f"
        + asked
        + ', metadata={op_name="jit(run)/block.conv1/conv_general_dilated" stack_frame_id=4}',
        "  %fusion.1 = f32[2,16]{1,0} fusion(%convolution.1), kind=kCustom, calls=%fused, "
        'metadata={op_name="jit(run)/mean"}',
        "  %cudnn-conv = (f16[2,8,17,17]{1,3,2,0}, u8[0]{0}) custom-call(%a, %b), "
        'custom_call_target="__cudnn$convForward", '
        'metadata={op_name="jit(run)/stem/conv_general_dilated"}',
        '  %topk = f32[2]{0} custom-call(%a), custom_call_target="TopK"',
        "  ROOT %dot.0 = bf16[2,7]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}",
    ]
    hlo = "\n".join(lines)
    facts = list(layer_facts(hlo, "fp32"))
    assert [(f.layer, f.operator, f.kernel, f.precision) for f in facts] == [
        ("block.conv1", "convolution", "", "fp32"),
        ("stem", "convolution", "__cudnn$convForward", "fp16"),
        ("dot.0", "dot", "", "bf16"),
    ]
    assert all(fact.is_product for fact in facts)
    assert next(layer_facts(hlo.replace(asked, ""), "tf32")).precision == "tf32"
    assert next(layer_facts(hlo, "tf32")).precision == "fp32"


def _norm() -> nn.Module:
    norm = nn.BatchNorm2d(3, eps=0.1)
    for tensor in (norm.weight, norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 1.5)
    return norm


def _operators() -> Any:
    torch.manual_seed(4)
    return {
        "conv": nn.Conv2d(3, 6, (3, 2), (2, 1), (1, 2), (1, 2), 3),
        "conv same": nn.Conv2d(3, 4, 3, padding="same", bias=False),
        "norm": _norm(),
        "relu6": nn.ReLU6(),
        "hardtanh": nn.Hardtanh(-0.5, 0.7),
        "max": nn.MaxPool2d((3, 2), 2, 1),
        "max ceil": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        "max dilated": nn.MaxPool2d(2, 3, dilation=3, ceil_mode=True),
        "avg": nn.AvgPool2d(3, 2, 1),
        "avg ceil": nn.AvgPool2d(4, 3, 2, ceil_mode=True),
        "avg of the image": nn.AvgPool2d(4, 3, 2, ceil_mode=True, count_include_pad=False),
        "avg divisor": nn.AvgPool2d(3, 2, ceil_mode=True, divisor_override=5),
        "adaptive": nn.AdaptiveAvgPool2d((4, 7)),
        "adaptive none": nn.AdaptiveAvgPool2d((None, 1)),
        "adaptive same": nn.AdaptiveAvgPool2d(17),
        "flatten": nn.Flatten(2, 3),
        "dropout": nn.Dropout(0.9),
        "function relu": F.relu,
        "function max": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
        "function avg": lambda x: F.avg_pool2d(x, 3, stride=2),
        "function adaptive": lambda x: F.adaptive_avg_pool2d(x, (1, 1)),
        "function dropout": lambda x: F.dropout(x, 0.5, training=False),
        "function hardtanh": lambda x: F.hardtanh(x, -1.0, 2.0),
        "cat": lambda x: torch.cat([x, 2 * x, x + x], 1),
        "add": lambda x: torch.add(x, x, alpha=3),
        "method add": lambda x: x.add_(1),
        "mean": lambda x: x.mean((2, 3)),
        "mean kept": lambda x: torch.mean(x, [2, 3], keepdim=True),
        "reshape": lambda x: x.reshape(x.shape[0], -1),
        "view": lambda x: x.view(x.size(0), 3, -1),
        "flatten function": lambda x: torch.flatten(x, 1),
    }


@pytest.mark.slow
@pytest.mark.last
@pytest.mark.usefixtures("_there")
class TestWithJax:
    @pytest.mark.parametrize("which", _operators() if sys.version_info >= (3, 9) else [])
    def test_each_operator_is_torchs(self, which: str) -> None:
        import jax

        model = _Layer(_operators()[which]).eval()
        library = Library(jax, jax.numpy, jax.lax, jax.lax.Precision.HIGHEST)
        weights = {
            name: jax.numpy.asarray(tensor.detach().numpy())
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        run = jax.jit(translate(model, library))
        # Of nothing torch itself makes no open length.
        for count in (1, 3) if which in ("reshape", "view") else (0, 1, 3):
            x = images(count, seed=6)
            with torch.no_grad():
                right = model(x.clone())
            got = torch.from_dlpack(run(weights, jax.numpy.asarray(x.numpy())))
            assert got.shape == right.shape
            torch.testing.assert_close(got, right, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("name", NETWORKS)
    def test_agrees_with_float64(self, name: str) -> None:
        model, runner = check_float32("xla", name)
        x = images(3)
        x[1, 0, 8, 8] = math.nan
        assert torch.isfinite(runner(x)).all(1).tolist() == [True, False, True]
        layers = {n for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
        facts = runner.layers()
        assert len(facts) == len(layers)
        # A pass of XLA's may drop an instruction's name, which is then the program's own.
        assert {fact.layer for fact in facts} & layers
        assert {(f.provider, f.precision) for f in facts} == {("xla", "fp32")}
        assert runner.memory_bytes() > 4 * sum(p.numel() for p in model.fc.parameters())

    def test_the_result_outlives_the_call_and_the_input_may_change(self) -> None:
        runner = engines.prepare("xla", network("residual"), images(2), FP32)
        x = images(2)
        first = runner(x)
        kept = first.clone()
        x.zero_()
        runner(x)
        assert torch.equal(first, kept)

    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_16_bits_are_refused_where_they_run_in_float32(self, precision: str) -> None:
        reason = registry.refuses("xla", precision, CPU)
        assert reason == "" or f"takes products of {precision} in fp32" in reason

    def test_unknown_operators_come_through_the_registry(self) -> None:
        with pytest.raises(OperatorNotTakenError, match="xla does not take the operator"):
            engines.prepare("xla", Unknown().eval(), images(1), FP32)
        wanted = Preparation("int8", CPU, (images(1),))
        with pytest.raises(NotApplicableError, match="xla does not run int8"):
            engines.prepare("xla", network("residual"), images(1), wanted)

    def test_the_environment_is_as_it_was(self) -> None:
        import os

        assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ
