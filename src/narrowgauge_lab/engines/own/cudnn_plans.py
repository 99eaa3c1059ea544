"""One convolution of cuDNN's, ready to start: what it checks, how it is stored and loaded.

The frontend comes in a `Library`: `own.cudnn` alone imports it.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError
from narrowgauge_lab.engines.own.cudnn_graphs import OPERANDS, ConvProblem, Form

__all__ = ["ConvPlan", "CudnnPlanError", "Found", "Library", "first_line", "load"]

#: What a caller's memory has to be aligned to: operands as cuDNN is told, the workspace as
#: descriptors for the tensor memory accelerator in it need.
_OPERAND_ALIGNMENT, _WORKSPACE_ALIGNMENT = 16, 256
#: Of a stored plan; another one is not read.
_FORMAT = 1
_AGAIN = "make the plans anew"


class CudnnPlanError(NarrowgaugeError):
    """A plan cannot be stored, made again, or started with what it was given."""

    exit_code = ExitCode.RUN_FAILED


class _Handles(threading.local):
    """cuDNN's handles of one thread: device index -> the handle and the stream it was set to."""

    def __init__(self) -> None:
        self.of: Dict[Optional[int], List[Any]] = {}


class Library:
    """The frontend's module, and handles: one per device and thread, never given back."""

    def __init__(self, front: Any) -> None:
        self.front = front
        #: What the frontend raises where cuDNN, or itself, says no.
        self.errors = (RuntimeError, ValueError, front.cudnnGraphNotSupportedError)
        self._handles = _Handles()

    def handle(self, device: torch.device) -> Any:
        """This thread's handle, on torch's current stream of the device."""
        entry = self._handles.of.get(device.index)
        if entry is None:
            with torch.cuda.device(device):
                entry = self._handles.of[device.index] = [self.front.create_handle(), None]
        stream = torch.cuda.current_stream(device).cuda_stream
        if entry[1] != stream:
            self.front.set_stream(handle=entry[0], stream=stream)
            entry[1] = stream
        return entry[0]

    def host(self, device: torch.device) -> Dict[str, Any]:
        """What a stored plan depends on."""
        about = torch.cuda.get_device_properties(device)
        return {
            "cuDNN": int(self.front.backend_version()),
            "frontend": self.front.__version__,
            "GPU": about.name,
            "capability": f"{about.major}.{about.minor}",
            "multiprocessors": about.multi_processor_count,
        }


