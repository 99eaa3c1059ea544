"""A Job: one run, fully decided. After it, nobody reads TOML.

`resolve` is pure: the same spec, overrides and run id give the same Job, on host and in lab.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from narrowgauge_contract.codec import decode, read_json
from narrowgauge_contract.data_needs import sets_where
from narrowgauge_contract.errors import (
    BadValueError,
    DamagedRecordError,
    UnknownNameError,
    UsageError,
)
from narrowgauge_contract.parameters import PROFILE_PARAMETER, Parameter, Scalar
from narrowgauge_contract.placement import BUILTIN, NO_PLAN
from narrowgauge_contract.spec import PROFILES, ExperimentSpec, parse_spec

__all__ = [
    "JOB_FORMAT",
    "Job",
    "RowPlan",
    "load_job",
    "new_run_id",
    "parse_overrides",
    "resolve",
    "resolve_all",
    "shard_rows",
]

#: 1: first.
JOB_FORMAT = 1

#: A value of the parameter that `[data] parameter` names: it asks for made-up data.
SYNTHETIC = "synthetic"
#: Such a parameter's value for data of the user's own, in a file that another parameter names.
OWN_FILE = "file"


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """One row to measure: all its parameters, which repeat it is, and its seed (base + repeat)."""

    index: int
    repeat: int
    seed: int
    parameters: Dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """One run. `parameters` holds every parameter, as a list where it makes rows.

    `plan`: by the values of its parameters of type `plan`, the placement plans' documents.
    """

    format: int
    run_id: str
    experiment: str
    profile: str
    target: str
    seed: int
    parameters: Dict[str, Any]
    rows: Tuple[RowPlan, ...]
    data_sets: Tuple[str, ...]
    synthetic: bool
    spec: Dict[str, Any]
    plan: Optional[Dict[str, Any]] = None

    def experiment_spec(self) -> ExperimentSpec:
        """The declaration this Job came from, parsed again from the embedded data."""
        return parse_spec(self.spec, where=f"job {self.run_id}")


def new_run_id(experiment: str, now: Optional[float] = None) -> str:
    """`20261121T101500Z-mnist-3fa9c1`: sorts by time, names its experiment, never repeats."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() if now is None else now))
    return f"{stamp}-{experiment}-{secrets.token_hex(3)}"


def parse_overrides(spec: ExperimentSpec, words: Sequence[str]) -> Dict[str, Tuple[Scalar, ...]]:
    """Turn `name=value[,value…]` words into checked values, under the parameters' true names.

    Raises UnknownNameError, BadValueError, or UsageError (no '=', or a name given twice).
    """
    overrides: Dict[str, Tuple[Scalar, ...]] = {}
    for word in words:
        given, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"'-p {word}' is not name=value", next_step="for example: -p epochs=3")
        parameter = spec.parameter(given.strip())
        name = parameter.name
        if name in overrides:
            raise UsageError(f"parameter '{name}' is given twice", next_step=f"-p {name}=a,b lists")
        if parameter is PROFILE_PARAMETER:
            _require_no_amount(text)
        overrides[name] = parameter.parse_list(text)
    return overrides


def _require_no_amount(text: str) -> None:
    """`-p profile=smoke` is a slip that deserves better than a list of profilers."""
    if text.strip() in PROFILES:
        raise BadValueError(
            f"'-p profile={text}' asks for a profiler of that name, and there is none",
            why=PROFILE_PARAMETER.declaration(),
            next_step=f"how much to do is an option of its own: --profile {text.strip()}",
        )


def resolve_all(
    spec: ExperimentSpec,
    overrides: Mapping[str, Tuple[Scalar, ...]],
    *,
    profile: str,
    target: str,
    seed: int,
    run_ids: Sequence[str] = (),
    plans: Optional[Mapping[str, Any]] = None,
) -> Tuple[Job, ...]:
    """Every run that the overrides ask for: lists along `run` multiply runs. Pure given `run_ids`.

    Where fewer run ids are given than there are runs, new ones are made. `plans`: by their values,
    documents of placement plans that are not built in, or are to be used instead.
    """
    values = _values(spec, overrides, profile)
    run_names = [name for name in values if spec.parameter(name).axis == "run"]
    jobs: List[Job] = []
    for choice in itertools.product(*(values[name] for name in run_names)):
        fixed = {**values, **{name: (value,) for name, value in zip(run_names, choice)}}
        run_id = run_ids[len(jobs)] if len(jobs) < len(run_ids) else new_run_id(spec.id)
        job = _job(spec, fixed, profile, target, seed, run_id)
        jobs.append(dataclasses.replace(job, plan=_plans(spec, fixed, plans or {})))
    return tuple(jobs)


