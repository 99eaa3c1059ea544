"""The dtypes that operators really had, under whatever stands above them, on both ages of torch."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import fold

from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog
from narrowgauge_contract.job import RowPlan
from narrowgauge_contract.outcome import Row
from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure import kernels, tf32
from narrowgauge_lab.measure.probe import (
    NotObservableError,
    Observation,
    declare,
    float32_bits,
    kernel_names,
    observe,
    observe_compilation,
    precision_ran,
    require_precision,
    tf32_by_arithmetic,
)

CPU = torch.device("cpu")
MODERN = torch_compat.has_dispatch_mode()
CONVOLUTION = "aten::convolution" if MODERN else "aten::_convolution"
STRICT = {"matmul": False, "conv": False}
needs_torch_2 = pytest.mark.skipif(not MODERN, reason="this torch has nothing of the kind")
before_torch_2 = pytest.mark.skipif(MODERN, reason="this torch sees through it")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )


def _images() -> torch.Tensor:
    return torch.randn(2, 1, 4, 4)


def _dtypes(seen: Sequence[Observation]) -> Dict[str, tuple]:
    return {each.operator: (each.inputs, each.weight, each.output) for each in seen}


def _ran(call: Callable[[], Any]) -> str:
    return precision_ran(observe(call), STRICT)


def test_a_forward_pass_gives_each_operator_with_its_calls() -> None:
    model, images = _net(), _images()

    def call() -> None:
        model(images)
        model(images)

    seen = observe(call)

    assert {(each.operator, each.calls) for each in seen} == {
        (CONVOLUTION, 2), ("aten::addmm", 2)
    }  # fmt: skip
    assert {each.device for each in seen} == {"cpu"}
    assert _dtypes(seen)[CONVOLUTION] == ("float32", "float32", "float32")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.conv1d(x[0], x[0]),
        lambda x: F.conv2d(x, x),
        lambda x: F.conv3d(x[None], x[None]),
        lambda x: F.conv_transpose1d(x[0], x[0]),
        lambda x: F.conv_transpose2d(x, x),
        lambda x: F.conv_transpose3d(x[None], x[:, None]),
        lambda x: F.linear(x, x[0, 0]),
        lambda x: F.linear(x, x[0, 0], x[0, 0, 0]),
        lambda x: x @ x,
        lambda x: x[0, 0] @ x[0, 0, 0],
        lambda x: torch.matmul(x, x[0, 0]),
        lambda x: torch.mm(x[0, 0], x[0, 0]),
        lambda x: torch.addmm(x[0, 0], x[0, 0], x[0, 0]),
        lambda x: torch.bmm(x[0], x[0]),
        lambda x: torch.baddbmm(x[0], x[0], x[0]),
        lambda x: torch.addbmm(x[0, 0], x[0], x[0]),
        lambda x: torch.dot(x[0, 0, 0], x[0, 0, 0]),
        lambda x: torch.einsum("abij,abjk->abik", x, x),
        lambda x: torch.tensordot(x[0, 0], x[0, 0], dims=1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_convolution_and_product_is_seen(
    call: Callable[[torch.Tensor], Any], dtype: torch.dtype
) -> None:
    values = torch.randn(3, 3, 3, 3).to(dtype)
    (seen,) = observe(lambda: call(values))

    name = str(dtype).replace("torch.", "")
    assert (seen.inputs, seen.weight, seen.output, seen.calls) == (name, name, name, 1)


@pytest.mark.parametrize(
    ("points", "options", "calls"),
    [
        (30, {}, 1),
        (5, {}, 0),
        (5, {"compute_mode": "use_mm_for_euclid_dist"}, 1),
        (30, {"compute_mode": "donot_use_mm_for_euclid_dist"}, 0),
        (30, {"p": 1.0}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("inference", [False, True])
def test_the_product_inside_of_distances_is_seen(
    points: int, options: Dict[str, Any], calls: int, inference: bool
) -> None:
    """Euclid's distances of many points are a product, all others are none."""
    x = torch.randn(points, 4)
    with torch_compat.inference_mode() if inference else contextlib.nullcontext():
        seen = observe(lambda: torch.cdist(x, x, **options))

    assert [(each.inputs, each.weight, each.calls) for each in seen] == (
        [("float32", "float32", 1)] * calls
    )


