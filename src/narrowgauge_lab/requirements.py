"""Whether an experiment can run with this torch on this machine."""

from __future__ import annotations

import dataclasses
import importlib
import operator
import re
from typing import Tuple

from narrowgauge_contract.errors import ExperimentFileError, NotApplicableError
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import InsideFacts
from narrowgauge_contract.spec import ExperimentSpec

__all__ = ["as_used", "choose_device", "preload", "require_applicable", "satisfies"]

#: Importing for fewer rows than this would cost more than it saves.
_ROWS_WORTH_IT = 3

_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"^\s*(>=|<=|==|>|<)\s*(\d+(?:\.\d+){0,2})\s*$")


def satisfies(version: str, requirement: str) -> bool:
    """Whether `2.13.0+cu130` meets `>=1.8` or `>=1.8,<2.12`.

    Versions compare by their first three numbers, so a pre-release counts as its release.
    Raises ExperimentFileError for a requirement of another form.
    """
    for condition in requirement.split(","):
        match = _CONDITION.match(condition)
        if match is None:
            raise ExperimentFileError(
                f"the torch requirement '{requirement}' is not understood",
                next_step="for example: torch = '>=1.8' or '>=2.1,<2.12'",
            )
        if not _COMPARISONS[match.group(1)](_numbers(version), _numbers(match.group(2))):
            return False
    return True


def require_applicable(spec: ExperimentSpec, inside: InsideFacts, asked: str) -> None:
    """Raises NotApplicableError; `asked` is the device asked for: auto, cpu or cuda."""
    if not satisfies(inside.torch or "0", spec.requires_torch):
        raise NotApplicableError(
            f"'{spec.id}' needs torch {spec.requires_torch}; this is {inside.torch}",
            next_step="narrowgauge plan names a target that has it",
        )
    if asked == "cuda" and inside.accelerator is None:
        raise NotApplicableError(
            "--device cuda, but torch sees no GPU here",
            why=f"torch {inside.torch} is built for CUDA {inside.cuda or 'not at all'}",
            next_step="--device cpu; or see what nvidia-smi says",
        )
    if spec.requires_accelerator and (inside.accelerator is None or asked == "cpu"):
        raise NotApplicableError(
            f"'{spec.id}' needs a GPU",
            why="--device cpu was given" if asked == "cpu" else "torch sees none here",
            next_step="narrowgauge plan names a target that has one",
        )


def choose_device(asked: str, inside: InsideFacts) -> str:
    """The name of the torch device: as asked, or the accelerator where there is one."""
    if asked != "auto":
        return asked
    return "cpu" if inside.accelerator is None else "cuda"


def as_used(inside: InsideFacts, device: str) -> InsideFacts:
    """The facts of a run on `device`: records are compared by their accelerator, so one that the
    run was told not to use is not among them."""
    if device != "cpu":
        return inside
    return dataclasses.replace(inside, accelerator=None, capability=None)


def preload(job: Job) -> None:
    """Import once, before rows are forked, what each of them would import: parts of torch that take
    seconds. What this torch does not have, or cannot use here, is passed over."""
    if len(job.rows) < _ROWS_WORTH_IT:
        return
    for name in job.experiment_spec().preload:
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError):
            # Not there, or there and unwilling: RuntimeError is what parts of torch refuse a Python
            # or a machine with. A row that needs it says so itself, and the others need not end.
            continue


def _numbers(version: str) -> Tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+){0,2}", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    return tuple([*numbers, 0, 0, 0][:3])
