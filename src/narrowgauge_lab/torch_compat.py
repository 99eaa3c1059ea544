"""Every difference between torch 1.8 and today that the lab meets, in one place.

Other modules ask here and never compare versions. Importing this module touches no device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from typing import Any, BinaryIO, Callable, ContextManager, Iterator, Optional, Tuple

import torch

from narrowgauge_lab import safe_pickle

__all__ = [
    "autocast",
    "autocast_dtypes",
    "backward_id",
    "backward_is_visible",
    "capturing",
    "clear_cublas_workspaces",
    "compiled",
    "compiler_available",
    "compiling",
    "free_memory",
    "generator_for",
    "graphs_available",
    "has_dispatch_mode",
    "in_backward",
    "inference_mode",
    "load_state",
    "make_profiler",
    "profiler_available",
    "profiling",
    "quantized_tensors",
    "refusing_compiled",
    "reinterprets",
    "scaled_product",
    "scaled_sum",
    "set_stream",
    "storage_bytes",
    "threads_may_change",
    "torch_version",
    "torchscript",
]


def torch_version() -> Tuple[int, int]:
    """Major and minor version of torch; `1.8.0+cu111` and `2.13.0.dev1` both parse."""
    return _major_and_minor(torch.__version__)


@functools.lru_cache(maxsize=None)
def _major_and_minor(version: str) -> Tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def autocast_dtypes(device: torch.device) -> Tuple[torch.dtype, ...]:
    """The reduced precisions that this torch's autocast runs a convolution in on `device`.

    torch 1.8 and 1.9 autocast on CUDA to float16 only. CPU autocast came with 1.10 for bfloat16;
    float16 there came later and, where it is missing, only warns and runs float32, so it is tried
    out rather than looked up.
    """
    if torch_version() < (1, 10):
        return (torch.float16,) if device.type == "cuda" else ()
    if device.type != "cuda":
        wanted = (torch.bfloat16, torch.float16)
        return tuple(dtype for dtype in wanted if _cpu_autocast_works(dtype))
    # bfloat16 below 8.0 is emulated: slow, and not what anyone means by a bf16 measurement.
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return (torch.bfloat16, torch.float16)
    return (torch.float16,)


@functools.lru_cache(maxsize=None)
def _cpu_autocast_works(dtype: torch.dtype) -> bool:
    """Whether a convolution forward and backward really runs in `dtype` under CPU autocast."""
    image = torch.ones(1, 1, 4, 4)
    weight = torch.ones(1, 1, 3, 3, requires_grad=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with autocast(torch.device("cpu"), dtype):
                output = torch.nn.functional.conv2d(image, weight)
            output.float().sum().backward()
    except RuntimeError:
        return False
    return bool(output.dtype == dtype)


def autocast(device: torch.device, dtype: torch.dtype) -> ContextManager[Any]:
    """Autocast to `dtype`; float32 is no autocast at all.

    The weight cache is off where that can be said: each weight is used once per forward, and a
    cast made outside a CUDA-graph capture must not be reused inside it.
    """
    if dtype == torch.float32:
        return contextlib.nullcontext()
    if torch_version() < (1, 10):
        return torch.cuda.amp.autocast()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def scaled_product(one: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> Any:
    """The product of two float8 matrices; its signature and its result have changed since 2.1."""
    return torch._scaled_mm(
        one, other, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def scaled_sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The product of two float8 matrices in float32, summed in full precision as far as it goes."""
    ones = torch.ones((), device=one.device)
    result = torch._scaled_mm(one, other, scale_a=ones, scale_b=ones, out_dtype=torch.float32)
    return result[0] if isinstance(result, tuple) else result  # a pair before torch 2.5


def free_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that are free, for torch and everyone else (asked for since 1.10)."""
    if hasattr(torch.cuda, "mem_get_info"):
        return int(torch.cuda.mem_get_info(device)[0])
    total = int(torch.cuda.get_device_properties(device).total_memory)
    return total - int(torch.cuda.memory_reserved(device))


def graphs_available(device: torch.device) -> bool:
    """CUDA graphs came with torch 1.10."""
    return device.type == "cuda" and hasattr(torch.cuda, "CUDAGraph")


def clear_cublas_workspaces() -> None:
    """Let go of the memory that cuBLAS works in, of every stream; torch 1.13 brought a way to. Work
    that is queued may still use it, so the device has to be idle."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


