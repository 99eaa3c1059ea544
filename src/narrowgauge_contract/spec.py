"""What an experiment.toml says, parsed once and checked.

An experiment declares its parameters; a parameter varies along an axis. Along `row` a comma list
makes several rows of one run; along `run` it makes several runs.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from narrowgauge_contract.data_needs import Where, parse_where
from narrowgauge_contract.drawing import Drawing, parse_drawings
from narrowgauge_contract.errors import (
    ExperimentFileError,
    UnknownNameError,
)
from narrowgauge_contract.parameters import (
    PROFILE_PARAMETER,
    Parameter,
    Scalar,
    check_aliases,
    parse_parameter,
)
from narrowgauge_contract.summary import Summary, parse_summary
from narrowgauge_contract.toml_checks import names_of, only, table_of, text_of

__all__ = [
    "PROFILES",
    "REPEATS",
    "ExperimentSpec",
    "Profile",
    "headline_of",
    "load_spec",
    "load_toml",
    "parse_spec",
]

PROFILES = ("smoke", "short", "paper")
#: How often each configuration is measured, as a fresh process each time, unless a profile says.
REPEATS = {"smoke": 1, "short": 3, "paper": 10}
_TABLES = ("experiment", "data", "requires", "parameters", "profiles", "draw", "summary")


@dataclasses.dataclass(frozen=True)
class Profile:
    """How much of the experiment to do: parameter values, repeats, and what it costs."""

    name: str
    repeats: int
    values: Dict[str, Tuple[Scalar, ...]]
    minutes: Optional[float] = None
    disk_gb: Optional[float] = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class ExperimentSpec:
    """An experiment as declared. `source` is the parsed TOML, embedded in the Job as data.

    `data_where`: what is read besides `data_sets` where parameters have certain values.
    `closing`: the lines that the experiment has to say of a run, as `[summary]` declares them.
    `preload`: modules of torch that every row would import; the rows' parent does it once.
    """

    id: str
    title: str
    summary: str
    parameters: Dict[str, Parameter]
    profiles: Dict[str, Profile]
    data_sets: Tuple[str, ...]
    data_parameter: Optional[str]
    requires_torch: str
    requires_accelerator: bool
    headline: Tuple[str, ...]
    drawings: Tuple[Drawing, ...]
    closing: Optional[Summary]
    source: Dict[str, Any]
    preload: Tuple[str, ...] = ()
    data_where: Where = dataclasses.field(default_factory=dict)

    def parameter(self, name: str) -> Parameter:
        """The parameter of that name or alias, `profile` included. Raises UnknownNameError."""
        if name in self.parameters:
            return self.parameters[name]
        aliased = {alias: each for each in self.parameters.values() for alias in each.aliases}
        aliased[PROFILE_PARAMETER.name] = PROFILE_PARAMETER
        if name not in aliased:
            known = [*self.parameters, *aliased]
            raise UnknownNameError("parameter", name, known, where=f"of '{self.id}'")
        return aliased[name]


def load_toml(path: Path) -> Dict[str, Any]:
    """Read one TOML file; needs Python 3.11 or the package tomli."""
    if sys.version_info >= (3, 11):
        import tomllib as toml  # novermin
    else:
        try:
            import tomli as toml
        except ImportError as error:
            raise ExperimentFileError(
                f"cannot read {path}: this Python has no TOML reader",
                why=f"Python {sys.version_info[0]}.{sys.version_info[1]} and no package tomli",
                next_step="pip install tomli, or give the lab a resolved job: --job job.json",
            ) from error
    try:
        with open(path, "rb") as stream:
            return dict(toml.load(stream))
    except FileNotFoundError as error:
        raise ExperimentFileError(f"{path} does not exist") from error
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentFileError(f"{path} is not valid TOML", why=str(error)) from error


def load_spec(path: Path) -> ExperimentSpec:
    """Read and check `<id>/experiment.toml`; the folder's name must be the id."""
    spec = parse_spec(load_toml(path), where=str(path))
    if path.parent.name != spec.id:
        raise ExperimentFileError(
            f"{path}: id is '{spec.id}' but the folder is '{path.parent.name}'"
        )
    _check_commas(spec, path)
    return spec


