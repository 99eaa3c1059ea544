"""What a network costs: multiply-accumulates, parameters, bytes, and memory at the peak.

MACs are those of convolutions, linear layers and matrix products, counted from the shapes that the
operators really got, so functional calls and patched functions count too. Nothing else costs
anything; FLOPs are twice the MACs.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError, UsageError
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.measure.operators import Use
from narrowgauge_lab.measure.watch import watch

__all__ = ["Cost", "UncountableError", "count", "peak_memory", "serialised_bytes"]

#: What a state_dict holds beside tensors, and has none in it.
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.qscheme)
_RESIDENT_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


class UncountableError(UsageError):
    """The cost of what ran cannot be told from the operators that ran."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one call with `batch` items.

    `bytes`: all tensors of the state_dict, each once, at their element sizes (quantised ones with
    their scales and zero points); what torch.save writes adds names and a zip archive to it.
    `least_macs`: with every convolution of stride 1 by F(6×6, 3×3), Winograd's algorithm in the
    largest tiles that libraries have, so 3×3 ones at 64/324; kernels for which Fourier's needs
    fewer by that. `parameters` and `bytes` are 0 for a bare function.
    """

    macs: int
    parameters: int
    bytes: int
    per_operator: Dict[str, int]
    least_macs: int
    batch: int = 1

    def to_fact(self) -> Dict[str, Any]:
        """For `ctx.fact("cost", …)`."""
        return dataclasses.asdict(self)


def count(call_or_model: Callable[[Any], Any], example: Any) -> Cost:
    """Run `call_or_model(example)` once, without gradients; a module runs in eval mode, and each of
    its modules is then in the mode that it was in.

    A tuple `example` is several arguments. Count a quantised network before it is converted: its
    converted modules hide weights and shapes. Raises UncountableError for such a one and for
    operators without a formula, and what `watch` raises for captured code.
    """
    arguments = example if isinstance(example, tuple) else (example,)
    model = call_or_model if isinstance(call_or_model, nn.Module) else None
    mode = in_eval_mode(model) if model is not None else contextlib.nullcontext()
    with mode, torch.no_grad():
        uses = watch(lambda: call_or_model(*arguments))
    _require_countable(uses)
    per_operator: Dict[str, int] = {}
    for use in uses:
        per_operator[use.operator] = per_operator.get(use.operator, 0) + (use.macs or 0)
    first = arguments[0]
    return Cost(
        macs=sum(per_operator.values()),
        parameters=sum(p.numel() for p in model.parameters()) if model is not None else 0,
        bytes=serialised_bytes(model) if model is not None else 0,
        per_operator=per_operator,
        least_macs=sum(use.least_macs or 0 for use in uses),
        batch=int(first.shape[0]) if isinstance(first, torch.Tensor) and first.dim() else 1,
    )


def _require_countable(uses: Sequence[Use]) -> None:
    converted = sorted({use.operator for use in uses if use.quantized})
    if converted:
        raise UncountableError(
            "the cost of a converted network cannot be counted",
            why=f"{', '.join(converted)} hide their weights, so they would count as nothing",
            next_step="count the float or fake-quantised network before it is converted; "
            "serialised_bytes() takes either",
        )
    unknown = sorted({use.operator for use in uses if use.macs is None})
    if unknown:
        raise UncountableError(
            f"there is no formula for the cost of {', '.join(unknown)}",
            next_step="add one to narrowgauge_lab/measure/operators.py",
        )


def serialised_bytes(model: nn.Module) -> int:
    """The bytes of all tensors of the state_dict; tied ones once. Converted modules count too.

    Raises UncountableError for what holds nobody knows which tensors.
    """
    # All of them at once: what is unpacked lives as long as this list, and without it the next one
    # could get its address.
    tensors = list(_tensors(model.state_dict()))
    sizes: Dict[Any, int] = {}
    for tensor in tensors:
        if tensor.numel():
            sizes[(tensor.data_ptr(), tensor.numel(), tensor.dtype)] = _bytes_of(tensor)
    return sum(sizes.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, torch._C.ScriptObject):
        yield from _tensors(_opened(value))
    elif not isinstance(value, _PLAIN):
        raise _unopened(value, "")


def _opened(packed: Any) -> Any:
    """What quantised weights were packed from; a recurrent layer's are nested."""
    try:
        return packed.unpack() if hasattr(packed, "unpack") else packed.__getstate__()
    except (AttributeError, RuntimeError) as error:
        raise _unopened(packed, str(error).partition("\n")[0]) from error


def _unopened(value: Any, why: str) -> UncountableError:
    return UncountableError(
        f"the bytes of a {type(value).__name__} in the state_dict cannot be counted",
        why=why or "nothing tells which tensors it holds",
        next_step="count the network before it is converted",
    )


def _bytes_of(tensor: torch.Tensor) -> int:
    values = tensor.numel() * tensor.element_size()
    if not tensor.is_quantized:
        return values
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return values + 16
    parameters: List[torch.Tensor] = [
        tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    ]  # fmt: skip
    return values + sum(each.numel() * each.element_size() for each in parameters)


def peak_memory(device: torch.device, call: Callable[[], Any]) -> int:
    """The most bytes in use at once while `call` runs.

    CUDA: what torch's allocator holds of the card at the peak, in whole segments: weights, inputs
    and the pools of captured graphs included, and nothing that libraries allocate by themselves.
    CPU: how far the resident set of this process rose above where it stood, after free pages went
    back to the system: what the call adds to weights and inputs, in whole pages. Once for each
    process, before anything like it has run: a library keeps the workspace of its first call.
    Raises NotApplicableError where Linux does not let the peak be reset.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # Held, not allocated: what a graph's replay uses counts as free between replays.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_reserved(device))
    before = _reset_resident_peak()
    call()
    return max(0, _resident_peak() - before)


def _reset_resident_peak() -> int:
    """Begin a new peak at the present resident set; its bytes."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    try:
        # 5: "reset the peak resident set size to the current value", proc(5).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        raise NotApplicableError(
            "the peak memory of a call cannot be measured here",
            why=f"/proc/self/clear_refs: {error.strerror}",
            next_step="it needs Linux 4.0 or later and a /proc that this process may write",
        ) from error
    return _resident_peak()


def _resident_peak() -> int:
    found = _RESIDENT_PEAK.search(Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise NotApplicableError(
            "the peak memory of a call cannot be measured here",
            why="/proc/self/status has no VmHWM",
        )
    return int(found.group(1)) * 1024
