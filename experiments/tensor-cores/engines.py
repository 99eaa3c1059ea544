"""A network made ready to run as a setup says, as a call without arguments."""

from __future__ import annotations

import dataclasses
from typing import Callable, List, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.graphs import CaptureError
from narrowgauge_lab.measure.probe import Observation, observe, observe_compilation
from narrowgauge_lab.transforms import fold_batch_norm

from .setups import AUTOCAST, FP32_NORMS, Setup

__all__ = ["COMPILE_MODES", "Network", "make_ready"]

Call = Callable[[], torch.Tensor]

#: The values of the parameter `compile_mode`. auto: graphs replayed, as on the rung before; on a
#: CPU inductor's default. max-autotune tries templates for minutes and has to be asked for.
COMPILE_MODES = ("auto", "default", "reduce-overhead", "max-autotune")
_WARM_UP_CALLS = 3


@dataclasses.dataclass(frozen=True)
class Network:
    """`call` runs one batch and gives its logits, in memory that the next call may write over.

    `observations`: the convolutions and products that it runs, as they were seen when it was made.
    `engine` says what runs them, for the record.
    """

    call: Call
    engine: str
    observations: Tuple[Observation, ...]


def make_ready(
    model: nn.Module, images: torch.Tensor, setup: Setup, device: torch.device, compile_mode: str
) -> Network:
    """`model` (float32, eval, on the CPU) on `device` as `setup` says, for `images` float32.

    The model may be changed. Raises NotApplicableError and CaptureError, and what torch raises
    where memory runs out.
    """
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = setup.cudnn_benchmark
    if setup.precision in ("int8", "fp8"):
        return _eight_bit(model, images, setup, device)
    if setup.fold:
        model = fold_batch_norm(model)
    model = model.to(device=device, dtype=setup.dtype)
    images = images.to(device=device, dtype=setup.dtype)
    if setup.form == FP32_NORMS:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.float()
    if setup.layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        images = _channels_last(images)
    eager = _eager(model, images, setup, device)
    if setup.engine == "graph":
        return _captured(eager, device)
    if setup.engine == "compile":
        mode = _mode(compile_mode, device)
        call = _eager(torch_compat.compiled(model, mode), images, setup, device)
        return Network(call, f"torch.compile {mode}", observe_compilation(call))
    return Network(eager, "eager", observe(eager))


def _eager(
    model: Callable[[torch.Tensor], torch.Tensor],
    images: torch.Tensor,
    setup: Setup,
    device: torch.device,
) -> Call:
    half = torch.float16 if setup.form == AUTOCAST else torch.float32

    def call() -> torch.Tensor:
        with torch_compat.inference_mode(), torch_compat.autocast(device, half):
            return model(images)

    return call


class _Replay:
    """Replays a graph. `captured` is kept: the graph reads its weights and inputs by address, and
    whatever is let go of here may be written over by the next allocation."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor, captured: Call) -> None:
        self._graph, self._output, self.captured = graph, output, captured

    def __call__(self) -> torch.Tensor:
        self._graph.replay()
        return self._output


def _captured(eager: Call, device: torch.device) -> Network:
    """`eager` in a CUDA graph. The first calls are on the stream that captures: cuDNN and cuBLAS
    choose algorithms and get their workspaces there."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_CALLS):
            eager()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    outputs: List[torch.Tensor] = []

    def capture() -> None:
        with torch.cuda.graph(graph, stream=stream):
            outputs.append(eager())

    try:
        observations = observe(capture)
    except RuntimeError as error:
        if "out of memory" in str(error):  # not the capture's fault; it has its own exit code
            raise
        raise CaptureError(
            "the network could not be captured in a CUDA graph",
            why=str(error).splitlines()[0],
            next_step="-p engine=eager runs it launch by launch",
        ) from error

    return Network(_Replay(graph, outputs[0], eager), "cuda-graph", observations)


def _mode(asked: str, device: torch.device) -> str:
    if asked != "auto":
        return asked
    return "reduce-overhead" if device.type == "cuda" else "default"


def _eight_bit(
    model: nn.Module, images: torch.Tensor, setup: Setup, device: torch.device
) -> Network:
    """int8 or fp8: by Triton on a GPU, by torch's x86 engine on a CPU.

    Either folds batch normalisation and keeps activations channels-last itself.
    """
    if device.type != "cuda":
        return _eight_bit_on_cpu(model, images, setup)
    from narrowgauge_lab.quant.gpu import lower

    on_device = images.to(device)
    network = lower(model, [on_device], setup.precision, device, graph=False)

    def call() -> torch.Tensor:
        return network(on_device)

    call()  # prepares for this shape: allocates and tunes
    if setup.engine == "eager":
        return Network(call, "triton, eager", observe(call))
    return dataclasses.replace(_captured(call, device), engine="triton, cuda-graph")


def _eight_bit_on_cpu(model: nn.Module, images: torch.Tensor, setup: Setup) -> Network:
    if setup.precision != "int8" or setup.engine != "eager":
        raise NotApplicableError(
            f"{setup.precision} with engine {setup.engine} does not run on a CPU",
            why="torch's int8 operators there are called one by one, and there are none for fp8",
            next_step="-p mode=int8 -p engine=eager",
        )
    from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
    from narrowgauge_lab.quant.cpu import exact_activation_bits
    from narrowgauge_lab.quant.x86 import choose_engine, to_int8

    engine = choose_engine()
    folded = fold_batch_norm(model)
    config = QuantConfig(activation_bits=exact_activation_bits())
    network = to_int8(folded, calibrate(folded, [images], config), engine)
    call = _eager(network, _channels_last(images), setup, torch.device("cpu"))
    return Network(call, f"{engine}, eager", observe(call))


def _channels_last(images: torch.Tensor) -> torch.Tensor:
    return images.contiguous(memory_format=torch.channels_last)