def _check_commas(spec: ExperimentSpec, path: Path) -> None:
    """Of a file only: records of before were made where no text was a list."""
    for name, parameter in spec.parameters.items():
        values = [parameter.default]
        for profile in spec.profiles.values():
            values += profile.values.get(name, ())
        listed = [each for each in values if isinstance(each, str) and "," in each]
        if listed and not parameter.commas and parameter.type != "plan":
            raise ExperimentFileError(
                f"{path} [parameters.{name}]: '{listed[0]}' would be a list on a command line",
                next_step="set commas = true there: such a text is then always one value",
            )


def headline_of(declaration: Mapping[str, Any]) -> Tuple[str, ...]:
    """The metrics that the declaration in a job or record says first of a run, as far as they can
    be read: what an older launcher wrote, or a damaged one, is shown all the same. Never raises."""
    head = declaration.get("experiment")
    named = head.get("headline") if isinstance(head, Mapping) else None
    if not isinstance(named, (list, tuple)):
        return ()
    return tuple(name for name in named if isinstance(name, str))


def parse_spec(document: Mapping[str, Any], where: str = "experiment.toml") -> ExperimentSpec:
    """Check a parsed experiment.toml. Unknown keys are errors that name the nearest known key."""
    only(document, _TABLES, where)
    head = table_of(document, "experiment", where, required=True)
    only(head, ("id", "title", "summary", "headline"), f"{where} [experiment]")
    for key in ("id", "title", "summary"):
        text_of(head, key, f"{where} [experiment]")
    parameters = {
        name: parse_parameter(name, body, f"{where} [parameters.{name}]")
        for name, body in table_of(document, "parameters", where).items()
    }
    check_aliases(parameters, where)
    data = table_of(document, "data", where)
    only(data, ("sets", "parameter", "where"), f"{where} [data]")
    data_parameter = data.get("parameter")
    if data_parameter is not None and data_parameter not in parameters:
        raise ExperimentFileError(f"{where} [data]: no parameter '{data_parameter}'")
    requires = table_of(document, "requires", where)
    only(requires, ("torch", "accelerator", "preload"), f"{where} [requires]")
    return ExperimentSpec(
        id=head["id"],
        title=head["title"],
        summary=head["summary"],
        parameters=parameters,
        profiles=_parse_profiles(table_of(document, "profiles", where), parameters, where),
        data_sets=names_of(data, "sets", f"{where} [data]"),
        data_parameter=data_parameter,
        requires_torch=str(requires.get("torch", ">=1.8")),
        requires_accelerator=bool(requires.get("accelerator", False)),
        headline=names_of(head, "headline", f"{where} [experiment]"),
        drawings=parse_drawings(document.get("draw", []), parameters, f"{where} [[draw]]"),
        closing=_parse_closing(document, parameters, where),
        source=dict(document),
        preload=_preload(requires, f"{where} [requires]"),
        data_where=parse_where(data, parameters, f"{where} [data]"),
    )


def _preload(requires: Mapping[str, Any], where: str) -> Tuple[str, ...]:
    """Of torch only: the parent of the rows must not run what could touch a device."""
    names = names_of(requires, "preload", where)
    for name in names:
        if not name.startswith("torch."):
            raise ExperimentFileError(f"{where}: preload takes modules of torch, not '{name}'")
    return names


def _parse_closing(
    document: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str
) -> Optional[Summary]:
    if "summary" not in document:
        return None
    return parse_summary(table_of(document, "summary", where), parameters, f"{where} [summary]")


def _parse_profiles(
    tables: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str
) -> Dict[str, Profile]:
    profiles = {name: Profile(name, REPEATS[name], {}) for name in PROFILES}
    for name, body in tables.items():
        place = f"{where} [profiles.{name}]"
        if name not in PROFILES:
            raise ExperimentFileError(f"{place}: a profile is one of {', '.join(PROFILES)}")
        own = {"repeats", "minutes", "disk_gb", "note"}
        only(body, tuple(own) + tuple(parameters), place)
        values: Dict[str, Tuple[Scalar, ...]] = {}
        for key in body:
            if key not in own:
                listed: List[Any] = body[key] if isinstance(body[key], list) else [body[key]]
                values[key] = tuple(parameters[key].check(value) for value in listed)
        profiles[name] = Profile(
            name=name,
            repeats=_repeats(body.get("repeats", REPEATS[name]), place),
            values=values,
            minutes=body.get("minutes"),
            disk_gb=body.get("disk_gb"),
            note=body.get("note", ""),
        )
    return profiles


def _repeats(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ExperimentFileError(
            f"{where}: repeats should be a whole number from 1, not {value!r}"
        )
    return value
