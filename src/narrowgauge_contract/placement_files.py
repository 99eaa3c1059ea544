"""Placement plans as words of a command line: read here once, before a Job is resolved."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from narrowgauge_contract.errors import ExperimentFileError, PlanFileError, nearest
from narrowgauge_contract.placement import (
    BUILTIN,
    NO_PLAN,
    PlacementPlan,
    is_reference,
    parse_plan,
    plan_document,
    plan_value,
)
from narrowgauge_contract.spec import ExperimentSpec, load_toml

__all__ = ["PlanWords", "find_plan", "load_plan", "read_plans"]


@dataclasses.dataclass(frozen=True)
class PlanWords:
    """`words`: those of a command line with what a run calls each plan in place of its file's name;
    `documents`: by these values, what the files say."""

    words: Tuple[str, ...]
    documents: Dict[str, Any]


def read_plans(
    spec: ExperimentSpec,
    words: Sequence[str],
    folder: Path,
    *,
    kept: Optional[Mapping[str, Any]] = None,
    hint: str = "",
) -> PlanWords:
    """Read every file that a `name=value[,value…]` word names for a parameter of type `plan`.

    Paths are relative to `folder`. `kept`: plans that a run to go on with holds already; `hint`:
    what to do beside, where a file is not seen. Words that are wrong otherwise are left to
    `job.parse_overrides`. Raises PlanFileError, UnknownNameError.
    """
    written: List[str] = []
    documents: Dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or spec.parameter(name.strip()).type != "plan":
            written.append(word)
            continue
        values = []
        for part in map(str.strip, text.split(",")):
            value = part
            if part and part not in (*BUILTIN, NO_PLAN) and not is_reference(part):
                plan = _read(part, folder, kept or {}, hint)
                value = plan_value(plan)
                documents[value] = plan_document(plan)
            values.append(value)
        written.append(f"{name}={','.join(values)}")
    return PlanWords(tuple(written), documents)


def find_plan(text: str, folder: Path) -> PlacementPlan:
    """The built-in plan of that name, or the one in that file. Raises PlanFileError."""
    if text in BUILTIN:
        return parse_plan(BUILTIN[text], f"the plan '{text}'")
    return _read(text, folder, {}, "")


def load_plan(path: Path) -> PlacementPlan:
    """Read and check a plan's TOML. Raises PlanFileError."""
    try:
        document = load_toml(path)
    except ExperimentFileError as error:
        raise PlanFileError(error.what, why=error.why, next_step=error.next_step) from error
    except OSError as error:
        raise PlanFileError(f"{path} cannot be read", why=error.strerror or str(error)) from error
    return parse_plan(document, str(path))


def _read(text: str, folder: Path, kept: Mapping[str, Any], hint: str) -> PlacementPlan:
    path = folder / text
    if text and os.path.exists(path):  # Path.exists raises for a name that is too long
        return load_plan(path)
    close = nearest(text, (*BUILTIN, NO_PLAN))
    held = ", ".join(value for value in kept if is_reference(value))
    lines = [f"did you mean '{close}'?"] if close else []
    lines.append(f"built in: {', '.join(BUILTIN)}")
    lines += [f"the run that is there goes on with its own copy, given as: {held}"] if held else []
    lines += [hint] if hint else []
    raise PlanFileError(
        f"there is no placement plan '{text}'",
        why=f"it is not built in, and {path.absolute()} is not there",
        next_step="\n".join(lines),
    )
