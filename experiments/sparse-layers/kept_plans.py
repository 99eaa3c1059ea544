"""The fastest of cuDNN's plans that a search found, for the repeats that follow.

A search tries thousands of configurations for `plan_s` seconds, and each repeat of a row is a
process of its own: without this ten repeats of eight layers would search for a quarter of an hour,
and each could end with another plan. The key is problem, bounds and device; what is kept refuses
another GPU, cuDNN or frontend by its own header.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import torch

from narrowgauge_kernels.sparse.compiling import cache_directory, write_atomic
from narrowgauge_lab.engines.own import cudnn
from narrowgauge_lab.engines.own.cudnn import ConvPlan, ConvProblem, CudnnPlanError

__all__ = ["keep", "kept"]

#: Plans of a search that are kept: what is fastest may be another one in another process.
_MOST = 3


def keep(
    problem: ConvProblem, device: torch.device, bounds: Tuple[int, float],
    plans: Sequence[ConvPlan], note: str,
) -> None:  # fmt: skip
    """The first three of `plans`, the fastest first, that cuDNN stores; nothing where it stores
    none. Raises DiskFullError."""
    stored = []
    for plan in plans:
        if len(stored) == _MOST:
            break
        try:
            blob = base64.b64encode(plan.blob()).decode("ascii")
        except CudnnPlanError:
            continue
        stored.append({"bias": plan.problem.bias, "blob": blob})
    if stored:
        body = {"note": note, "plans": stored}
        write_atomic(_path(problem, device, bounds), json.dumps(body).encode())


def kept(
    problem: ConvProblem, device: torch.device, bounds: Tuple[int, float]
) -> Optional[Tuple[List[ConvPlan], str]]:
    """Plans and note of the search with these bounds; None where none was kept, or what was is
    damaged or of another GPU or library: then it has to be searched anew."""
    try:
        body = json.loads(_path(problem, device, bounds).read_text(encoding="ascii"))
        plans = [
            cudnn.rebuild(
                dataclasses.replace(problem, bias=each["bias"]),
                base64.b64decode(each["blob"], validate=True), device,
            )
            for each in body["plans"]
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, CudnnPlanError):
        return None
    return (plans, f"kept by an earlier row: {body['note']}") if plans else None


def _path(problem: ConvProblem, device: torch.device, bounds: Tuple[int, float]) -> Path:
    """One file for both searches, with a bias and without."""
    both = dataclasses.asdict(dataclasses.replace(problem, bias=False))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    text = json.dumps([both, name, *bounds], sort_keys=True)
    folder = cache_directory().parent / "sparse-layers"
    return folder / f"plans-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
