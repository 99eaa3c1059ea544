"""The TensorRT adapter with the real library, on a GPU: engines that compute what torch does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn

from narrowgauge_lab import engines
from narrowgauge_lab.engines import EngineCache, Preparation
from narrowgauge_lab.engines.base import DTYPES
from narrowgauge_lab.engines.errors import ShapeOutsideProfileError
from narrowgauge_lab.engines.tensorrt import ENGINE, ConvolutionSpec, TensorRTRunner
from narrowgauge_lab.tf32_flags import allow_tf32

pytestmark = pytest.mark.gpu

#: Of the largest logit.
TOLERANCE = {"fp32": 1e-5, "tf32": 5e-3, "fp16": 1e-2, "bf16": 5e-2, "int8": 0.1}


@pytest.fixture(scope="module")
def device() -> torch.device:
    found = torch.device("cuda", 0)
    reason = ENGINE.missing(found)
    if reason:
        pytest.skip(reason)
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1, stride=2)
        self.skip = nn.Conv2d(16, 16, 1, stride=2)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(x) + self.skip(x))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return Block().eval()


def images(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(count))


def prepare(device: torch.device, precision: str = "fp32", **more: Any) -> TensorRTRunner:
    given = {"batches": (1, 4, 8), **more}
    calibration = (images(32),) if precision == "int8" else ()
    wanted = Preparation(precision, device, calibration, **given)
    example = images(4).to(device, DTYPES[precision])
    runner = engines.prepare("tensorrt", network(), example, wanted)
    assert isinstance(runner, TensorRTRunner)
    return runner


def error(runner: TensorRTRunner, x: torch.Tensor, model: nn.Module) -> float:
    """Of the largest logit."""
    with torch.no_grad():
        expected = model.double()(x.double().cpu())
    return float((runner(x).double().cpu() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16", "int8"])
def test_engines_compute_what_torch_does(precision: str, device: torch.device) -> None:
    refused = engines.registry.refuses("tensorrt", precision, device)
    if refused:
        pytest.skip(refused)
    runner = prepare(device, precision)

    for count in (1, 3, 4, 8):
        x = images(count).to(device, DTYPES[precision])
        assert error(runner, x, network()) <= TOLERANCE[precision]
        assert (
            error(runner, x.contiguous(memory_format=torch.channels_last), network())
            <= (TOLERANCE[precision])
        )
    with pytest.raises(ShapeOutsideProfileError):
        runner(images(9).to(device, DTYPES[precision]))
    facts = runner.layers()
    assert facts
    if ENGINE._open().features.inspector:
        assert {fact.precision for fact in facts} & {precision, "fp16", "fp32"}
        assert any(fact.kernel for fact in facts)
    assert (runner.memory_bytes() or 0) > 0


def test_any_stream_and_any_thread(device: torch.device) -> None:
    first = prepare(device, "fp16")
    runners = [first, first.twin()]
    x = images(8).to(device, torch.float16)
    torch.cuda.synchronize(device)
    found: Dict[int, List[torch.Tensor]] = {0: [], 1: []}

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(50):
                found[number].append(runners[number](x).clone())
            torch.cuda.current_stream(device).synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = first(x)
    torch.cuda.synchronize(device)
    results = [*found[0], *found[1]]
    assert len(results) == 100
    assert all(torch.allclose(each, expected, rtol=1e-2, atol=1e-2) for each in results)


def test_a_kept_engine_gives_the_same(device: torch.device, tmp_path: Path) -> None:
    x = images(4).to(device)
    first = prepare(device, cache=EngineCache(tmp_path))
    second = prepare(device, cache=EngineCache(tmp_path))

    assert second.from_cache
    assert torch.equal(first(x), second(x))
    assert second.build_seconds < first.build_seconds


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_refitted_engines_have_the_new_weights(where: str, device: torch.device) -> None:
    runner = prepare(device, options={"refit": True})
    x = images(4).to(device)
    other = network(seed=2)

    changed = runner.refit(other.to(where))

    assert changed
    assert error(runner, x, other.cpu()) <= TOLERANCE["fp32"]
    assert runner.refit(other.float().to(where)) == ()


def test_the_passes_of_training_by_single_convolutions(device: torch.device) -> None:
    """Forward, gradient of the input and gradient of the weight of one layer, stride 2."""
    allow_tf32(False)
    x = torch.rand(4, 8, 16, 16, requires_grad=True)
    weight = torch.rand(12, 8, 3, 3, requires_grad=True)
    y = nn.functional.conv2d(x, weight, stride=2, padding=1)
    gradient = torch.rand_like(y)
    y.backward(gradient)
    assert x.grad is not None
    assert weight.grad is not None

    passes: Tuple[Tuple[ConvolutionSpec, torch.Tensor, torch.Tensor, torch.Tensor], ...] = (
        (ConvolutionSpec(8, 12, (16, 16), (3, 3), (2, 2), (1, 1), (1, 1)), weight, x, y),
        (
            ConvolutionSpec(12, 8, (8, 8), (3, 3), (2, 2), (1, 1), (0, 0), transposed=True),
            weight, gradient, x.grad,
        ),
        # Images and channels change places; the stride becomes the dilation.
        (
            ConvolutionSpec(4, 12, (16, 16), (8, 8), pre=(1, 1), post=(0, 0), dilation=(2, 2)),
            gradient.transpose(0, 1), x.transpose(0, 1), weight.grad.transpose(0, 1),
        ),
    )  # fmt: skip
    for spec, kernel, source, expected in passes:
        source = source.detach().to(device)
        wanted = Preparation("fp32", device, batches=(source.shape[0],) * 3)
        zeros = {"kernel": torch.zeros(spec.weight_shape())}
        runner = ENGINE.prepare_convolution(spec, zeros, wanted)
        assert runner.refit({"kernel": kernel}) == ("kernel",)

        result = runner(source).cpu()

        assert torch.allclose(result, expected.detach(), rtol=1e-4, atol=1e-3)
