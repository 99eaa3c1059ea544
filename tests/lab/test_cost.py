"""What networks cost: published figures, other people's counters, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Tuple

import pytest
import torch
import torch.nn.functional as F
from cost_cases import lenet, resnet50, resnet50_cost
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.measure import cost
from narrowgauge_lab.measure.cost import UncountableError, count, peak_memory, serialised_bytes

CPU = torch.device("cpu")
#: ptflops and torch's counter need it; fvcore is asked where they are.
needs_torch_2 = pytest.mark.skipif(
    not torch_compat.has_dispatch_mode(), reason="the other counters need torch 2"
)


def test_resnet_50_at_224_has_its_published_cost() -> None:
    found = resnet50_cost(224)

    assert round(found.macs / 1e9, 3) == 4.089
    assert found.parameters == 25_557_032
    # Parameters, and of 53 normalisations mean, variance and a counter of 8 bytes.
    assert found.bytes == 4 * 25_557_032 + 4 * 53_120 + 8 * 53
    # 13 convolutions of 3×3 and stride 1, of 115.6 MMAC each, at 64/324; each rounded up.
    assert found.macs - found.least_macs == 13 * (115_605_504 * 260 // 324)


def test_resnet_50_at_32_is_another_network() -> None:
    """Hence "0.09 GMAC" of a table that compared it with a network for 32×32 images."""
    found = resnet50_cost(32, batch=2)

    assert round(found.macs / found.batch / 1e6, 1) == 85.5
    assert found.batch == 2


def test_the_lenet_of_the_manual_layers() -> None:
    found = count(lenet(), torch.zeros(1, 1, 28, 28))

    assert found.parameters == 18_224
    assert found.macs == 24 * 24 * 4 * 25 + 8 * 8 * 10 * 100 + 16000 + 1000
    assert sum(found.per_operator.values()) == found.macs
    convolution = "convolution" if torch_compat.has_dispatch_mode() else "_convolution"
    assert set(found.per_operator) == {f"aten::{convolution}", "aten::addmm"}


def _conv(rank: int, transposed: bool = False, **options: Any) -> nn.Module:
    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return (kinds if transposed else plain)[rank - 1](6, 4, 3, **options)


@pytest.mark.parametrize(
    ("module", "shape", "macs", "least"),
    [
        (_conv(1), (2, 6, 9), 2 * 4 * 7 * 18, 2 * 4 * 7 * 18 * 8 // 18),
        (_conv(2, padding=1, groups=2), (1, 6, 5, 5), 4 * 25 * 27, 4 * 25 * 27 * 64 // 324 + 1),
        (_conv(2, stride=2), (1, 6, 5, 5), 4 * 4 * 54, 4 * 4 * 54),
        (_conv(2, stride=(1, 2)), (1, 6, 5, 5), 4 * 6 * 54, 4 * 6 * 54 * 8 // 18),
        (_conv(3, dilation=2), (1, 6, 5, 5, 5), 4 * 162, 4 * 162 * 2 // 27),
        (nn.Conv2d(2, 3, 7, padding=3), (1, 2, 9, 9), 3 * 81 * 98, 3 * 81 * 98 * 2 // 49),
        (_conv(2, transposed=True, stride=2), (1, 6, 5, 5), 6 * 25 * 36, 6 * 25 * 36),
        (_conv(1, transposed=True, groups=2), (3, 6, 9), 3 * 6 * 9 * 6, 3 * 6 * 9 * 6 * 8 // 18),
        (nn.Linear(7, 3), (4, 5, 7), 4 * 5 * 21, 4 * 5 * 21),
        (nn.Linear(7, 3, bias=False), (7,), 21, 21),
    ],
)
def test_macs_follow_from_the_shapes(
    module: nn.Module, shape: Tuple[int, ...], macs: int, least: int
) -> None:
    found = count(module, torch.zeros(*shape))

    assert (found.macs, found.least_macs) == (macs, least)


@pytest.mark.parametrize(
    ("call", "shape", "macs"),
    [
        (lambda x: x @ x, (3, 3), 27),
        (lambda x: x @ x[0], (2, 5, 5), 2 * 5 * 25),
        (lambda x: torch.mv(x, x[0]), (3, 3), 9),
        (lambda x: torch.dot(x, x), (7,), 7),
        (lambda x: torch.bmm(x, x), (2, 3, 3), 54),
        (lambda x: torch.baddbmm(x, x, x), (2, 3, 3), 54),
        (lambda x: torch.addbmm(x[0], x, x), (2, 3, 3), 54),
        (lambda x: torch.einsum("bij,bjk->bik", x, x), (2, 3, 3), 54),
        (lambda x: torch.einsum("ij,ij->", x, x), (3, 4), 12),
        (lambda x: torch.tensordot(x, x, dims=2), (3, 3), 9),
        (lambda x: F.conv2d(x, x), (1, 1, 3, 3), 9),
        (lambda x: torch.cdist(x, x), (2, 30, 5), 2 * 30 * 30 * 7),
        (lambda x: torch.cdist(x, x), (4, 5), 0),
        (lambda x: F.relu(x) + x, (3, 3), 0),
    ],
)
def test_functions_count_like_modules(
    call: Callable[[torch.Tensor], Any], shape: Tuple[int, ...], macs: int
) -> None:
    found = count(call, torch.zeros(*shape))

    assert found.macs == macs
    assert (found.parameters, found.bytes) == (0, 0)


@needs_torch_2
def test_a_training_step_is_counted_as_torch_counts_it() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from narrowgauge_lab.measure.watch import watch

    model, images = lenet(), torch.randn(3, 1, 28, 28)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    uses = watch(lambda: model(images).sum().backward())

    assert 2 * sum(use.macs for use in uses) == counter.get_total_flops()


@needs_torch_2
def test_fused_attention_counts_as_the_products_that_it_fuses() -> None:
    """torch's own counter finds nothing in the fused operator on a CPU."""
    query, key = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 12, 16)
    value = torch.randn(2, 4, 12, 8)
    fused = count(lambda q: F.scaled_dot_product_attention(q, key, key), query)
    plain = count(lambda q: (q @ key.transpose(-1, -2)).softmax(-1) @ key, query)
    narrow = count(lambda q: F.scaled_dot_product_attention(q, key, value), query)

    assert any("attention" in name for name in fused.per_operator)
    assert fused.macs == plain.macs == 2 * 4 * 8 * 12 * (16 + 16)
    assert narrow.macs == 2 * 4 * 8 * 12 * (16 + 8)


