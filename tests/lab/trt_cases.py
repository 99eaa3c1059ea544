"""A small network, and TensorRT's stand-in in place of the installed one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Iterator, Optional, Tuple

import torch
import trt_fake
from torch import nn
from trt_world import World

from narrowgauge_lab.engines import EngineCache, Preparation
from narrowgauge_lab.engines.base import DTYPES
from narrowgauge_lab.engines.tensorrt import TensorRTEngine, TensorRTRunner, preparing, runner
from narrowgauge_lab.engines.tensorrt import engine as engine_module

CPU = torch.device("cpu")
VERSIONS = trt_fake.versions()
#: What TensorRT 8.0 lacks of 8.4's API, by NVIDIA's documentation; there are no bindings to ask.
WITHOUT_80 = {
    "members": (
        "IBuilderConfig.set_memory_pool_limit", "IBuilderConfig.get_memory_pool_limit",
        "ICudaEngine.create_engine_inspector",
    ),
    "enums": (
        "MemoryPoolType", "LayerInformationFormat", "ProfilingVerbosity.DETAILED",
        "ProfilingVerbosity.LAYER_NAMES_ONLY",
    ),
}  # fmt: skip


class FakeQueue:
    """Stands for a stream, with a handle that no stream has."""

    handle = 7
    #: How often somebody waited for the device.
    settled = 0

    def __init__(self, device: torch.device) -> None:
        assert device == CPU

    @contextlib.contextmanager
    def entered(self) -> Iterator[int]:
        yield self.handle

    def on_device(self) -> Any:
        return contextlib.nullcontext()

    def settle(self) -> None:
        FakeQueue.settled += 1

    def free_memory(self) -> Optional[int]:
        return None


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


def images(count: int, precision: str = "fp32") -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.rand(count, 3, 8, 8, generator=generator).to(DTYPES[precision])


def put(world: World, monkeypatch: Any) -> TensorRTEngine:
    """An engine over the stand-in, with streams and exported files stood in for too."""
    monkeypatch.setattr(runner, "make_queue", FakeQueue)
    monkeypatch.setattr(preparing, "make_queue", FakeQueue)
    monkeypatch.setattr(engine_module, "_onnx", lambda *_: b"a network")
    return TensorRTEngine(lambda: world.trt)


def prepare(
    engine: TensorRTEngine,
    precision: str = "fp32",
    batches: Tuple[int, int, int] = (1, 2, 4),
    cache: Optional[Path] = None,
    model: Optional[nn.Module] = None,
    calibration: Tuple[torch.Tensor, ...] = (),
    **options: Any,
) -> TensorRTRunner:
    if precision == "int8" and not calibration:
        calibration = (images(4),)
    kept = None if cache is None else EngineCache(cache)
    wanted = Preparation(precision, CPU, calibration, batches, kept, options)
    return engine.prepare(model or network(), images(2, precision), wanted)


def sums(x: torch.Tensor) -> torch.Tensor:
    """What the stand-in's engines compute."""
    return x.double().flatten(1).sum(1, keepdim=True) + torch.arange(5.0)