def test_the_backward_pass_is_seen() -> None:
    model, images = _net(), _images()
    seen = _dtypes(observe(lambda: model(images).sum().backward()))

    if MODERN:
        assert set(seen) == {
            CONVOLUTION, "aten::addmm", "aten::mm", "aten::convolution_backward"
        }  # fmt: skip
    else:
        kinds = {name.partition("::")[0] for name in seen}
        assert kinds == {"aten", "autograd"}
        assert len(seen) == 4
    assert set(seen.values()) == {("float32", "float32", "float32")}
    assert model[0].weight.grad is not None


def test_a_backward_pass_in_another_dtype_is_found() -> None:
    """The gradient is what the backward operator gets, whatever the forward one had."""
    layer, values = nn.Linear(3, 2).double(), torch.randn(4, 3)

    def call() -> None:
        layer(values.double()).float().sum().backward()

    assert _ran(call) == "fp64"
    assert len(observe(call)) >= 2


def _half(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """What apex's O1 put in the place of a function: operands cast, whatever they were."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        cast = [each.to(dtype) if isinstance(each, torch.Tensor) else each for each in args]
        return function(*cast, **kwargs)

    return wrapper


def test_a_patch_of_the_whole_process_is_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 model, float32 images, and yet: this is how a benchmark came to compare itself."""
    model, images = _net().eval(), _images()
    assert _ran(lambda: model(images)) == "fp32"
    for name in ("conv2d", "linear"):
        monkeypatch.setattr(F, name, _half(getattr(F, name), torch.float64))

    with torch.no_grad():
        seen = observe(lambda: model[4](model[0](images).flatten(1)))

    assert precision_ran(seen, STRICT) == "fp64"
    assert model[0].weight.dtype == torch.float32
    assert _dtypes(seen)[CONVOLUTION] == ("float64", "float64", "float64")


def test_a_patch_that_casts_back_is_seen_through_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks on layers see float32 come out, and would say so."""
    model, images = _net().eval(), _images()
    patched = _half(F.conv2d, torch.bfloat16)
    monkeypatch.setattr(F, "conv2d", lambda *args: patched(*args).float())

    assert _ran(lambda: model(images)) == "bf16+fp32"


@pytest.mark.parametrize("dtype", torch_compat.autocast_dtypes(CPU) or [None])
def test_autocast_is_seen_from_below(dtype: Any) -> None:
    if dtype is None:
        pytest.skip(f"torch {torch.__version__} has no autocast on a CPU")
    model, images = _net(), _images()

    def call() -> None:
        with torch_compat.autocast(CPU, dtype):
            logits = model(images)
        logits.float().sum().backward()

    assert _ran(call) == {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def test_inference_mode_hides_nothing() -> None:
    """Composite operators are dispatched whole there; nothing may be counted twice either."""
    model, images = _net().eval(), _images()

    def call() -> None:
        with torch_compat.inference_mode():
            model(images)
            images[0] @ images[1]

    seen = {each.operator: each.calls for each in observe(call)}

    assert seen.pop(CONVOLUTION) == 1
    assert seen.pop("aten::addmm") == 1
    assert len(seen) == 1


def test_watching_changes_neither_results_nor_state() -> None:
    torch.manual_seed(3)
    model, images = _net().eval(), _images()
    expected = model(images)
    found = []
    observe(lambda: found.append(model(images).detach()))

    assert torch.equal(found[0], expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_of_the_call_comes_out_and_nothing_stays_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        observe(lambda: 1 / 0)
    (seen,) = observe(lambda: torch.ones(2, 2) @ torch.ones(2, 2))

    assert seen.calls == 1
    assert torch.ones(1, requires_grad=True).sum().backward() is None


def _quantized() -> Callable[[], Any]:
    from torch.nn import quantized

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated since torch 2.13
        layers = quantized.Conv2d(1, 2, 3), quantized.Linear(8, 3)
        images = torch.quantize_per_tensor(_images(), 0.1, 0, torch.quint8)
    return lambda: layers[1](layers[0](images).flatten(1))


def test_converted_modules_are_int8() -> None:
    seen = observe(_quantized())

    assert {each.operator for each in seen} == {"quantized::conv2d", "quantized::linear"}
    assert {(each.inputs, each.weight) for each in seen} == {("quint8", "qint8")}
    assert precision_ran(seen, STRICT) == "int8"


def test_dynamically_quantised_layers_take_floats() -> None:
    from torch.nn.quantized import dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = dynamic.Linear(8, 3)
        ran = _ran(lambda: layer(torch.ones(2, 8)))

    assert ran == "fp32*int8"


@needs_torch_2
def test_eight_bit_products_of_torch_are_seen() -> None:
    one = torch.ones(32, 32, dtype=torch.int8)

    assert _ran(lambda: torch._int_mm(one, one)) == "int8"
    assert precision_ran([Observation("aten::_scaled_mm", "float8_e4m3fn", "float8_e5m2",
                                      "bfloat16", 1)], STRICT) == "fp8"  # fmt: skip


def test_a_kernel_without_operator_is_seen_where_it_is_declared() -> None:
    one, other = torch.ones(4, 3, dtype=torch.int8), torch.ones(3, 2, dtype=torch.int8)

    def call() -> None:
        declare("triton::int8_mm", one, other, torch.zeros(4, 2, dtype=torch.int32), macs=24)

    assert observe(call) == (Observation("triton::int8_mm", "int8", "int8", "int32", 1),)
    call()  # nobody watches


@needs_torch_2
def test_a_compiled_function_is_refused_before_it_is_harmed() -> None:
    compiled = torch.compile(lambda x: x @ x, backend="eager")
    values = torch.ones(2, 2)

    with pytest.raises(NotObservableError, match=r"captured: torch\.compile") as caught:
        observe(lambda: compiled(values))

    assert "observe_compilation" in caught.value.next_step
    assert torch.equal(compiled(values), values @ values)
    assert _ran(lambda: torch.mm(values, values)) == "fp32"


@needs_torch_2
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::torch")
def test_what_the_compiler_is_given_is_seen_once() -> None:
    model, images = _net().eval(), _images()
    compiled = torch.compile(model)

    def call() -> torch.Tensor:
        with torch_compat.inference_mode(), torch_compat.autocast(CPU, torch.bfloat16):
            return compiled(images)

    seen = observe_compilation(call)

    assert precision_ran(seen, STRICT) == "bf16"
    assert {each.operator for each in seen} == {CONVOLUTION, "aten::addmm"}
    assert call().dtype == torch.bfloat16
    with pytest.raises(NotObservableError, match="nothing was compiled"):
        observe_compilation(call)


@before_torch_2
def test_torchscript_is_refused_where_it_cannot_be_followed() -> None:
    model, images = torch.jit.script(_net()), _images()
    with pytest.raises(NotObservableError, match="captured"):
        observe(lambda: model(images))


class _BaseGraph:
    def capture_end(self) -> None:
        """What `torch.cuda.graph` calls."""

    def replay(self) -> str:
        return "replayed"


class _Graph(_BaseGraph):
    """Stands for CUDA's graphs, made of two classes as they are, where there is no CUDA."""

    def replay(self) -> str:
        return super().replay()


def test_a_replayed_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph, raising=False)
    graph = _Graph()
    with pytest.raises(NotObservableError, match="not observable: captured: CUDA graph") as caught:
        observe(graph.replay)  # bound before anyone could replace it
    with pytest.raises(NotObservableError):
        observe(lambda: graph.replay())

    assert "captures the graph" in caught.value.next_step
    assert graph.replay() == "replayed"