@needs_torch_2
@pytest.mark.parametrize(
    ("build", "shape", "biases"),
    [
        (lenet, (1, 28, 28), 4 * 24 * 24 + 10 * 8 * 8 + 100 + 10),
        (resnet50, (3, 64, 64), 1000),
    ],
)
def test_four_counters_agree(
    build: Callable[[], nn.Module], shape: Tuple[int, ...], biases: int
) -> None:
    """torch's counts 2 per MAC, ptflops' one more for each bias that is added, fvcore's as ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both libraries use functions that torch has deprecated
        from fvcore.nn import FlopCountAnalysis
        from ptflops import get_model_complexity_info
    from torch.utils.flop_counter import FlopCounterMode

    model, images = build().eval(), torch.zeros(1, *shape)
    found = count(model, images)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, parameters = get_model_complexity_info(
            model, shape, backend="aten", as_strings=False, print_per_layer_stat=False
        )
        analysis = FlopCountAnalysis(model, images)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        by_operator = analysis.by_operator()

    assert 2 * found.macs == counter.get_total_flops()
    assert found.macs == by_operator["conv"] + by_operator["linear"]
    assert found.macs + biases == theirs
    assert found.parameters == parameters


def test_counting_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    count(model, torch.randn(2, 3, 8, 8))

    assert model.training
    assert model[1].training
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_counting_restores_the_mode_of_each_module() -> None:
    """A frozen part in eval mode inside a network that trains, and the other way round."""
    mixed = nn.Sequential(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), nn.Conv2d(3, 4, 3))
    for top in (True, False):
        mixed.train(top)
        mixed[0].train(not top)
        mixed[0][1].train(top)
        before = [each.training for each in mixed.modules()]
        count(mixed, torch.randn(2, 3, 8, 8))

        assert [each.training for each in mixed.modules()] == before


def test_the_modes_come_back_after_an_error_too() -> None:
    mixed = nn.Sequential(nn.BatchNorm2d(3).eval(), nn.Conv2d(3, 4, 3))
    with pytest.raises(RuntimeError):
        count(mixed, torch.randn(2, 5, 8, 8))

    assert [each.training for each in mixed.modules()] == [True, False, True]


def _converted() -> nn.Module:
    from torch.nn import quantized

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated since torch 2.13
        return quantized.Linear(8, 4)


def test_a_converted_network_is_refused_with_what_to_count_instead() -> None:
    model = _converted()

    def call(values: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            images = torch.quantize_per_tensor(values, 0.1, 0, torch.quint8)
        return model(images).dequantize()

    with pytest.raises(UncountableError, match="converted") as caught:
        count(call, torch.zeros(2, 8))

    assert "quantized::linear" in caught.value.why
    assert "before it is converted" in caught.value.next_step


def test_the_bytes_of_a_converted_network_are_those_of_its_packed_weights() -> None:
    """32 weights of one byte with one scale and zero point, four float biases, and the layer's own
    scale (float32) and zero point (int64)."""
    assert serialised_bytes(_converted()) == 32 + 16 + 4 * 4 + 4 + 8


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_a_dynamically_quantised_recurrent_layer_counts_its_nested_weights(
    kind: Callable[..., nn.Module], gates: int
) -> None:
    """One byte per weight, 16 for each matrix's scale and zero point, and float biases, in each of
    two layers. They are packed inside what is packed."""
    from torch.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated since torch 2.10
        model = quantize_dynamic(nn.Sequential(kind(4, 3, 2)), {kind}, dtype=torch.qint8)

    rows = 3 * gates
    assert serialised_bytes(model) == rows * (4 + 3 + 3 + 3) + 4 * 16 + 4 * rows * 4


class _Opaque(nn.Module):
    def state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        return {"weight": torch.zeros(3), "more": [self.held()]}

    def held(self) -> Any:
        return object()


def test_unpacked_tensors_are_counted_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors made by unpacking die at once where nobody keeps them, and the next ones are at their
    addresses: alike layers would count once. Large ones are sure to be."""

    class Packed:
        def unpack(self) -> Tuple[torch.Tensor, torch.Tensor]:
            return torch.ones(1 << 20), torch.ones(3)

    monkeypatch.setattr(cost.torch._C, "ScriptObject", Packed)
    monkeypatch.setattr(_Opaque, "held", lambda _: [Packed() for _ in range(4)])

    assert serialised_bytes(_Opaque()) == 3 * 4 + 4 * 4 * ((1 << 20) + 3)