def resolve(
    spec: ExperimentSpec,
    overrides: Mapping[str, Tuple[Scalar, ...]],
    *,
    profile: str,
    target: str,
    seed: int,
    run_id: str,
    plans: Optional[Mapping[str, Any]] = None,
) -> Job:
    """The one Job that the overrides ask for; UsageError where they ask for several runs."""
    jobs = resolve_all(
        spec, overrides, profile=profile, target=target, seed=seed, run_ids=[run_id], plans=plans
    )
    if len(jobs) != 1:
        raise UsageError(
            f"these parameters make {len(jobs)} runs, not one",
            why='a comma list on a parameter with axis = "run" makes one run per value',
            next_step="give one value, or use `narrowgauge run`, which starts them in turn",
        )
    return jobs[0]


def shard_rows(rows: Sequence[RowPlan], shard: Tuple[int, int]) -> Tuple[RowPlan, ...]:
    """The rows of shard `i` of `n` (counted from 1), dealt out in turn."""
    position, count = shard
    if not 1 <= position <= count:
        raise UsageError(f"--shard {position}/{count} is not i/n with 1 <= i <= n")
    return tuple(row for row in rows if row.index % count == position - 1)


def load_job(path: Path) -> Job:
    """Read job.json. Raises DamagedRecordError."""
    data = read_json(path)
    if isinstance(data, dict) and data.get("format") != JOB_FORMAT:
        raise DamagedRecordError(
            f"{path} has job format {data.get('format')!r}, this program reads {JOB_FORMAT}"
        )
    return decode(Job, data, str(path))


def _values(
    spec: ExperimentSpec, overrides: Mapping[str, Tuple[Scalar, ...]], profile: str
) -> Dict[str, Tuple[Scalar, ...]]:
    if profile in PROFILE_PARAMETER.choices:
        raise BadValueError(
            f"'--profile {profile}' says how much to do, and '{profile}' is no amount",
            next_step=f"a profiler is a parameter: -p {PROFILE_PARAMETER.name}={profile}",
        )
    if profile not in spec.profiles:
        raise UnknownNameError("profile", profile, spec.profiles)
    values: Dict[str, Tuple[Scalar, ...]] = {
        name: (parameter.default,) for name, parameter in spec.parameters.items()
    }
    values.update(spec.profiles[profile].values)
    values.update({spec.parameter(name).name: listed for name, listed in overrides.items()})
    return {name: tuple(dict.fromkeys(listed)) for name, listed in values.items()}


def _job(
    spec: ExperimentSpec,
    values: Mapping[str, Tuple[Scalar, ...]],
    profile: str,
    target: str,
    seed: int,
    run_id: str,
) -> Job:
    unasked = (PROFILE_PARAMETER.default,)
    names = [n for n in values if n != PROFILE_PARAMETER.name or values[n] != unasked]
    configurations = [
        dict(zip(names, choice)) for choice in itertools.product(*(values[name] for name in names))
    ]
    rows: List[RowPlan] = []
    # Repeats are the outer loop: configurations are interleaved, so that drift (heat, other load)
    # spreads over all of them instead of falling on the last.
    for repeat in range(spec.profiles[profile].repeats):
        for configuration in configurations:
            rows.append(RowPlan(len(rows), repeat, seed + repeat, configuration))
    data_sets, synthetic = _data_sets(spec, values)
    return Job(
        format=JOB_FORMAT,
        run_id=run_id,
        experiment=spec.id,
        profile=profile,
        target=target,
        seed=seed,
        parameters={name: _one_or_list(spec.parameter(name), values[name]) for name in names},
        rows=tuple(rows),
        data_sets=data_sets,
        synthetic=synthetic,
        spec=spec.source,
    )


def _one_or_list(parameter: Parameter, listed: Tuple[Scalar, ...]) -> Any:
    return listed[0] if parameter.axis == "run" or len(listed) == 1 else list(listed)


def _plans(
    spec: ExperimentSpec, values: Mapping[str, Tuple[Scalar, ...]], given: Mapping[str, Any]
) -> Optional[Dict[str, Any]]:
    """The documents of every placement plan that a row has; None where none has one."""
    found: Dict[str, Any] = {}
    for name in values:
        parameter = spec.parameter(name)
        wanted = [str(each) for each in values[name] if each != NO_PLAN]
        for value in wanted if parameter.type == "plan" else ():
            document = given.get(value, BUILTIN.get(value))
            if document is None:
                raise BadValueError(
                    f"parameter '{name}' asks for the placement plan '{value}', which is not here",
                    why="that is what a run calls a plan that it read from a file",
                    next_step=parameter.declaration(),
                )
            found[value] = document
    return found or None


def _data_sets(
    spec: ExperimentSpec, values: Mapping[str, Tuple[Scalar, ...]]
) -> Tuple[Tuple[str, ...], bool]:
    names = list(spec.data_sets)
    synthetic = False
    if spec.data_parameter is not None:
        chosen = [str(value) for value in values[spec.data_parameter]]
        synthetic = SYNTHETIC in chosen
        names += [name for name in chosen if name not in (SYNTHETIC, OWN_FILE)]
    names += sets_where(spec.data_where, values)
    return tuple(dict.fromkeys(names)), synthetic