def test_a_graph_that_was_captured_under_these_eyes_may_be_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph, raising=False)
    graph, values = _Graph(), torch.ones(2, 2)

    def call() -> None:
        values @ values
        graph.capture_end()
        graph.replay()

    assert _ran(call) == "fp32"


def _seen(operator: str, inputs: str, weight: str = "", device: str = "cpu") -> Observation:
    return Observation(operator, inputs, weight or inputs, inputs, 1, device)


@pytest.mark.parametrize(
    ("seen", "measured", "ran"),
    [
        ([], STRICT, "none"),
        ([_seen("aten::mm", "float16")], STRICT, "fp16"),
        ([_seen("aten::mm", "float32")], {"matmul": True, "conv": False}, "tf32"),
        ([_seen("aten::convolution", "float32")], {"matmul": True, "conv": False}, "fp32"),
        (
            [_seen("aten::convolution", "float32"), _seen("aten::mm", "float32")],
            {"matmul": False, "conv": True},
            "fp32+tf32",
        ),
        ([_seen("a::conv", "bfloat16"), _seen("aten::mm", "float32")], STRICT, "bf16+fp32"),
        ([_seen("q::mm", "quint8", "qint8")], STRICT, "int8"),
        ([_seen("aten::_weight_int8pack_mm", "bfloat16", "int8")], STRICT, "bf16*int8"),
        ([_seen("aten::mm", "complex64")], STRICT, "complex64"),
        # What was measured on the GPU says nothing of a product on the CPU beside it.
        (
            [_seen("aten::mm", "float32", device="cuda"), _seen("aten::mm", "float32")],
            {"matmul": True, "conv": True},
            "fp32+tf32",
        ),
    ],
)
def test_the_word_for_what_ran(
    seen: List[Observation], measured: Dict[str, bool], ran: str
) -> None:
    assert precision_ran(seen, measured) == ran