@dataclasses.dataclass(frozen=True)
class Found:
    """About a plan. `name`: engine and knobs; `source`: who proposed it; `workspace`: bytes it
    needs; `runtime_compiled`: whether cuDNN compiled its kernel here."""

    name: str
    source: str
    workspace: int
    runtime_compiled: bool


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A plan and where its operands are; `kept` keeps their memory alive."""

    library: Library
    device: torch.device
    graph: Any
    index: int
    pointers: Mapping[int, int]
    scratch: int
    kept: Tuple[Any, ...]

    def __call__(self) -> None:
        handle = self.library.handle(self.device)
        self.graph.execute_plan_at_index(self.pointers, self.scratch, self.index, handle=handle)


class ConvPlan:
    """One configuration of one engine. `bias_dtype` is what the bias has to be, None without one;
    the rest is as in `Found`."""

    def __init__(
        self,
        library: Library,
        problem: ConvProblem,
        device: torch.device,
        form: Form,
        graph: Any,
        index: int,
        found: Found,
        stored: bytes = b"",
    ) -> None:
        self.problem, self.device, self.form = problem, device, form
        self.name, self.source = found.name, found.source
        self.workspace, self.runtime_compiled = found.workspace, found.runtime_compiled
        self.bias_dtype = form.torch_bias_dtype
        self._library, self._graph, self._index = library, graph, index
        self._found, self._stored = found, stored

    def __repr__(self) -> str:
        return f"ConvPlan({self.name!r}, workspace={self.workspace})"

    def blob(self) -> bytes:
        """What `rebuild` needs: no heuristics and no compilation then. Raises CudnnPlanError."""
        if self._stored:
            return self._stored
        try:
            # A graph stores the plan it built last; building again what is built only selects it.
            self._graph.build_plan_at_index(self._index)
            payload = bytes(self._graph.serialize())
        except self._library.errors as error:
            raise CudnnPlanError(
                f"cuDNN does not store the plan {self.name}", why=first_line(error)
            ) from error
        header = {
            "format": _FORMAT,
            "host": self._library.host(self.device),
            "problem": _plain(self.problem),
            "form": dataclasses.asdict(self.form),
            "found": dataclasses.asdict(self._found),
            "bytes": len(payload),
        }
        return json.dumps(header).encode() + b"\n" + payload

    def start(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: Optional[torch.Tensor],
        residual: Optional[torch.Tensor],
        y: torch.Tensor,
        workspace: Optional[torch.Tensor] = None,
    ) -> None:
        """Queue the convolution on torch's current stream; see `bind`."""
        self.bind(x, w, bias, residual, y, workspace)()

    def bind(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: Optional[torch.Tensor],
        residual: Optional[torch.Tensor],
        y: torch.Tensor,
        workspace: Optional[torch.Tensor] = None,
    ) -> Callable[[], None]:
        """`start` with everything checked once: the call neither allocates nor waits, and may be
        captured in a CUDA graph once it was made outside of one (kernels load at the first).

        x, residual and y are [N, C, H, W] with the problem's strides; w is [K, C / groups, R, S]
        with channels last; bias is [1, K, 1, 1] of `bias_dtype`; workspace is uint8, at least
        `workspace` of them. All lie on the plan's device, which is the current one whenever the
        plan starts. Raises CudnnPlanError.
        """
        given = {"x": x, "w": w, "bias": bias, "residual": residual, "y": y}
        operands = {
            name: self._checked(name, tensor)
            for name, tensor in given.items()
            if self._wants(name, tensor)
        }
        pointers = {OPERANDS[name]: tensor.data_ptr() for name, tensor in operands.items()}
        return _Bound(
            self._library, self.device, self._graph, self._index, pointers,
            self._scratch(workspace), (operands, workspace),
        )  # fmt: skip

    def own_workspace(self) -> torch.Tensor:
        """As much as it needs, in fresh memory, for runs that no other plan shares it with."""
        raw = torch.empty(
            self.workspace + _WORKSPACE_ALIGNMENT, dtype=torch.uint8, device=self.device
        )
        first = -raw.data_ptr() % _WORKSPACE_ALIGNMENT
        return raw[first : first + self.workspace]

    def _wants(self, name: str, tensor: Optional[torch.Tensor]) -> bool:
        wanted = bool(getattr(self.problem, name, True))
        if wanted != (tensor is not None):
            raise CudnnPlanError(
                f"the plan was given {'a' if tensor is not None else 'no'} {name}",
                why=f"its problem has {'one' if wanted else 'none'}",
            )
        return wanted

    def _checked(self, name: str, tensor: Any) -> torch.Tensor:
        shape, strides = self.problem.shape(name), self.problem.strides(name)
        due = {
            "dtype": self.bias_dtype if name == "bias" else self.problem.torch_dtype,
            "shape": shape,
            "device": self.device,
        }
        wrong = [
            f"its {what} is {getattr(tensor, what)} where {wanted} is due"
            for what, wanted in due.items()
            if getattr(tensor, what) != wanted
        ]
        # A dimension of one has no step.
        if not wrong and any(
            size > 1 and tensor.stride(i) != strides[i] for i, size in enumerate(shape)
        ):
            wrong = [f"its strides are {tensor.stride()} where {strides} are due"]
        if tensor.data_ptr() % _OPERAND_ALIGNMENT:
            wrong.append(f"its address is no multiple of {_OPERAND_ALIGNMENT}")
        if wrong:
            raise CudnnPlanError(f"{name} is not what the plan was made for", why="; ".join(wrong))
        return tensor

    def _scratch(self, workspace: Optional[torch.Tensor]) -> int:
        """The workspace's address; 0 where none is needed."""
        if not self.workspace:
            return 0
        found = 0 if workspace is None else workspace.numel() * workspace.element_size()
        if workspace is None or found < self.workspace or workspace.device != self.device:
            raise CudnnPlanError(
                f"the plan needs {self.workspace} bytes of workspace on {self.device}",
                why=f"it was given {found}" + (f" on {workspace.device}" if found else ""),
            )
        if workspace.data_ptr() % _WORKSPACE_ALIGNMENT or not workspace.is_contiguous():
            raise CudnnPlanError(
                f"the workspace has to be contiguous at a multiple of {_WORKSPACE_ALIGNMENT} bytes"
            )
        return workspace.data_ptr()


def load(library: Library, problem: ConvProblem, blob: bytes, device: torch.device) -> ConvPlan:
    """The plan that `ConvPlan.blob` stored. Raises CudnnPlanError: it is damaged, or of another
    problem, GPU, cuDNN or frontend."""
    header, payload = _parsed(blob)
    stored = {**header["host"], "problem": header["problem"]}
    here = {**library.host(device), "problem": _plain(problem)}
    for what, wanted in here.items():
        if stored.get(what) != wanted:
            raise CudnnPlanError(
                f"the stored plan is for another {what}",
                why=f"stored with {stored.get(what)}, and here it is {wanted}",
                next_step=_AGAIN,
            )
    try:
        graph = library.front.pygraph(handle=library.handle(device))
        graph.deserialize(list(payload))
        needed = int(graph.get_workspace_size_plan_at_index(0))
    except library.errors as error:
        raise CudnnPlanError(
            "cuDNN does not take its stored plan back", why=first_line(error), next_step=_AGAIN
        ) from error
    found = Found(**header["found"])
    found = dataclasses.replace(found, workspace=max(needed, found.workspace))
    return ConvPlan(library, problem, device, Form(**header["form"]), graph, 0, found, stored=blob)


def _plain(problem: ConvProblem) -> Dict[str, Any]:
    """As JSON gives it back: lists for tuples."""
    return json.loads(json.dumps(dataclasses.asdict(problem)))


def _parsed(blob: bytes) -> Tuple[Dict[str, Any], bytes]:
    text, newline, payload = blob.partition(b"\n")
    try:
        header = json.loads(text.decode())
        whole = bool(newline) and header["format"] == _FORMAT and header["bytes"] == len(payload)
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise CudnnPlanError(
            "the stored plan is damaged, or of another version of this program", next_step=_AGAIN
        )
    return header, payload


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
