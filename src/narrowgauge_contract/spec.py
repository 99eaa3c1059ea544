"""What an experiment.toml says, parsed once and checked.

An experiment declares its parameters; a parameter varies along an axis. Along `row` a comma list
makes several rows of one run; along `run` it makes several runs.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from narrowgauge_contract.data_needs import Where, parse_where
from narrowgauge_contract.drawing import Drawing, parse_drawings
from narrowgauge_contract.errors import (
    BadValueError,
    ExperimentFileError,
    UnknownNameError,
    nearest,
)
from narrowgauge_contract.placement import BUILTIN, NO_PLAN, is_reference
from narrowgauge_contract.summary import Summary, parse_summary
from narrowgauge_contract.toml_checks import flag_of, names_of, only, table_of, text_of

__all__ = [
    "AXES",
    "PROFILES",
    "PROFILE_PARAMETER",
    "REPEATS",
    "ExperimentSpec",
    "Parameter",
    "Profile",
    "Scalar",
    "load_spec",
    "load_toml",
    "parse_spec",
]

Scalar = Union[bool, int, float, str]

AXES = ("row", "run")
PROFILES = ("smoke", "short", "paper")
#: How often each configuration is measured, as a fresh process each time, unless a profile says.
REPEATS = {"smoke": 1, "short": 3, "paper": 10}
_TABLES = ("experiment", "data", "requires", "parameters", "profiles", "draw", "summary")
_TYPES = ("int", "float", "bool", "str", "choice", "plan")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One declared parameter. `minimum` and `maximum` are inclusive.

    `aliases` are names that a command line may use as well; everything is stored under `name`.
    `recipe`: it says how a network is trained, and not what is claimed of it: rows of a claim may
    have another value than its profile, and then show it, but do not refute it.
    `any_value`: claims that leave it open are of every value that it has, each judged by itself: no
    profile can hold what is made from a run, as a solved plan, and what is said of a training holds
    whichever kernels it runs by, or whether its weights are kept.
    `commas`: a text may have commas of its own, so on a command line it is one value and no list.
    Of type `plan`, a value is the name of a built-in placement plan, `none`, or what
    `placement.plan_value` calls a file's, which was read before (`placement_files.read_plans`).
    """

    name: str
    type: str
    default: Scalar
    axis: str
    help: str
    choices: Tuple[str, ...] = ()
    minimum: Optional[float] = None
    maximum: Optional[float] = None
    unit: str = ""
    aliases: Tuple[str, ...] = ()
    recipe: bool = False
    any_value: bool = False
    commas: bool = False

    def declaration(self) -> str:
        """One line that tells a user what this parameter takes."""
        if self.type == "choice":
            kind = "one of " + ", ".join(self.choices)
        elif self.type == "plan":
            kind = f"a plan's TOML file, or one of {', '.join(self.choices)}"
        else:
            kind = "str, with its commas" if self.commas else self.type
            if self.minimum is not None:
                kind += f" >= {self.minimum:g}"
            if self.maximum is not None:
                kind += f" <= {self.maximum:g}"
        unit = f" {self.unit}" if self.unit else ""
        name = f"{self.name} (or {', '.join(self.aliases)})" if self.aliases else self.name
        return f"{name}: {kind}{unit}, default {self.default}, axis {self.axis}. {self.help}"

    def parse_list(self, text: str) -> Tuple[Scalar, ...]:
        """Turn a command line's `value[,value…]` into checked values; raises as `parse` does."""
        return tuple(self.parse(part) for part in ([text] if self.commas else text.split(",")))

    def parse(self, text: str) -> Scalar:
        """Turn one command-line word into a checked value; BadValueError shows the declaration."""
        text = text.strip()
        if self.type == "bool":
            words: Dict[str, bool] = {"true": True, "1": True, "false": False, "0": False}
            if text.lower() not in words:
                raise self._bad(text, "true or false")
            return words[text.lower()]
        if self.type in ("int", "float"):
            try:
                return self.check(int(text) if self.type == "int" else float(text))
            except ValueError:
                raise self._bad(text, f"not of type {self.type}") from None
        return self.check(text)

    def check(self, value: Any) -> Scalar:
        """Check a value that has a type already (from TOML); gives it, as float where declared."""
        kinds = {"int": int, "float": (int, float), "bool": bool}
        wrong_bool = isinstance(value, bool) and self.type != "bool"
        if wrong_bool or not isinstance(value, kinds.get(self.type, str)):  # type: ignore[arg-type]
            raise self._bad(value, f"not of type {self.type}")
        read = self.type == "plan" and is_reference(value)
        if self.choices and value not in self.choices and not read:
            close = nearest(value, self.choices)
            raise self._bad(value, f"did you mean '{close}'?" if close else "not a known value")
        if self.type in ("int", "float"):
            if value != value:
                raise self._bad(value, "not a number")
            if self.minimum is not None and value < self.minimum:
                raise self._bad(value, f"below {self.minimum:g}")
            if self.maximum is not None and value > self.maximum:
                raise self._bad(value, f"above {self.maximum:g}")
        return float(value) if self.type == "float" else value

    def _bad(self, value: Any, why: str) -> BadValueError:
        return BadValueError(
            f"parameter '{self.name}' does not take '{value}'",
            why=why,
            next_step=self.declaration(),
        )