def _row(tmp_path: Path, asked: str, seen: Sequence[Observation]) -> Row:
    plan = RowPlan(index=0, repeat=0, seed=0, parameters={})
    with EventLog(tmp_path / EVENTS_FILE) as log:
        log.emit(EventKind.ROW_START, 0, repeat=0, seed=0, parameters={})
        ctx = RowContext(plan, log, tmp_path, device=CPU, profile="smoke")
        require_precision(ctx, asked, seen, STRICT)
        log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0, error=None)
    (row,) = fold(tmp_path).rows()
    return row


def test_the_wrong_dtype_makes_the_row_invalid_and_names_the_operators(tmp_path: Path) -> None:
    seen = [_seen("aten::convolution", "float16"), _seen("aten::mm", "float32")]
    row = _row(tmp_path, "fp16", seen)

    assert row.validity.reasons == (
        "asked for precision fp16, ran fp16+fp32: aten::mm(float32, float32) × 1 on cpu",
    )
    assert row.facts["precision_ran"] == "fp16+fp32"
    assert row.facts["tf32_measured"] == STRICT
    assert row.facts["probe"][1] == {
        "operator": "aten::mm", "inputs": "float32", "weight": "float32", "output": "float32",
        "calls": 1, "device": "cpu",
    }  # fmt: skip


@pytest.mark.parametrize(("asked", "valid"), [("fp32", True), ("int8+fp32", False), ("", False)])
def test_all_that_was_asked_for_has_to_occur(tmp_path: Path, asked: str, valid: bool) -> None:
    assert _row(tmp_path, asked, [_seen("aten::mm", "float32")]).validity.valid is valid


def test_a_mixture_may_be_asked_for(tmp_path: Path) -> None:
    seen = [_seen("aten::mm", "float32"), _seen("aten::mm", "int8")]
    assert _row(tmp_path, "fp32+int8", seen).validity.valid


def test_a_row_without_any_product_is_not_what_was_asked_for(tmp_path: Path) -> None:
    assert _row(tmp_path, "fp32", []).validity.reasons == (
        "asked for precision fp32, ran none",
    )  # fmt: skip


def test_strict_float32_keeps_all_its_bits_here() -> None:
    tf32_flags.allow_tf32(False)

    assert float32_bits(CPU)["matmul"] == 23
    assert float32_bits(CPU)["conv"] >= 13
    assert tf32_by_arithmetic(CPU) == STRICT


