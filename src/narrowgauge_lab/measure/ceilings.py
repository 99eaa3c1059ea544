"""The most that this device does here and now: products, copies and transfers, by measuring them.

A ceiling is what the vendor's own library reaches on large operands of random data (zeros draw less
power and run faster). Products are in MAC/s: 1 MAC is 2 FLOP. Bytes of a copy are those read and
those written.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError, UnknownNameError
from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.measure.tf32 import tf32_by_arithmetic
from narrowgauge_lab.measure.timing import Samples, TimingPlan, measure_time
from narrowgauge_lab.measure.window import window

__all__ = ["CEILINGS", "PRECISIONS", "Ceiling", "ceiling"]

MACS, BYTES = "MAC/s", "B/s"

_DTYPES: Dict[str, Optional[torch.dtype]] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": getattr(torch, "float8_e4m3fn", None),
}
_TRANSFERS = ("h2d", "d2h", "duplex", "h2d-pageable")
#: Those whose ceiling is one of products.
PRECISIONS = tuple(_DTYPES)
#: The names, in the order of reports.
CEILINGS = ("copy", *PRECISIONS, *_TRANSFERS)

#: Sides of square products, and seconds that one may take: the largest that does is measured.
_SIDES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024, 2048)}
_PRODUCT_SECONDS = 0.03
_GLANCES = 4
#: Bytes of one buffer: beyond every cache, and at most this share of the free memory of a GPU.
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
_TRANSFER_BYTES = 1 << 28
_SHARE_OF_FREE = 8
_DRAWN = 1 << 22
#: How torch and its libraries say that they lack a product.
_UNSUPPORTED = (
    "not implemented", "not supported", "only supported", "not compiled", "no kernel image"
)  # fmt: skip
#: The least compute capability whose tensor cores take the dtype; for fp32 and fp16 any will do.
_CAPABILITY = {"tf32": (8, 0), "bf16": (8, 0), "int8": (7, 5), "fp8": (8, 9)}


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """What `library` did of `work` (MACs or bytes) on operands of `shape`, once per sample."""

    name: str
    unit: str
    work: int
    shape: Tuple[int, ...]
    library: str
    samples: Samples

    @property
    def per_second(self) -> float:
        """By the fastest sample: what was reached once can be reached."""
        return self.work / min(self.samples.seconds)

    def to_fact(self) -> Dict[str, Any]:
        """For `ctx.fact("ceiling", …)`."""
        return {
            "name": self.name,
            "unit": self.unit,
            "per_second": self.per_second,
            "shape": list(self.shape),
            "library": self.library,
            "samples": len(self.samples.seconds),
            "source": self.samples.source,
        }


@dataclasses.dataclass(frozen=True)
class _Load:
    """Something to time: `call` does `work`."""

    call: Callable[[], Any]
    work: int
    unit: str
    shape: Tuple[int, ...]
    library: str


def ceiling(name: str, device: torch.device, seconds: float = 0.25) -> Ceiling:
    """Measure one ceiling of `device` for about `seconds`, after as long a warm-up.

    Not to be called inside autocast. `fp32` and `tf32` set the math mode meanwhile. Raises
    UnknownNameError, and NotApplicableError for what this device or this torch does not have.
    """
    if name not in CEILINGS:
        raise UnknownNameError("ceiling", name, CEILINGS)
    plan = TimingPlan(
        interval=0.01, least_samples=10, most_samples=2000, limit_s=seconds, warm_up_limit_s=seconds
    )
    with torch.no_grad(), tf32_flags.tf32_set_to(name == "tf32"):
        load = _load(name, device)
        samples = measure_time(load.call, device, plan)
    return Ceiling(name, load.unit, load.work, load.shape, load.library, samples)


def _load(name: str, device: torch.device) -> _Load:
    if name == "copy":
        return _copy(device)
    if name in _TRANSFERS:
        if device.type != "cuda":
            raise NotApplicableError(
                f"there is no ceiling '{name}' on {device.type}",
                why="nothing crosses a bus where host and device are one",
            )
        return _transfers(device)[name]
    _require_dtype(name, device)
    return _product(name, device)


def _require_dtype(name: str, device: torch.device) -> None:
    why = ""
    if device.type == "cuda":
        least = _CAPABILITY.get(name, (0, 0))
        has = torch.cuda.get_device_capability(device)
        if has < least:
            why = f"compute capability {has[0]}.{has[1]}; {name} needs {least[0]}.{least[1]}"
    elif name in ("tf32", "fp8"):
        why = f"{name} is an arithmetic of GPUs"
    if not why and _DTYPES[name] is None:
        why = f"torch {torch.__version__} has no {name}"
    if why:
        raise _missing(name, device, why)


def _missing(name: str, device: torch.device, why: str) -> NotApplicableError:
    return NotApplicableError(f"there is no ceiling '{name}' on {device.type}", why=why)


def _product(name: str, device: torch.device) -> _Load:
    """The largest square product of that dtype that takes no longer than it may."""
    sides = _SIDES["cuda" if device.type == "cuda" else "cpu"]
    timed = _timed(name, sides[0], device, ())
    for side in sides[1:]:
        chosen, took = timed[0]
        if took * (side / chosen.shape[0]) ** 3 > _PRODUCT_SECONDS or not _fits(side, device):
            break
        timed = _timed(name, side, device, [load.library for load, s in timed if s > 3 * took])
    if name == "tf32" and not tf32_by_arithmetic(device)["matmul"]:
        why = "products keep all bits of float32 though TF32 is allowed (NVIDIA_TF32_OVERRIDE?)"
        raise _missing(name, device, why)
    return timed[0][0]


def _timed(
    name: str, side: int, device: torch.device, without: Sequence[str]
) -> List[Tuple[_Load, float]]:
    """What each library that can takes, the quickest first; `without` the far slower ones."""
    timed, why = [], f"torch {torch.__version__} has no {name} product"
    for load in _loads(name, side, device):
        if load.library in without:
            continue
        try:
            timed.append((load, _seconds_of(load.call, device)))
        except RuntimeError as error:
            if not any(text in str(error).lower() for text in _UNSUPPORTED):
                raise
            why = str(error).splitlines()[0]
    if not timed:
        raise _missing(name, device, why)
    return sorted(timed, key=lambda each: each[1])


def _loads(name: str, side: int, device: torch.device) -> List[_Load]:
    """Square products of random matrices, by each library that may have them.

    By the operators themselves: torch's own functions may have been replaced in this process. The
    second operand of 8-bit ones lies with its columns in memory, which is what they want.
    """
    dtype = _DTYPES[name]
    if name == "int8":
        one, other = (torch.randint(-128, 128, (side, side), device=device).to(dtype) for _ in "ab")
    else:
        one, other = (torch.randn(side, side, device=device).to(dtype) for _ in "ab")
    calls: Dict[str, Callable[[], Any]] = {}
    if name == "int8":
        if hasattr(torch, "_int_mm"):
            calls["torch._int_mm"] = lambda: torch.ops.aten._int_mm(one, other.t())
        if device.type == "cpu" and torch.backends.quantized.engine != "none":
            engine = torch.backends.quantized.engine
            calls[f"quantized.linear ({engine})"] = _quantized_product(one, other)
    elif name == "fp8":
        scale = torch.ones((), device=device)
        if hasattr(torch, "_scaled_mm"):
            calls["torch._scaled_mm"] = lambda: torch_compat.scaled_product(one, other.t(), scale)
    else:
        calls["torch.mm"] = lambda: torch.ops.aten.mm(one, other)
        if name == "fp32" and device.type == "cpu" and torch.backends.mkldnn.is_available():
            calls["oneDNN"] = _onednn_product(one, other)
    shape = (side, side, side)
    return [_Load(call, side**3, MACS, shape, library) for library, call in calls.items()]


def _onednn_product(one: torch.Tensor, other: torch.Tensor) -> Callable[[], Any]:
    """By the library of convolutions, which has instructions that torch.mm may not use: MKL keeps
    to AVX2 on processors of AMD, and is half as fast there as what knows AVX-512."""
    packed: List[torch.Tensor] = []

    def call() -> Any:
        if not packed:  # at the first call, where a torch that cannot is told from one that can
            packed.append(one.to_mkldnn())
        return torch.ops.aten.mkldnn_linear(packed[0], other, None)

    return call


def _quantized_product(one: torch.Tensor, other: torch.Tensor) -> Callable[[], Any]:
    """By the engine that runs converted networks on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "deprecated", from torch 2.13 on
        inputs = torch.quantize_per_tensor(one.float(), 1.0, 128, torch.quint8)
        weight = torch.quantize_per_tensor(other.float(), 1.0, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    return lambda: torch.ops.quantized.linear(inputs, packed, 1000.0, 128)


def _fits(side: int, device: torch.device) -> bool:
    """Operands are made in float32 or int64 first: four matrices of 8 bytes, to be safe."""
    return 4 * 8 * side * side <= _free(device)


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 40  # the sizes here are small for any host that trains
    return int(torch_compat.free_memory(device))


def _buffer(most: int, device: torch.device) -> int:
    """Bytes of a buffer that fits, a multiple of what is drawn at once."""
    return max(1, min(most, _free(device) // _SHARE_OF_FREE) // _DRAWN) * _DRAWN


def _seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """The fastest of a few, as the ceiling is: by a mean, one call that other work held up decides
    for a smaller product, or for another library."""
    call()
    found = []
    for _ in range(_GLANCES):
        with window(device) as taken:
            call()
        found.append(taken.seconds)
    return min(found)


def _copy(device: torch.device) -> _Load:
    kind = "cuda" if device.type == "cuda" else "cpu"
    size = _buffer(_COPY_BYTES[kind], device)
    source = _random_bytes(size, device)
    target = torch.empty_like(source)
    return _Load(lambda: target.copy_(source), 2 * size, BYTES, (size,), "Tensor.copy_")


def _random_bytes(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes, a multiple of 4 MiB; drawn once and repeated, because a CPU draws slowly."""
    drawn = torch.randint(0, 256, (_DRAWN,), dtype=torch.uint8, device=device)
    return drawn.repeat(size // _DRAWN)


def _transfers(device: torch.device) -> Dict[str, _Load]:
    """Between the host and a GPU, from pinned memory unless said otherwise."""
    size = _buffer(_TRANSFER_BYTES, device)
    pageable = _random_bytes(size, torch.device("cpu"))
    outgoing, incoming = pageable.pin_memory(), torch.empty_like(pageable).pin_memory()
    upper, lower = (_random_bytes(size, device) for _ in "ab")
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def both() -> None:
        current = torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(current)
        with torch.cuda.stream(streams[0]):
            upper.copy_(outgoing, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            incoming.copy_(lower, non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    def load(call: Callable[[], Any], work: int, how: str) -> _Load:
        return _Load(call, work, BYTES, (size,), f"Tensor.copy_ {how}")

    return {
        "h2d": load(lambda: upper.copy_(outgoing, non_blocking=True), size, "from pinned memory"),
        "d2h": load(lambda: incoming.copy_(lower, non_blocking=True), size, "to pinned memory"),
        "duplex": load(both, 2 * size, "both ways on two streams, pinned memory"),
        "h2d-pageable": load(lambda: upper.copy_(pageable), size, "from pageable memory"),
    }
