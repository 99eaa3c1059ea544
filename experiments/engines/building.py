"""A network made ready by the row's engine: how long that takes, and what is kept of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Dict, Iterator, Mapping, Optional

import torch

from narrowgauge_contract.errors import UnknownNameError, UsageError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.engines import EngineCache, Preparation, Runner, prepare
from narrowgauge_lab.engines.registry import engine
from narrowgauge_lab.engines.serving import kept_engines
from narrowgauge_lab.networks.subject import Subject

__all__ = ["build", "options_for"]

#: Where compilers keep what they made; each row gets empty ones where nothing is to be kept.
_COMPILERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def build(
    ctx: RowContext, subject: Subject, example: torch.Tensor, options: Mapping[str, Scalar]
) -> Runner:
    """The row's network ready for inputs like `example`; `options`: of `options_for`.

    Records `build_seconds`, or `load_seconds` for an engine that came from the cache, and the facts
    `engine_cache`, `options` and, where the engine says, `build_phases` and `searched`.
    """
    name, kept = ctx.parameters["engine"], ctx.parameters["cache"] == "kept"
    wanted = Preparation(
        precision=ctx.parameters["precision"],
        device=ctx.device,
        calibration=subject.calibration,
        cache=EngineCache(kept_engines()) if kept else None,
        options=options,
    )
    with contextlib.nullcontext() if kept else _empty_compiler_caches():
        runner = prepare(name, subject.model, example, wanted)
    metric = "load_seconds" if runner.from_cache else "build_seconds"
    ctx.metric(metric, runner.build_seconds, unit="s", source="monotonic")
    ctx.fact(
        "engine_cache",
        {"from_cache": runner.from_cache, "key": runner.cache_key, "note": runner.cache_note},
    )
    phases = runner.phases()
    if phases:
        ctx.fact("build_phases", {each: round(seconds, 3) for each, seconds in phases.items()})
    if runner.searched():
        ctx.fact("searched", dict(runner.searched()))
    ctx.fact("options", {**engine(name).options, **options})
    return runner


def options_for(name: str, text: str) -> Dict[str, Scalar]:
    """Those of one engine among `ENGINE.OPTION=VALUE; …`, with the types of the engine's own.

    Raises UnknownNameError for an engine or an option that there is not, naming the nearest one;
    UsageError for what is not written so, or no value of the option's type.
    """
    found: Dict[str, Scalar] = {}
    for part in filter(None, (word.strip() for word in text.split(";"))):
        label, equals, value = part.partition("=")
        owner, dot, option = label.strip().partition(".")
        if not equals or not dot:
            raise UsageError(
                f"'{part}' is no option of an engine",
                next_step="-p 'options=ENGINE.OPTION=VALUE; …'",
            )
        known = engine(owner).options
        if option not in known:
            raise UnknownNameError("option", option, known, where=f"of the engine {owner}")
        parsed = _typed(value.strip(), known[option])
        if parsed is None:
            kind = type(known[option]).__name__
            raise UsageError(f"'{part}': {value.strip()} is not of type {kind}")
        if owner == name:
            found[option] = parsed
    return found


def _typed(text: str, default: Scalar) -> Optional[Scalar]:
    """`text` as a value of the default's type; None where it is none."""
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower())
    try:
        return type(default)(text)
    except ValueError:
        return None


@contextlib.contextmanager
def _empty_compiler_caches() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _COMPILERS}
    with tempfile.TemporaryDirectory(prefix="narrowgauge-compilers-") as folder:
        for name in _COMPILERS:
            os.environ[name] = str(Path(folder) / name.lower())
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
