"""A sweep's TOML file: what varies, how points are chosen, and what is sought."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import BadValueError, UnknownNameError, UsageError
from narrowgauge.slurm.asking import SlurmAsk, parse_ask
from narrowgauge_contract.parameters import Parameter, Scalar
from narrowgauge_contract.spec import PROFILES, ExperimentSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["METHODS", "Choice", "Domain", "Range", "SweepFile", "SweepSpec", "check", "read_sweep"]

METHODS = ("grid", "random", "optuna")
_DIRECTIONS = ("maximize", "minimize")
_SWEEP_KEYS = (
    "experiment", "method", "runs", "profile", "seed", "metric", "direction", "storage",
)  # fmt: skip
_TABLES = ("sweep", "vary", "fixed", "slurm")
_BOUNDS = ("low", "high")
_RANGE_KEYS = (*_BOUNDS, "log", "step")


@dataclass(frozen=True)
class Choice:
    """One of these values."""

    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class Range:
    """A number between `low` and `high`, both included; `log`: uniform in its logarithm; `step`:
    only low, low + step, …; 0: any."""

    low: float
    high: float
    whole: bool
    log: bool = False
    step: float = 0.0


Domain = Choice | Range


@dataclass(frozen=True)
class SweepFile:
    """What the file says, before it is held against the experiment. `name`: the file's stem."""

    name: str
    experiment: str
    method: str
    runs: int
    profile: str
    seed: int
    metric: str
    direction: str
    storage: str
    vary: Mapping[str, Any]
    fixed: Mapping[str, Any]
    slurm: SlurmAsk


@dataclass(frozen=True)
class SweepSpec:
    """A sweep whose every name and value the experiment knows. `fixed` and the domains are by the
    parameters' true names."""

    file: SweepFile
    domains: Mapping[str, Domain]
    fixed: Mapping[str, Scalar]


def read_sweep(path: Path) -> SweepFile:
    """Raises UsageError, UnknownNameError, BadValueError."""
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the sweep {path}", why=error.strerror or "") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the sweep {path} is not TOML", why=str(error)) from error
    _known(body, _TABLES, f"in {path}")
    head = _table(body, "sweep", path)
    _known(head, _SWEEP_KEYS, f"in [sweep] of {path}")
    method = _word(head, "method", "grid", METHODS)
    metric = _text(head, "metric", "")
    if method == "optuna" and not metric:
        raise UsageError(
            f"the sweep {path} does not say what Optuna is to seek",
            next_step='in [sweep]: metric = "test_accuracy", direction = "maximize"',
        )
    runs = head.get("runs", 0)
    if not isinstance(runs, int) or isinstance(runs, bool) or runs < (method != "grid"):
        raise BadValueError(
            f"[sweep] runs = {runs!r} of {path} is not a number of runs",
            next_step=f"a {method} sweep needs one: runs = 100",
        )
    seed = head.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise BadValueError(f"[sweep] seed = {seed!r} of {path} is not a number from 0")
    vary = _table(body, "vary", path)
    if not vary:
        raise UsageError(f"nothing varies in the sweep {path}", next_step="[vary]\nlr = [0.1, 0.5]")
    if not _text(head, "experiment", ""):
        raise UsageError(f"the sweep {path} names no experiment", next_step='experiment = "mnist"')
    return SweepFile(
        name=path.stem,
        experiment=head["experiment"],
        method=method,
        runs=runs,
        profile=_word(head, "profile", "short", PROFILES),
        seed=seed,
        metric=metric,
        direction=_word(head, "direction", _DIRECTIONS[0], _DIRECTIONS),
        storage=_text(head, "storage", ""),
        vary=vary,
        fixed=_table(body, "fixed", path),
        slurm=parse_ask(_table(body, "slurm", path)),
    )


