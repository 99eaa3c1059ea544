"""Captured pieces of work that run one after another as long as a flag on the device says so.

CUDA's conditional graph nodes (CUDA 12.4; "Conditional Graph Nodes" in the CUDA programming guide):
after each piece a kernel of one thread reads the flag and sets the condition of an IF node, whose
body holds the next piece and its own IF node. The host launches one graph and reads nothing.

torch captures the pieces, and hands them out since 2.8; the chain is put together with the driver
by ctypes, as torch's own conditional nodes are younger than that.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from narrowgauge_kernels.sparse.compiling import compile_source
from narrowgauge_kernels.sparse.driver import CudaDriver
from narrowgauge_kernels.sparse.errors import DeviceError

__all__ = ["SOURCE", "Chain", "DriverGraphs", "chained", "why_not"]

#: NVRTC knows no header of the device runtime; nvcc has read it. The driver resolves the name.
SOURCE = """\
#ifdef __CUDACC_RTC__
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
#endif
extern "C" __global__ void go_on(unsigned long long handle, const bool* flag)
{
    cudaGraphSetConditional(handle, *flag ? 1u : 0u);
}
"""
_KERNEL = "go_on"
_CONDITIONAL = 13  # CU_GRAPH_NODE_TYPE_CONDITIONAL
_IF = 0  # CU_GRAPH_COND_TYPE_IF
_NEEDED_CUDA = 12040
_NODE_BYTES = 256  # sizeof(CUgraphNodeParams)

Compile = Callable[[str, str], Path]


class _Conditional(ctypes.Structure):
    """CUgraphNodeParams with its member `conditional`, as cuda.h lays it out."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved0", ctypes.c_int * 3),
        ("handle", ctypes.c_uint64),
        ("kind", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("bodies", ctypes.POINTER(ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
        ("rest", ctypes.c_char * (_NODE_BYTES - 48)),
    )


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v1: what the driver's entry without a suffix takes."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
    )


def why_not(device: torch.device, library: str = "libcuda.so.1") -> str:
    """Why there are no conditional nodes on this device; empty where there are."""
    if device.type != "cuda":
        return f"a {device.type} has no CUDA graphs"
    if not hasattr(getattr(torch.cuda, "CUDAGraph", None), "raw_cuda_graph"):
        return "this torch does not hand out what it captured (2.8 does)"
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return f"the CUDA driver is not here: {error}"
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value < _NEEDED_CUDA:
        return (
            f"the driver is of CUDA {version.value // 1000}.{version.value % 1000 // 10}, not 12.4"
        )
    return ""


class DriverGraphs:
    """What a chain needs of the driver, on one device, whose context is made current.

    Graphs and nodes are addresses. Raises DeviceError where the driver refuses, and what compiling
    raises.
    """

    def __init__(
        self,
        device: torch.device,
        library: str = "libcuda.so.1",
        compile_for: Compile = compile_source,
    ) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(index)
        driver = CudaDriver(library)
        driver.make_current(index)
        code = compile_for(SOURCE, f"{major}.{minor}")
        self._library = ctypes.CDLL(library)
        self._function = driver.function(code, _KERNEL, 0, index)
        self._context = ctypes.c_void_p()
        self._check("cuCtxGetCurrent", ctypes.byref(self._context))

    def create(self) -> int:
        """An empty graph."""
        graph = ctypes.c_void_p()
        self._check("cuGraphCreate", ctypes.byref(graph), ctypes.c_uint(0))
        return _address(graph)

    def add_child(self, graph: int, after: Sequence[int], child: int) -> int:
        """A node that runs a copy of another graph."""
        node = ctypes.c_void_p()
        self._check(
            "cuGraphAddChildGraphNode", ctypes.byref(node), *_placed(graph, after),
            ctypes.c_void_p(child),
        )  # fmt: skip
        return _address(node)

    def add_condition(self, graph: int, after: Sequence[int], flag: int) -> Tuple[int, int]:
        """A node that sets a new condition of `graph` to the flag (bool, at this address), and the
        condition's handle."""
        handle = ctypes.c_uint64()
        self._check(
            "cuGraphConditionalHandleCreate", ctypes.byref(handle), ctypes.c_void_p(graph),
            self._context, ctypes.c_uint(0), ctypes.c_uint(0),
        )  # fmt: skip
        values = (handle, ctypes.c_uint64(flag))
        places = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        one = (ctypes.c_uint * 3)(1, 1, 1)
        parameters = _Kernel(self._function.handle, one, one, 0, places, None)
        node = ctypes.c_void_p()
        # The driver copies the arguments before it returns.
        self._check(
            "cuGraphAddKernelNode", ctypes.byref(node), *_placed(graph, after),
            ctypes.byref(parameters),
        )  # fmt: skip
        return _address(node), int(handle.value)

    def add_if(self, graph: int, after: Sequence[int], handle: int) -> int:
        """The empty body of a new IF node with this condition."""
        parameters = _Conditional(
            type=_CONDITIONAL, handle=handle, kind=_IF, size=1, context=self._context
        )
        node = ctypes.c_void_p()
        self._check(
            "cuGraphAddNode", ctypes.byref(node), *_placed(graph, after), ctypes.byref(parameters)
        )
        return int(parameters.bodies[0])

    def instantiate(self, graph: int) -> int:
        """The executable graph."""
        executable = ctypes.c_void_p()
        self._check(
            "cuGraphInstantiateWithFlags", ctypes.byref(executable), ctypes.c_void_p(graph),
            ctypes.c_ulonglong(0),
        )  # fmt: skip
        return _address(executable)

    def launch(self, executable: int, stream: int) -> None:
        """Put a run on the stream; nothing is waited for."""
        self._check("cuGraphLaunch", ctypes.c_void_p(executable), ctypes.c_void_p(stream))

    def destroy(self, graph: int, executable: int) -> None:
        """Let go of both; one that still runs, the driver lets finish."""
        self._check("cuGraphExecDestroy", ctypes.c_void_p(executable))
        self._check("cuGraphDestroy", ctypes.c_void_p(graph))

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise DeviceError(f"{name} failed with {code}", why=reason)


def chained(graphs: DriverGraphs, pieces: Sequence[int], flag: int) -> int:
    """A graph that runs the first piece, and each next one if the flag was set when the one before
    it had run; with a flag of 0, all of them."""
    graph = body = graphs.create()
    after: List[int] = []
    for number, piece in enumerate(pieces):
        node = graphs.add_child(body, after, piece)
        after = [node]
        if flag and number < len(pieces) - 1:
            condition, handle = graphs.add_condition(body, after, flag)
            body, after = graphs.add_if(body, [condition], handle), []
    return graph


class Chain:
    """A chain, ready to be launched. `pieces` are torch's captured graphs (kept, so that they can
    be handed out), `flag` a bool on the device, or None to run all of them always.

    Holds the pieces: they own the memory that their copies work in.
    """

    def __init__(
        self,
        graphs: DriverGraphs,
        pieces: Sequence[torch.cuda.CUDAGraph],
        flag: Optional[torch.Tensor],
    ) -> None:
        self._graphs, self._pieces, self._flag = graphs, tuple(pieces), flag
        raw = [piece.raw_cuda_graph() for piece in pieces]
        graph = chained(graphs, raw, flag.data_ptr() if flag is not None else 0)
        self._executable = graphs.instantiate(graph)
        # At the interpreter's end the driver may be gone before this is.
        self._end = weakref.finalize(self, graphs.destroy, graph, self._executable)
        self._end.atexit = False

    def launch(self) -> None:
        """On torch's current stream."""
        self._graphs.launch(self._executable, torch.cuda.current_stream().cuda_stream)


def _placed(graph: int, after: Sequence[int]) -> Tuple[Any, Any, ctypes.c_size_t]:
    """The arguments that say where a node goes."""
    nodes = (ctypes.c_void_p * len(after))(*after) if after else None
    return ctypes.c_void_p(graph), nodes, ctypes.c_size_t(len(after))


def _address(value: ctypes.c_void_p) -> int:
    return int(value.value or 0)
