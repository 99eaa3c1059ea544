"""The probe on a GPU: autocast, patches, graphs, compiled code, and TF32 as it comes out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.measure.ceilings import CEILINGS, ceiling
from narrowgauge_lab.measure.probe import (
    NotObservableError,
    float32_bits,
    kernel_names,
    observe,
    observe_compilation,
    precision_ran,
    tf32_by_arithmetic,
)
from narrowgauge_lab.measure.roofline import ceiling_of_precision

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    tf32_flags.allow_tf32(False)
    yield
    tf32_flags.allow_tf32(False)


def _has_tf32() -> bool:
    return torch.cuda.get_device_capability() >= (8, 0)


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 16),
    ).to(CUDA)  # fmt: skip


def _images() -> torch.Tensor:
    return torch.randn(8, 3, 32, 32, device=CUDA)


def _ran(call: Callable[[], Any]) -> str:
    return precision_ran(observe(call), tf32_by_arithmetic(CUDA))


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_measured_under_the_flags(allowed: bool) -> None:
    tf32_flags.allow_tf32(allowed)
    found, bits = tf32_by_arithmetic(CUDA), float32_bits(CUDA)

    assert found == {"matmul": allowed and _has_tf32(), "conv": allowed and _has_tf32()}
    for kept in bits.values():
        assert kept == 10 if allowed and _has_tf32() else kept >= 13


def test_each_flag_counts_for_itself() -> None:
    """torch starts like this: convolutions may use TF32, products may not."""
    if not _has_tf32():
        pytest.skip("this GPU has no TF32")
    if hasattr(torch.backends.cudnn, "conv"):
        torch.backends.cudnn.conv.fp32_precision = "tf32"
    else:
        torch.backends.cudnn.allow_tf32 = True

    assert tf32_by_arithmetic(CUDA) == {"matmul": False, "conv": True}
    model, images = _net().eval(), _images()
    assert _ran(lambda: model(images)) == "fp32+tf32"


def test_what_the_environment_forbids_is_not_believed() -> None:
    """NVIDIA's libraries heed the variable whatever the flags say; they read it when they load."""
    code = (
        "import torch\n"
        "from narrowgauge_lab import tf32_flags\n"
        "from narrowgauge_lab.measure.probe import tf32_by_arithmetic\n"
        "tf32_flags.allow_tf32(True)\n"
        "assert all(tf32_flags.tf32_allowed().values())\n"
        "print(tf32_by_arithmetic(torch.device('cuda')))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "NVIDIA_TF32_OVERRIDE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, check=True
    )  # fmt: skip

    assert done.stdout.decode().strip() == "{'matmul': False, 'conv': False}"


def _modes() -> List[str]:
    return ["fp32", "fp16"] + (["tf32", "bf16"] if _gpu_has_tf32() else [])


def _gpu_has_tf32() -> bool:
    return torch.cuda.is_available() and _has_tf32()


@pytest.mark.parametrize("name", _modes())
@pytest.mark.parametrize("backward", [False, True])
def test_autocast_is_seen_from_below_forward_and_backward(name: str, backward: bool) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)
    if dtype != torch.float32 and dtype not in torch_compat.autocast_dtypes(CUDA):
        pytest.skip(f"this torch does not autocast to {name}")
    tf32_flags.allow_tf32(name == "tf32")
    model, images = _net(), _images()

    def call() -> None:
        with torch_compat.autocast(CUDA, dtype):
            logits = model(images)
        if backward:
            logits.float().sum().backward()

    seen = observe(call)

    assert precision_ran(seen, tf32_by_arithmetic(CUDA)) == name
    assert {each.device for each in seen} == {"cuda"}
    assert any("ackward" in each.operator or each.operator == "aten::mm" for each in seen) == (
        backward
    )


def test_a_patch_of_the_whole_process_is_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = _net().eval(), _images()
    assert _ran(lambda: model(images)) == "fp32"
    for name in ("conv2d", "linear"):
        monkeypatch.setattr(F, name, _halved(getattr(F, name)))

    assert _ran(lambda: model(images)) == "fp16"


