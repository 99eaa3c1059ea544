"""What an experiment's parameters take: said in its experiment.toml, checked before a launch."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Dict, Mapping, Optional, Tuple, Union

from narrowgauge_contract.errors import BadValueError, ExperimentFileError, nearest
from narrowgauge_contract.placement import BUILTIN, NO_PLAN, is_reference
from narrowgauge_contract.toml_checks import flag_of, names_of, only, text_of

__all__ = [
    "AXES",
    "PROFILE_PARAMETER",
    "Parameter",
    "Scalar",
    "check_aliases",
    "parse_parameter",
]

Scalar = Union[bool, int, float, str]

AXES = ("row", "run")
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
    `pattern`: the regular expression that a text matches as a whole, but for spaces beside its
    commas. It is checked
    before a launch; what else may be wrong with the text, such as a block that there is not, only
    the experiment knows.
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
    pattern: str = ""

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
        default = str(self.default) or "empty"
        return f"{name}: {kind}{unit}, default {default}, axis {self.axis}. {self.help}"

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
        if self.pattern and not re.fullmatch(self.pattern, re.sub(r"\s*,\s*", ",", value)):
            raise self._bad(value, "not written as it should be")
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


def parse_parameter(name: str, body: Any, where: str) -> Parameter:
    if not isinstance(body, dict):
        raise ExperimentFileError(f"{where} should be a table")
    known_keys = ("type", "default", "axis", "help", "choices", "min", "max", "unit", "aliases",
                  "recipe", "any_value", "commas", "pattern")  # fmt: skip
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
    pattern = _pattern(body, where)
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
        pattern=pattern,
    )
    return dataclasses.replace(parameter, default=parameter.check(body["default"]))


def _pattern(body: Mapping[str, Any], where: str) -> str:
    """The regular expression of a text; empty where none is declared."""
    if "pattern" not in body:
        return ""
    text = text_of(body, "pattern", where)
    if body["type"] != "str":
        raise ExperimentFileError(f"{where}: 'pattern' is of type = \"str\" only")
    try:
        re.compile(text)
    except re.error as error:
        raise ExperimentFileError(
            f"{where}: pattern '{text}' is no regular expression", why=str(error)
        ) from error
    return text


def check_aliases(parameters: Mapping[str, Parameter], where: str) -> None:
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
