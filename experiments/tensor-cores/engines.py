"""A network made ready to run as a setup says, as a call without arguments."""

from __future__ import annotations

import dataclasses
from typing import Callable, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import engines, torch_compat
from narrowgauge_lab.engines.graph import capture
from narrowgauge_lab.engines.registry import refuses
from narrowgauge_lab.measure.probe import Observation, observe, observe_compilation
from narrowgauge_lab.transforms import fold_batch_norm

from .setups import AUTOCAST, FP32_NORMS, Setup

__all__ = ["COMPILE_MODES", "Network", "make_ready"]

Call = Callable[[], torch.Tensor]

#: The values of the parameter `compile_mode`. auto: graphs replayed, as on the rung before; on a
#: CPU inductor's default. max-autotune tries templates for minutes and has to be asked for.
COMPILE_MODES = ("auto", "default", "reduce-overhead", "max-autotune")
#: Our own engine, by the registry's name.
_OURS = "narrowgauge"


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
        replay = capture(eager, device, "-p engine=eager runs it launch by launch")
        return Network(replay, "cuda-graph", replay.observations)
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


def _mode(asked: str, device: torch.device) -> str:
    if asked != "auto":
        return asked
    return "reduce-overhead" if device.type == "cuda" else "default"


def _eight_bit(
    model: nn.Module, images: torch.Tensor, setup: Setup, device: torch.device
) -> Network:
    """int8 or fp8: by our own engine's kernels on a GPU, by torch's x86 engine on a CPU.

    Either folds batch normalisation and keeps activations channels-last itself.
    """
    if device.type != "cuda":
        return _eight_bit_on_cpu(model, images, setup)
    lacking = engines.missing(_OURS, device) or refuses(_OURS, setup.precision, device)
    if lacking:
        raise NotApplicableError(f"{setup.precision} does not run on this GPU", why=lacking)
    from narrowgauge_lab.engines.own.gpu.formats import FORMATS
    from narrowgauge_lab.engines.own.gpu.lowered import lowered
    from narrowgauge_lab.engines.own.gpu.network import OwnNetwork

    on_device = images.to(device)
    image, form = tuple(images.shape[1:]), FORMATS[setup.precision]
    graph = setup.engine != "eager"
    own = OwnNetwork(lowered(model, image, form, [on_device], device), graph=graph)
    call = own.bound(on_device)
    return Network(call, "triton, cuda-graph" if graph else "triton, eager", own.observations())


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
