"""The fastest tile of a shape on the device at hand: candidates are timed, the best is stored.

JSON, one file for each kind of device: `tiles-<name>-<capability>.json` in the cache folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import re
import time
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Tuple,
)

from narrowgauge_kernels.errors import DiskFullError
from narrowgauge_kernels.sparse.ahead import Ahead
from narrowgauge_kernels.sparse.compiling import cache_directory, write_atomic
from narrowgauge_kernels.sparse.errors import DeviceError, SparseArgumentError
from narrowgauge_kernels.sparse.generate import generate
from narrowgauge_kernels.sparse.launching import Convolution
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant
from narrowgauge_kernels.sparse.tiles import candidates, default_tile

if TYPE_CHECKING:
    import torch

__all__ = ["Found", "Trial", "best_tile", "faster_path", "stored_tile", "tune"]

_FORMAT = 1
_REPLAYS, _CALLS, _ZEROS = 7, 20, 0.65
#: Seconds to search a shape for, unless told otherwise: a compilation takes about one.
_SECONDS = 60.0
#: Tiles of a shape that are tried, at most.
_MOST_TILES = 512
#: Paths of one launch that skip zeros by element.
_SKIPPING = ("fused", "window")
_Still = Callable[[], ContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One tile and its time of a call in microseconds, the median of several replays."""

    tile: Tile
    microseconds: float


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search tried, the fastest first, and where the fastest is stored."""

    trials: Tuple[Trial, ...]
    untried: int
    stored: Path


def tune(
    shape: Shape,
    variant: Variant,
    device: Optional[torch.device] = None,
    seconds: float = _SECONDS,
    most: int = _MOST_TILES,
    env: Optional[Mapping[str, str]] = None,
    measure: Optional[Callable[[Tile], float]] = None,
    identity: Optional[Tuple[str, str]] = None,
) -> Found:
    """Time the candidates, published ones first, until the seconds are over; store the fastest.

    The map is random with 65 % zeros. While one is timed the next are compiled, on all processors.
    `measure` (tile -> microseconds) and `identity` (name of the device, capability) stand for the
    device in tests. Raises SparseArgumentError where no tile fits, DeviceError without a GPU, and
    what compiling raises.
    """
    name, arch = identity or device_identity(device)
    every = candidates(shape, variant, arch, most)
    trials: List[Trial] = []
    began = time.monotonic()
    sources = [functools.partial(generate, shape, tile, variant, arch) for tile in every]
    with Ahead([] if measure else sources, arch) as ahead:
        timed = measure or _timer(shape, variant, device, ahead.still)
        for number, tile in enumerate(every):
            if measure is None:
                ahead.wait(number)
            trials.append(Trial(tile, timed(tile)))
            if time.monotonic() - began > seconds:
                break
    trials.sort(key=lambda trial: trial.microseconds)
    path = _path(name, arch, env)
    with _locked(path):
        known = _read(path)
        known[_key(shape, variant)] = {
            "tile": trials[0].tile.to_fact(),
            "microseconds": trials[0].microseconds,
            "tried": len(trials),
        }
        document = {"format": _FORMAT, "device": name, "capability": arch, "tiles": known}
        write_atomic(path, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
    return Found(tuple(trials), len(every) - len(trials), path)


def best_tile(
    shape: Shape,
    variant: Variant,
    device: Optional[torch.device] = None,
    env: Optional[Mapping[str, str]] = None,
    identity: Optional[Tuple[str, str]] = None,
) -> Tile:
    """The stored tile of this shape, variant and device; without one, what the estimate likes."""
    name, arch = identity or device_identity(device)
    stored = stored_tile(shape, variant, (name, arch), env)
    return stored or default_tile(shape, variant, arch)


def faster_path(
    shape: Shape,
    variant: Variant,
    device: Optional[torch.device] = None,
    env: Optional[Mapping[str, str]] = None,
    identity: Optional[Tuple[str, str]] = None,
) -> Variant:
    """The variant on whichever of the paths fused and window a search found faster on this device;
    as it is where none was searched, and on another path. Raises as `stored_tile`."""
    if variant.path not in _SKIPPING or variant.on_cores:
        return variant
    path = _path(*(identity or device_identity(device)), env)
    known, times = _read(path), {}
    for name in _SKIPPING:
        found = known.get(_key(shape, dataclasses.replace(variant, path=name)))
        if found is not None:
            try:
                times[name] = float(found["microseconds"])
            except (KeyError, TypeError, ValueError) as error:
                raise _damaged(path, error) from error
    fastest = min(times, key=lambda name: times[name], default=variant.path)
    return dataclasses.replace(variant, path=fastest)


def stored_tile(
    shape: Shape,
    variant: Variant,
    identity: Tuple[str, str],
    env: Optional[Mapping[str, str]] = None,
) -> Optional[Tile]:
    """The tile that a search on such a device stored. Raises SparseArgumentError for a damaged
    file."""
    path = _path(*identity, env)
    found = _read(path).get(_key(shape, variant))
    if found is None:
        return None
    try:
        return Tile(**found["tile"])
    except (KeyError, TypeError, SparseArgumentError) as error:
        raise _damaged(path, error) from error


def device_identity(device: Optional[torch.device] = None) -> Tuple[str, str]:
    """The name and the capability of a CUDA device. Raises DeviceError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            "torch sees no CUDA device to tune on", next_step="run it on a host with a GPU"
        )
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"{major}.{minor}"