def check(file: SweepFile, spec: ExperimentSpec) -> SweepSpec:
    """Every name and value against the experiment. Raises UnknownNameError, BadValueError."""
    domains: dict[str, Domain] = {}
    for name, given in file.vary.items():
        parameter = spec.parameter(name)
        if parameter.name in domains:
            raise UsageError(f"the parameter '{parameter.name}' varies twice")
        domains[parameter.name] = _domain(parameter, given, file.method)
    fixed: dict[str, Scalar] = {}
    for name, given in file.fixed.items():
        parameter = spec.parameter(name)
        if parameter.name in domains:
            raise UsageError(f"the parameter '{parameter.name}' both varies and is fixed")
        fixed[parameter.name] = parameter.check(given)
    return SweepSpec(file, domains, fixed)


def _domain(parameter: Parameter, given: Any, method: str) -> Domain:
    if isinstance(given, list) and given:
        return Choice(tuple(dict.fromkeys(parameter.check(each) for each in given)))
    if not isinstance(given, dict):
        raise BadValueError(
            f"[vary] {parameter.name} = {given!r} is neither a list nor a range",
            next_step=f"{parameter.name} = [a, b], or {{ low = a, high = b }}",
        )
    _known(given, _RANGE_KEYS, f"in [vary] {parameter.name}")
    if parameter.type not in ("int", "float"):
        raise BadValueError(
            f"[vary] {parameter.name} is a range, and of type {parameter.type}",
            next_step=f"list its values: {parameter.name} = [a, b]",
        )
    for bound in _BOUNDS:
        if bound not in given:
            raise BadValueError(f"the range [vary] {parameter.name} has no '{bound}'")
    low, high = (_finite(parameter, bound, parameter.check(given[bound])) for bound in _BOUNDS)
    log = given.get("log", False)
    if not isinstance(log, bool):
        raise BadValueError(
            f"[vary] {parameter.name}: log = {log!r} is neither true nor false",
            next_step="log = true",
        )
    step = _step(parameter, given.get("step", 0))
    if not math.isfinite(high - low) or (step and not math.isfinite((high - low) / step)):
        raise BadValueError(
            f"[vary] {parameter.name} from {low:g} to {high:g} is more than can be counted",
            next_step="bounds closer together, or a greater step",
        )
    if not low < high or (log and (low <= 0 or step)):
        raise BadValueError(
            f"[vary] {parameter.name} is no range from {low:g} to {high:g}",
            why="low is below high; with log both are positive, and there is no step",
        )
    if method == "grid" and not step:
        raise BadValueError(
            f"[vary] {parameter.name} has no step, and a grid needs one",
            next_step="step = …, a list of values, or another method",
        )
    return Range(low, high, parameter.type == "int", log, step)


def _step(parameter: Parameter, given: Any) -> float:
    """0 where there is none. A whole parameter's is whole, or its points would come twice."""
    wrong = isinstance(given, bool) or not isinstance(given, (int, float))
    step = math.nan if wrong else _finite(parameter, "step", given)
    if not step >= 0:
        raise BadValueError(
            f"[vary] {parameter.name}: step = {given!r} is not a positive number",
            next_step="step = 1, or leave it out",
        )
    if parameter.type == "int" and not step.is_integer():
        raise BadValueError(
            f"[vary] {parameter.name}: step = {given!r} of whole numbers is not whole",
            next_step="step = 1, or a greater whole number",
        )
    return step


def _finite(parameter: Parameter, key: str, given: Any) -> float:
    try:
        value = float(given)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise BadValueError(
            f"[vary] {parameter.name}: {key} is not a finite number",
            next_step="a range has two bounds, and steps that can be counted",
        )
    return value


def _table(body: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    found = body.get(name, {})
    if not isinstance(found, dict):
        raise BadValueError(f"'{name}' of the sweep {path} is not a table", next_step=f"[{name}]")
    return found


def _known(body: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in body:
        if name not in known:
            raise UnknownNameError("key", name, known, where=where)


def _text(body: Mapping[str, Any], name: str, default: str) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise BadValueError(f"[sweep] {name} = {value!r} is not a text")
    return value


def _word(body: Mapping[str, Any], name: str, default: str, known: tuple[str, ...]) -> str:
    value = _text(body, name, default)
    if value not in known:
        raise UnknownNameError(f"[sweep] {name}", value, known)
    return value