#: What every experiment takes without declaring it. It is in a Job and its rows only where it is
#: given and is not its default, so that measurements without a profiler are what they always were.
PROFILE_PARAMETER = Parameter(
    name="profile",
    type="choice",
    default="none",
    axis="run",
    help="Watch the rows with a profiler; their timings then include it. Every experiment has it.",
    choices=("none", "cprofile", "torch", "nsys"),
)


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


def parse_spec(document: Mapping[str, Any], where: str = "experiment.toml") -> ExperimentSpec:
    """Check a parsed experiment.toml. Unknown keys are errors that name the nearest known key."""
    only(document, _TABLES, where)
    head = table_of(document, "experiment", where, required=True)
    only(head, ("id", "title", "summary", "headline"), f"{where} [experiment]")
    for key in ("id", "title", "summary"):
        text_of(head, key, f"{where} [experiment]")
    parameters = {
        name: _parse_parameter(name, body, f"{where} [parameters.{name}]")
        for name, body in table_of(document, "parameters", where).items()
    }
    _check_aliases(parameters, where)
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


def _parse_parameter(name: str, body: Any, where: str) -> Parameter:
    if not isinstance(body, dict):
        raise ExperimentFileError(f"{where} should be a table")
    known_keys = ("type", "default", "axis", "help", "choices", "min", "max", "unit", "aliases",
                  "recipe", "any_value", "commas")  # fmt: skip
    only(body, known_keys, where)
    for key in ("type", "help", "axis"):
        text_of(body, key, where)
    if "default" not in body:
        raise ExperimentFileError(f"{where} lacks 'default'")
    for key, known in (("type", _TYPES), ("axis", AXES)):
        if body[key] not in known:
            raise ExperimentFileError(
                f"{where}: {key} '{body[key]}' is not one of {', '.join(known)}"
            )
    if (body["type"] == "choice") != bool(body.get("choices")):
        raise ExperimentFileError(f"{where}: 'choices' and type = \"choice\" belong together")
    commas = flag_of(body, "commas", where)
    if commas and body["type"] != "str":
        raise ExperimentFileError(f"{where}: 'commas' is of type = \"str\" only")
    recipe, any_value = flag_of(body, "recipe", where), flag_of(body, "any_value", where)
    if recipe and any_value:
        raise ExperimentFileError(f"{where}: 'recipe' and 'any_value' exclude each other")
    parameter = Parameter(
        name=name,
        type=body["type"],
        default=body["default"],
        axis=body["axis"],
        help=body["help"],
        choices=(*BUILTIN, NO_PLAN) if body["type"] == "plan" else tuple(body.get("choices", ())),
        minimum=body.get("min"),
        maximum=body.get("max"),
        unit=body.get("unit", ""),
        aliases=names_of(body, "aliases", where),
        recipe=recipe,
        any_value=any_value,
        commas=commas,
    )
    return dataclasses.replace(parameter, default=parameter.check(body["default"]))


def _check_aliases(parameters: Mapping[str, Parameter], where: str) -> None:
    """One word means one parameter, and can stand left of the '=' on a command line."""
    reserved = PROFILE_PARAMETER.name
    if reserved in parameters:
        raise ExperimentFileError(
            f"{where} [parameters.{reserved}]: every experiment has '{reserved}' already",
            why=PROFILE_PARAMETER.declaration(),
            next_step="give the parameter another name",
        )
    owners = {name: name for name in (*parameters, reserved)}
    for name, parameter in parameters.items():
        for alias in parameter.aliases:
            place = f"{where} [parameters.{name}]: alias '{alias}'"
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", alias):
                raise ExperimentFileError(f"{place} is not a name: letters, digits, '_' and '-'")
            if alias in owners:
                raise ExperimentFileError(f"{place} already means '{owners[alias]}'")
            owners[alias] = name


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