def _timer(
    shape: Shape, variant: Variant, device: Optional[torch.device], still: _Still
) -> Callable[[Tile], float]:
    """Microseconds of a call inside a replayed graph, where torch has graphs; else of many calls
    in a row, which launches bound. Samples are taken while it is `still`."""
    import torch

    if device is None or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape.batch, shape.channels, shape.height, shape.width, generator=generator)
    keep = torch.rand(x.shape, generator=generator) >= _ZEROS
    x = torch.where(keep, x.abs() + 0.01, -x.abs() if variant.relu_input else x * 0)
    square = (shape.kernel, shape.kernel)
    weight = torch.randn(shape.filters, shape.channels, *square, generator=generator)
    dtype = torch.float16 if variant.precision == "fp16" else torch.float32
    operands: List[torch.Tensor] = [x.to(device, dtype), weight.to(device, dtype)]
    if variant.layout == "nhwc":
        operands[0] = operands[0].contiguous(memory_format=torch.channels_last)
    if variant.bias:
        operands.append(torch.zeros(shape.filters, dtype=dtype, device=device))

    def timed(tile: Tile) -> float:
        convolution = Convolution(shape, tile, variant)
        convolution(*operands)
        with torch.cuda.device(device):
            return _microseconds(lambda: convolution(*operands), still)

    return timed


def _microseconds(call: Callable[[], Any], still: _Still) -> float:
    """On the current device: a graph is captured, and events are recorded, on its stream."""
    import torch

    def calls() -> None:
        for _ in range(_CALLS):
            call()

    replay: Callable[[], Any] = calls
    if hasattr(torch.cuda, "CUDAGraph"):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            calls()
        replay = graph.replay
    replay()
    samples = []
    with still():
        for _ in range(_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / _CALLS)
    return sorted(samples)[_REPLAYS // 2]


def _path(name: str, arch: str, env: Optional[Mapping[str, str]]) -> Path:
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
    return cache_directory(env) / f"tiles-{slug}-{arch}.json"


def _key(shape: Shape, variant: Variant) -> str:
    """Bias and ReLU are a few instructions of hundreds: they share their tiles."""
    plain = dataclasses.replace(variant, bias=False, relu_input=True, relu_output=False)
    return f"{shape.text()} {plain.text()}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among processes that add to a file. Raises DiskFullError where the lock beside it
    cannot be made."""
    lock = path.with_suffix(".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        stream = lock.open("ab")
    except OSError as error:
        raise DiskFullError(
            f"{lock} cannot be written", why=str(error), next_step=f"make room in {lock.parent}"
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> Dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']}, and {_FORMAT} is known")
        return dict(document["tiles"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> SparseArgumentError:
    return SparseArgumentError(
        f"{path} is not a file of tuned tiles", why=repr(error), next_step=f"remove {path}"
    )
