"""Generated convolutions on torch's tensors: buffers, weights in their order, and the launches.

Everything is put on the current stream and nothing is waited for or cleared, so calls can be
captured in a CUDA graph; the first call, which compiles, loads and allocates, must come before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Dict, Iterator, List, Optional, Tuple

from narrowgauge_kernels.sparse.compiling import compile_source
from narrowgauge_kernels.sparse.driver import Argument, CudaDriver, Function, Pointer
from narrowgauge_kernels.sparse.errors import SparseArgumentError
from narrowgauge_kernels.sparse.generate import (
    PRODUCER_THREADS,
    REDUCE_THREADS,
    by_launch,
    generate,
)
from narrowgauge_kernels.sparse.geometry import Geometry, derive
from narrowgauge_kernels.sparse.ordering import OrderedWeight
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["Convolution", "CudaMachine", "Launch", "launches"]

_ENTRY_WORDS = 2
#: Bytes that the first element of x lies at a multiple of.
_ALIGNED = 16


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch: its kernel, and the names of its arguments in order."""

    kernel: str
    grid: Tuple[int, int]
    threads: int
    shared_bytes: int
    arguments: Tuple[str, ...]


def launches(shape: Shape, tile: Tile, variant: Variant, geometry: Geometry) -> Tuple[Launch, ...]:
    """The launches of one convolution, in order."""
    operands = ("x", "weight", "bias", "y", "partial", "tickets")
    lists, verdict = ("entries", "lengths"), ("counts", "least")
    found: List[Launch] = []
    kernels = [("dense_convolve" if variant.path == "dense" else "sparse_convolve", operands)]
    if variant.has_producer:
        warps = shape.batch * shape.channels * geometry.tiles
        blocks = -(-warps // (PRODUCER_THREADS // 32))
        produced = ("x", *lists, "counts")
        found.append(Launch("sparse_produce", (blocks, 1), PRODUCER_THREADS, 0, produced))
        kernels = [("sparse_convolve", (*operands, *lists))]
    if variant.path == "switched":
        arguments = (*operands, *lists, *verdict)
        kernels = [("sparse_convolve", arguments), ("dense_convolve", arguments)]
    grid = (geometry.cells, geometry.slices)
    for kernel, names in kernels:
        found.append(Launch(kernel, grid, geometry.threads, geometry.shared_bytes, names))
    if by_launch(tile, variant) and geometry.slices > 1:
        blocks = -(-geometry.cells * geometry.cell_floats // REDUCE_THREADS)
        found.append(Launch("sparse_reduce", (blocks, 1), REDUCE_THREADS, 0, operands[2:5]))
    return tuple(found)


# unverified: sparse convolutions before Hopper | compiled for each, never run | nox -s gpu there
class CudaMachine:
    """A CUDA device of torch's: its compiler, its driver and its current stream."""

    def __init__(self) -> None:
        self._driver = CudaDriver()

    def arch(self, device: torch.device) -> str:
        """The device's compute capability, such as `9.0`."""
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        return f"{major}.{minor}"

    def check(self, tensor: torch.Tensor) -> None:
        """Raises SparseArgumentError where the tensor is not on such a device."""
        if not tensor.is_cuda:
            raise SparseArgumentError(f"x is on {tensor.device}, and must be on a CUDA device")

    def located(self, device: torch.device) -> torch.device:
        """The device with its number: the current one where it has none."""
        import torch

        if device.index is not None:
            return device
        return torch.device("cuda", torch.cuda.current_device())

    @contextlib.contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """Makes the device current, and a context of it on this thread."""
        import torch

        with torch.cuda.device(device):
            self._driver.make_current(self.located(device).index)
            yield

    def capturing(self) -> bool:
        """Whether the current stream is being recorded into a graph."""
        import torch

        ask = getattr(torch.cuda, "is_current_stream_capturing", None)
        return bool(ask()) if ask is not None else False

    def function(self, source: str, kernel: Launch, device: torch.device) -> Function:
        """The kernel, compiled and loaded."""
        code = compile_source(source, self.arch(device))
        return self._driver.function(code, kernel.kernel, kernel.shared_bytes, device.index or 0)

    def launch(
        self, function: Function, kernel: Launch, device: torch.device, arguments: List[Argument]
    ) -> None:
        """On the current stream."""
        import torch

        stream = torch.cuda.current_stream(device).cuda_stream
        self._driver.launch(
            function, kernel.grid, kernel.threads, kernel.shared_bytes, stream, arguments
        )


@functools.lru_cache(maxsize=1)
def _cuda() -> CudaMachine:
    return CudaMachine()


@dataclasses.dataclass(frozen=True)
class _Ready:
    """What a device has for the calls to come."""

    functions: Tuple[Tuple[Launch, Function], ...]
    buffers: Dict[str, torch.Tensor]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where it begins in between: kernels may load 16 bytes at once."""
    return x if x.data_ptr() % _ALIGNED == 0 else x.clone()


class Convolution:
    """y = relu_output(conv(relu_input(x), weight) + bias), as the variant says, skipping zeros.

    x [batch, channels, height, width] and y [batch, filters, out_height, out_width] are contiguous
    in the variant's layout, float32 or (fp16) float16; weight [filters, channels, k, k] and bias
    [filters] likewise. x in another order is copied. NaN and infinities pass through; as zeros are
    not multiplied, an infinite weight at a zero gives no NaN, save on the path dense. No gradient.
    A weight that requires none is put in order once, unless `keeps_weight` is false: see
    `ordering`.

    `crossover` is the share of zeros in x from which the path `switched` runs the sparse kernel;
    the device counts and decides. One object serves one stream at a time, and graphs that are not
    replayed together: its partial sums are its own. It has to outlive graphs that captured it.
    Raises SparseArgumentError, and what compiling and the driver raise.
    """

    def __init__(
        self,
        shape: Shape,
        tile: Tile,
        variant: Variant,
        crossover: float = 0.0,
        machine: Optional[CudaMachine] = None,
        keeps_weight: bool = True,
    ) -> None:
        if not 0.0 <= crossover <= 1.0:
            raise SparseArgumentError(f"crossover is {crossover}, and must be from 0 to 1")
        self.shape, self.tile, self.variant = shape, tile, variant
        numel = shape.batch * shape.channels * shape.height * shape.width
        self._least = int(-(-crossover * numel // 1))
        self._machine = machine or _cuda()
        self._ready: Dict[torch.device, _Ready] = {}
        self._weight = OrderedWeight(keeps_weight)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """The convolution, on the current stream."""
        import torch

        self._check(x, weight, bias)
        shape = self.shape
        memory = torch.contiguous_format
        if self.variant.layout == "nhwc":
            memory = torch.channels_last
        with torch.no_grad(), self._machine.guard(x.device):
            ready = self._prepared(x.device)
            tensors = dict(ready.buffers)
            tensors["x"] = _aligned(x.contiguous(memory_format=memory))
            tensors["weight"] = self._weight.of(weight, self._machine.capturing())
            if bias is not None:
                tensors["bias"] = bias.contiguous()
            y = torch.empty(
                (shape.batch, shape.filters, shape.out_height, shape.out_width),
                dtype=x.dtype, device=x.device, memory_format=memory,
            )  # fmt: skip
            tensors["y"] = y
            for launch, function in ready.functions:
                arguments = [self._argument(name, tensors) for name in launch.arguments]
                self._machine.launch(function, launch, x.device, arguments)
        return y

    def prepare(self, device: torch.device) -> _Ready:
        """Compile, load and allocate for a device, unless that is done. Without a number it is the
        current one."""
        located = self._machine.located(device)
        if located not in self._ready:
            with self._machine.guard(located):
                self._prepared(located)
        return self._ready[located]

    def zeros(self, device: torch.device) -> torch.Tensor:
        """Zeros (after ReLU, where that is part) in the last x: int32 [1] on the device, not
        waited for. Raises SparseArgumentError on paths of one launch, which do not count."""
        if not self.variant.has_producer:
            raise SparseArgumentError(
                f"the path {self.variant.path} counts no zeros", next_step="path lists"
            )
        return self.prepare(device).buffers["counts"][:1]

    def _prepared(self, device: torch.device) -> _Ready:
        """With the device current."""
        if device not in self._ready:
            arch = self._machine.arch(device)
            geometry = derive(self.shape, self.tile, self.variant, arch)
            source = generate(self.shape, self.tile, self.variant, arch)
            plan = launches(self.shape, self.tile, self.variant, geometry)
            functions = tuple((each, self._machine.function(source, each, device)) for each in plan)
            self._ready[device] = _Ready(functions, self._allocated(geometry, device))
        return self._ready[device]

    def _allocated(self, geometry: Geometry, device: torch.device) -> Dict[str, torch.Tensor]:
        """Zeros where kernels expect zeros, and leave zeros behind."""
        import torch

        words: Dict[str, int] = {}
        if geometry.workspace_floats:
            words = {"partial": geometry.workspace_floats, "tickets": geometry.cells}
        if self.variant.has_producer:
            lists = self.shape.batch * self.shape.channels * geometry.tiles
            window = geometry.window_rows * geometry.window_columns
            words.update(entries=lists * window * _ENTRY_WORDS, lengths=lists, counts=3)
        return {
            name: torch.zeros(count, dtype=torch.int32, device=device)
            for name, count in words.items()
        }

    def _argument(self, name: str, tensors: Dict[str, torch.Tensor]) -> Argument:
        if name == "least":
            return self._least
        return Pointer(tensors[name].data_ptr() if name in tensors else 0)

    def _check(self, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> None:
        import torch

        self._machine.check(x)
        shape = self.shape
        square = (shape.kernel, shape.kernel)
        wanted = {
            "x": (x, (shape.batch, shape.channels, shape.height, shape.width)),
            "weight": (weight, (shape.filters, shape.channels, *square)),
        }
        if (bias is not None) != self.variant.bias:
            raise SparseArgumentError(
                "a bias was given" if bias is not None else "no bias was given",
                why=f"the kernel was generated with bias={self.variant.bias}",
            )
        if bias is not None:
            wanted["bias"] = (bias, (shape.filters,))
        dtype = torch.float16 if self.variant.precision == "fp16" else torch.float32
        for name, (tensor, sizes) in wanted.items():
            if tuple(tensor.shape) != sizes:
                raise SparseArgumentError(
                    f"{name} is {tuple(tensor.shape)}, and the kernel is for {sizes}"
                )
            if tensor.dtype != dtype:
                raise SparseArgumentError(
                    f"{name} is {tensor.dtype}, and the kernel is for {dtype}"
                )
            if tensor.device != x.device:
                raise SparseArgumentError(f"{name} is on {tensor.device}, and x on {x.device}")
