"""Captured pieces of work that the device goes through or leaves out, without asking the host.

CUDA's conditional graph nodes ("Conditional Graph Nodes" in the CUDA programming guide): the body
of an IF node (CUDA 12.4) holds the next piece and its own IF node; of the bodies of a SWITCH node
(CUDA 12.8) the one runs whose number the condition is. A kernel inside of a piece sets the
condition itself, by the handle that it finds in a cell of device memory; or a kernel of one thread
behind the piece sets it to a flag. The host launches one graph and reads nothing.

torch captures the pieces, and hands them out since 2.8; the graph is put together with the driver
by ctypes, as torch's own conditional nodes are younger than that.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from narrowgauge_kernels.sparse.compiling import compile_source
from narrowgauge_kernels.sparse.driver import CudaDriver
from narrowgauge_kernels.sparse.errors import DeviceError

__all__ = ["DECLARED", "SOURCE", "DriverGraphs", "why_no_switch", "why_not"]

#: NVRTC knows no header of the device runtime; nvcc has read it. The driver resolves the name.
DECLARED = """\
#ifdef __CUDACC_RTC__
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
#endif
"""
SOURCE = f"""\
{DECLARED}extern "C" __global__ void go_on(unsigned long long handle, const bool* flag)
{{
    cudaGraphSetConditional(handle, *flag ? 1u : 0u);
}}
"""
_KERNEL = "go_on"
_CONDITIONAL = 13  # CU_GRAPH_NODE_TYPE_CONDITIONAL
_IF, _SWITCH = 0, 2  # CU_GRAPH_COND_TYPE_IF, CU_GRAPH_COND_TYPE_SWITCH
_ASSIGN_DEFAULT = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT
_NEEDED_CUDA, _NEEDED_FOR_SWITCH = 12040, 12080
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
    return _lacking(device, library, _NEEDED_CUDA)


def why_no_switch(device: torch.device, library: str = "libcuda.so.1") -> str:
    """Why there are no SWITCH nodes on this device; empty where there are."""
    return _lacking(device, library, _NEEDED_FOR_SWITCH)


def _lacking(device: torch.device, library: str, needed: int) -> str:
    if device.type != "cuda":
        return f"a {device.type} has no CUDA graphs"
    if not hasattr(getattr(torch.cuda, "CUDAGraph", None), "raw_cuda_graph"):
        return "this torch does not hand out what it captured (2.8 does)"
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return f"the CUDA driver is not here: {error}"
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value < needed:
        return f"the driver is of CUDA {_version(version.value)}, not {_version(needed)}"
    return ""


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


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

    def new_condition(self, graph: int, at_first: Optional[int] = None) -> int:
        """The handle of a condition of `graph`; `at_first`: what it is at the start of each run,
        where nothing sets it."""
        handle = ctypes.c_uint64()
        self._check(
            "cuGraphConditionalHandleCreate", ctypes.byref(handle), ctypes.c_void_p(graph),
            self._context, ctypes.c_uint(at_first or 0),
            ctypes.c_uint(0 if at_first is None else _ASSIGN_DEFAULT),
        )  # fmt: skip
        if not handle.value:  # in a cell that is how none is told
            raise DeviceError("the driver gave a condition the handle 0")
        return int(handle.value)

    def add_setter(self, graph: int, after: Sequence[int], handle: int, flag: int) -> int:
        """A node that sets a condition to the flag (bool, at this address)."""
        values = (ctypes.c_uint64(handle), ctypes.c_uint64(flag))
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
        return _address(node)

    def add_if(self, graph: int, after: Sequence[int], handle: int) -> int:
        """The empty body of a new IF node with this condition."""
        return self._conditional(graph, after, handle, _IF, 1)[1][0]

    def add_switch(
        self, graph: int, after: Sequence[int], handle: int, size: int
    ) -> Tuple[int, List[int]]:
        """A new SWITCH node with this condition, and its empty bodies: that of the condition's
        number runs, and none where there is no such number."""
        return self._conditional(graph, after, handle, _SWITCH, size)

    def _conditional(
        self, graph: int, after: Sequence[int], handle: int, kind: int, size: int
    ) -> Tuple[int, List[int]]:
        parameters = _Conditional(
            type=_CONDITIONAL, handle=handle, kind=kind, size=size, context=self._context
        )
        node = ctypes.c_void_p()
        self._check(
            "cuGraphAddNode", ctypes.byref(node), *_placed(graph, after), ctypes.byref(parameters)
        )
        return _address(node), [int(parameters.bodies[place]) for place in range(size)]

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
        self.discard(graph)

    def discard(self, graph: int) -> None:
        """Let go of a graph that was not instantiated, or no longer is."""
        self._check("cuGraphDestroy", ctypes.c_void_p(graph))

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise DeviceError(f"{name} failed with {code}", why=reason)


def _placed(graph: int, after: Sequence[int]) -> Tuple[Any, Any, ctypes.c_size_t]:
    """The arguments that say where a node goes."""
    nodes = (ctypes.c_void_p * len(after))(*after) if after else None
    return ctypes.c_void_p(graph), nodes, ctypes.c_size_t(len(after))


def _address(value: ctypes.c_void_p) -> int:
    return int(value.value or 0)