@contextlib.contextmanager
def torchscript() -> Iterator[None]:
    """Where programs are made of TorchScript, which torch 2.13 calls deprecated at each step."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`torch.jit.*` is deprecated", category=DeprecationWarning
        )
        yield


def compiler_available() -> bool:
    """torch.compile came with torch 2.0, and refuses Pythons that it does not know yet."""
    if not hasattr(torch, "compile"):
        return False
    try:
        # With inductor, which counts GPUs as it is loaded, nothing forked here could use CUDA.
        torch.compile(_nothing, backend="eager")
    except RuntimeError:
        return False
    return True


def compiling() -> bool:
    """Whether torch.compile is reading what runs, instead of its being run. Before torch 2.3 nobody
    says so, and it is False."""
    ask = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return bool(ask()) if ask is not None else False


def _nothing(value: Any) -> Any:
    return value


def compiled(model: Callable[..., Any], mode: str, *, whole: bool = False) -> Callable[..., Any]:
    """`model` by torch.compile in one of inductor's modes; the first call with a shape compiles.

    `whole`: refuse to run what cannot be compiled between parts that can.
    """
    made: Callable[..., Any] = torch.compile(model, mode=mode, dynamic=False, fullgraph=whole)
    return made


@contextlib.contextmanager
def keeping_buffers() -> Iterator[None]:
    """What torch.compile compiles within keeps what its backward pass needs, so that it can run
    again. Since torch 2.6 that pass writes over it otherwise; before, it never did."""
    # By name: torches before the compiler do not have it.
    config: Any = importlib.import_module("torch._functorch.config")
    if not hasattr(config, "donated_buffer"):
        yield
        return
    with config.patch(donated_buffer=False):
        yield


def has_dispatch_mode() -> bool:
    """Whether Python can stand where operators are executed, for all tensors (torch 2.0)."""
    return torch_version() >= (2, 0)


@contextlib.contextmanager
def refusing_compiled(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call `refuse` where a function of torch.compile is about to run; torch 2.0 brought it.

    All such functions begin by telling dynamo, through this one function of its module. They have
    the `callback` that compiles as a variable; functions that dynamo shall leave alone have not.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # nothing can have been compiled
        yield
        return
    given = dynamo.set_eval_frame  # type: ignore[attr-defined]

    def checked(callback: Any) -> Any:
        if sys._getframe(1).f_locals.get("callback") is not None:
            refuse("torch.compile")
        return given(callback)

    dynamo.set_eval_frame = checked  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dynamo.set_eval_frame = given  # type: ignore[attr-defined]


def threads_may_change() -> bool:
    """Whether convolutions on a CPU may run with another number of OpenMP threads than before.

    Those of oneDNN are kept between calls, prepared for a number of threads. Since 2.0 that number
    is surely among what they are kept by. In 1.8.0 it is not, and one that was prepared for fewer
    threads writes beyond its memory: https://github.com/pytorch/pytorch/issues/53565
    """
    return torch_version() >= (2, 0)


def inference_mode() -> ContextManager[Any]:
    """`torch.inference_mode` (1.9), or `no_grad` before it."""
    if hasattr(torch, "inference_mode"):
        return torch.inference_mode()
    return torch.no_grad()


def generator_for(device: torch.device, seed: int) -> torch.Generator:
    """A generator of its own on `device`, so that no library call can shift its stream."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return generator


def load_state(stream: BinaryIO) -> Any:
    """`torch.load` onto the CPU of tensors and plain containers; it runs nothing a file says."""
    return safe_pickle.load_tensors(stream, torch_version())


def capturing() -> bool:
    """Whether the current CUDA stream's work is being recorded into a graph, not run."""
    ask = getattr(torch.cuda, "is_current_stream_capturing", None)
    return bool(ask()) if ask is not None else False


def profiler_available() -> bool:
    """Whether this torch was built with Kineto, which `torch.profiler` (1.8) stands on."""
    return bool(torch.autograd.kineto_available())


def profiling() -> bool:
    """Whether this thread is being profiled by torch."""
    return bool(torch._C._autograd._profiler_enabled())


def make_profiler(*, cuda: bool) -> Any:
    """A `torch.profiler.profile` of this thread's operators, and of the GPU where `cuda`.

    torch 2.11 warns that it forgets the events of earlier cycles; here one cycle is all there is.
    Told to keep them (acc_events), it makes Python objects of all events when it stops, which takes
    0.1 ms each.
    """
    from torch.profiler import ProfilerActivity, profile

    class OneCycle(profile):
        def start(self) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*Profiler clears events at the end")
                super().start()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    return OneCycle(activities=activities)


def backward_is_visible() -> bool:
    """Whether `in_backward` can be asked: since torch 2.0."""
    return hasattr(torch._C, "_current_graph_task_id")


def backward_id() -> Optional[int]:
    """Which backward pass this thread is inside of; None where torch cannot tell (before 2.0)."""
    return int(torch._C._current_graph_task_id()) if backward_is_visible() else None


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, in a hook or a function's own backward."""
    return int(torch._C._current_graph_task_id()) != -1


@contextlib.contextmanager
def quantized_tensors() -> Iterator[None]:
    """Where the first quantised tensors of a process are made: torch 2.13 says, once per process,
    that they are to be removed. That one warning is kept back; any other passes."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.quantize_per_tensor, torch.quantize_per_channel and other"
        )
        yield


def set_stream(stream: Any) -> None:
    """Make a CUDA stream, and its device, the current one; nobody sets it back. torch 1.9 gave this
    a name."""
    if hasattr(torch.cuda, "set_stream"):
        torch.cuda.set_stream(stream)
    else:
        torch._C._cuda_setStream(stream._cdata)


def storage_bytes(tensor: torch.Tensor) -> int:
    """The size of the memory that a tensor is a part, or the whole, of. torch 2.0 renamed it."""
    if hasattr(tensor, "untyped_storage"):
        return int(tensor.untyped_storage().nbytes())
    return int(tensor.storage().size()) * tensor.element_size()


@functools.lru_cache(maxsize=None)
def reinterprets() -> bool:
    """Whether a tensor's bytes may be viewed as elements of another size (torch 1.10)."""
    try:
        torch.zeros(4, dtype=torch.uint8).view(torch.float32)
    except RuntimeError:
        return False
    return True