def _rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """To so many explicit bits of the mantissa, to nearest even, as hardware does."""
    mantissa, exponent = torch.frexp(values) if hasattr(torch, "frexp") else _frexp(values)
    return torch.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1) * 2.0 ** exponent.float()


def _product_of(bits: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda one, other: torch.mm(_rounded(one, bits), _rounded(other, bits))


def _frexp(values: torch.Tensor) -> Any:
    exponent = torch.floor(torch.log2(values.abs().clamp(min=1e-30))) + 1
    return values / 2.0**exponent, exponent


@pytest.mark.parametrize(("bits", "is_tf32"), [(10, True), (23, False)])
def test_the_arithmetic_tells_tf32_from_float32(
    monkeypatch: pytest.MonkeyPatch, bits: int, is_tf32: bool
) -> None:
    """A product whose operands were rounded as tensor cores round them."""
    monkeypatch.setattr(tf32, "_product", _product_of(bits))

    assert float32_bits(CPU)["matmul"] == bits
    assert tf32_by_arithmetic(CPU) == {"matmul": is_tf32, "conv": False}


def test_fewer_bits_than_tf32_are_an_error_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a library computes float32 in bfloat16."""
    monkeypatch.setattr(tf32, "_product", _product_of(7))
    with pytest.raises(tf32.ReducedFloat32Error, match="fewer bits") as caught:
        tf32_by_arithmetic(CPU)

    assert "matmul: 7 of 23" in caught.value.why


def test_a_result_that_is_no_number_is_no_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf32, "_product", lambda a, b: torch.full_like(a, float("nan")))

    assert float32_bits(CPU)["matmul"] == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", True),
        ("turing_fp16_s1688gemm_fp16_256x64_ldg8_relu_f2f_tn", True),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_nn", True),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128", True),
        ("void cutlass::Kernel<cutlass_80_tensorop_s16816gemm_f16_64x64_32x6_nn_align8>", True),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", True),
        ("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x32", True),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x128x8_stage3_ffma_kernel", False),
        ("maxwell_scudnn_winograd_128x128_ldg1_ldg4_tile148n_nt", False),
        ("triton_poi_fused_relu_0", False),
        ("cudnn_generated_fort_native_conv_fprop", None),
        ("ampere_sgemm_128x64_nn", False),
        ("volta_sgemm_128x128_tn", False),
        ("void cutlass::Kernel<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>", False),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(float)", False),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::relu>", False),
        ("triton_tem_fused_addmm_3", None),
        ("implicit_convolve_kernel", None),
    ],
)
def test_names_of_kernels_are_evidence(name: str, expected: Any) -> None:
    assert kernels.uses_tensor_cores(name) is expected


class _Event:
    """An event of a profile."""

    def __init__(self, name: str, device: str, microseconds: float) -> None:
        self.name = name
        self.device_type = f"DeviceType.{device}"
        self.time_range = self
        self._microseconds = microseconds

    def elapsed_us(self) -> float:
        return self._microseconds


def test_kernels_are_summed_by_name_without_copies_and_marked_ranges() -> None:
    found = kernels._summed(
        [
            _Event("aten::mm", "CPU", 99.0),
            _Event("my range", "CPU", 99.0),
            _Event("my range", "CUDA", 50.0),
            _Event("Memcpy HtoD (Pinned -> Device)", "CUDA", 50.0),
            _Event("ampere_sgemm_128x64_nn", "CUDA", 2.0),
            _Event("nvjet_tst", "CUDA", 5.0),
            _Event("ampere_sgemm_128x64_nn", "CUDA", 4.0),
        ]
    )

    assert [(each.name, each.calls, each.tensor_cores) for each in found] == [
        ("ampere_sgemm_128x64_nn", 2, False), ("nvjet_tst", 1, True)
    ]  # fmt: skip
    assert found[0].seconds == pytest.approx(6e-6)


def test_without_a_gpu_there_are_no_kernels_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge_contract.errors import NotApplicableError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotApplicableError, match="no GPU kernels"):
        kernel_names(lambda: None)