def test_what_cannot_be_opened_is_not_counted_as_nothing() -> None:
    with pytest.raises(UncountableError, match="bytes of a object") as caught:
        serialised_bytes(_Opaque())

    assert caught.value.why


def test_packed_weights_that_do_not_open_are_not_counted_as_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sealed:
        def __getstate__(self) -> Any:
            raise RuntimeError("Tried to serialize object that has no def_pickle")

    monkeypatch.setattr(cost.torch._C, "ScriptObject", Sealed)
    monkeypatch.setattr(_Opaque, "held", lambda _: Sealed())
    with pytest.raises(UncountableError, match="bytes of a Sealed") as caught:
        serialised_bytes(_Opaque())

    assert "no def_pickle" in caught.value.why


def test_an_operator_without_a_formula_is_named() -> None:
    with pytest.raises(UncountableError, match=r"no formula for the cost of aten::_?\w*linear"):
        count(lambda x: F.bilinear(x, x, torch.zeros(1, 3, 3)), torch.zeros(2, 3))


def test_tied_weights_are_stored_once() -> None:
    one = nn.Linear(4, 4, bias=False)
    both = nn.Sequential(one, nn.Linear(4, 4, bias=False))
    both[1].weight = one.weight

    assert serialised_bytes(both) == serialised_bytes(one) == 64


def test_half_precision_halves_the_bytes() -> None:
    assert 2 * serialised_bytes(lenet().half()) == serialised_bytes(lenet()) == 4 * 18_224


def test_peak_memory_on_a_cpu_is_what_the_call_adds() -> None:
    """20 MB that live together, and 10 MB afterwards; what was there before does not count."""
    before = torch.ones(2_500_000)

    def call() -> None:
        one = torch.ones(2_500_000)
        other = one + before
        del one
        other.add_(1.0)

    assert peak_memory(CPU, call) == pytest.approx(20e6, rel=0.05)
    assert peak_memory(CPU, lambda: None) < 2e6


def test_peak_memory_says_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cost.Path, "write_text", refuse)
    with pytest.raises(NotApplicableError, match="peak memory") as caught:
        peak_memory(CPU, lambda: None)

    assert "Permission denied" in caught.value.why


def test_the_cost_is_a_fact_that_json_can_hold() -> None:
    fact = count(lenet(), torch.zeros(2, 1, 28, 28)).to_fact()

    assert fact["batch"] == 2
    assert fact["macs"] == 2 * 138_600
    assert set(fact) == {"macs", "parameters", "bytes", "per_operator", "least_macs", "batch"}


@pytest.mark.gpu
def test_peak_memory_on_a_gpu_includes_what_was_there() -> None:
    device = torch.device("cuda")
    before = torch.ones(25_000_000, device=device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()

    peak = peak_memory(device, lambda: before + 1.0)

    # Whole segments, of 2 or 20 MiB: never less than what is used, and not much more.
    assert held >= 100e6
    assert held + 100e6 <= peak <= held + 100e6 + 42e6