def _halved(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        cast = (each.half() if isinstance(each, torch.Tensor) else each for each in args)
        return function(*cast).float()

    return wrapper


def test_a_graph_is_seen_when_it_is_captured_and_refused_when_it_is_replayed() -> None:
    if not torch_compat.graphs_available(CUDA):
        pytest.skip("this torch has no CUDA graphs")
    model, images = _net().eval().half(), _images().half()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            model(images)
    torch.cuda.synchronize()

    def capture() -> None:
        with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
            model(images)

    assert _ran(capture) == "fp16"
    with pytest.raises(NotObservableError, match="captured: CUDA graph"):
        observe(graph.replay)
    assert kernel_names(graph.replay), "the kernels of a replayed graph have names all the same"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_is_seen_when_it_is_compiled() -> None:
    if not torch_compat.compiler_available():
        pytest.skip("this torch does not compile")
    model, images = _net().eval(), _images()
    compiled = torch_compat.compiled(model, "default")

    def call() -> torch.Tensor:
        with torch.no_grad(), torch_compat.autocast(CUDA, torch.float16):
            return compiled(images)

    assert precision_ran(observe_compilation(call), tf32_by_arithmetic(CUDA)) == "fp16"
    with pytest.raises(NotObservableError, match=r"captured: torch\.compile"):
        observe(call)
    assert call().dtype == torch.float16
    assert kernel_names(call)


def test_kernels_of_half_precision_are_tensor_core_kernels_by_name() -> None:
    if torch.cuda.get_device_capability() < (7, 0):
        pytest.skip("this GPU has no tensor cores")
    half = torch.randn(2048, 2048, device=CUDA).half()
    strict = torch.randn(2048, 2048, device=CUDA)
    verdicts: Dict[str, Any] = {}
    for name, operand in (("fp16", half), ("fp32", strict)):
        operand @ operand
        longest = kernel_names(lambda operand=operand: operand @ operand)[0]
        verdicts[name] = longest.tensor_cores
        assert longest.calls >= 1
        assert longest.seconds > 1e-6

    assert verdicts == {"fp16": True, "fp32": False}


def test_half_precision_has_the_higher_ceiling() -> None:
    if torch.cuda.get_device_capability() < (7, 0):
        pytest.skip("this GPU has no tensor cores")
    low, high = (ceiling(name, CUDA, seconds=0.1) for name in ("fp32", "fp16"))

    assert high.per_second > 2 * low.per_second
    assert low.samples.source == "cuda-event"
    assert ceiling_of_precision("fp16+fp32", CUDA, 0.1).name == "fp16"


@pytest.mark.parametrize("name", CEILINGS)
def test_every_ceiling_is_measured_or_refused_with_the_reason(name: str) -> None:
    tf32_flags.allow_tf32(True)
    least = {"tf32": (8, 0), "bf16": (8, 0), "int8": (7, 5), "fp8": (8, 9)}.get(name, (0, 0))
    lacks_int8 = name == "int8" and not hasattr(torch, "_int_mm")
    lacks_fp8 = name == "fp8" and not hasattr(torch, "float8_e4m3fn")
    if torch.cuda.get_device_capability() < least or lacks_int8 or lacks_fp8:
        with pytest.raises(NotApplicableError) as caught:
            ceiling(name, CUDA, seconds=0.05)
        assert caught.value.why
        return
    found = ceiling(name, CUDA, seconds=0.05)

    assert set(tf32_flags.tf32_allowed().values()) == {True}, "the row's own flags stay"
    assert found.per_second > 1e8
    assert found.unit == ("MAC/s" if len(found.shape) == 3 else "B/s")


def test_a_patched_process_measures_true_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ceiling("fp32", CUDA, seconds=0.1).per_second
    monkeypatch.setattr(torch, "mm", _halved(torch.mm))
    monkeypatch.setattr(torch, "matmul", _halved(torch.matmul))

    assert ceiling("fp32", CUDA, seconds=0.1).per_second == pytest.approx(honest, rel=0.15)
