"""`claims.toml`: what a paper claims, as data that can be judged. The judging is the host's.

A claim's metric is a small closed language, never evaluated as code:
`value`, `ratio`, `geomean` and `order` over selections `name{parameter=value, …}`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from narrowgauge_contract.errors import ClaimsError, nearest
from narrowgauge_contract.parameters import Scalar
from narrowgauge_contract.spec import ExperimentSpec, load_toml
from narrowgauge_contract.templates import word

__all__ = [
    "Claim",
    "ClaimKind",
    "Expectation",
    "MetricOperator",
    "Selection",
    "Verdict",
    "load_claims",
    "parse_claims",
]


class ClaimKind(str, enum.Enum):
    """What shape of statement a claim is."""

    VALUE = "value"
    RATIO = "ratio"
    ORDERING = "ordering"
    TREND = "trend"
    BOUND = "bound"
    EQUIVALENCE = "equivalence"


class MetricOperator(str, enum.Enum):
    """How the selections of a claim become figures."""

    VALUE = "value"
    RATIO = "ratio"
    GEOMEAN = "geomean"
    ORDER = "order"


class Verdict(str, enum.Enum):
    """Never a bare pass. `reproduced-trend`: other hardware, the shape holds."""

    REPRODUCED = "REPRODUCED"
    REPRODUCED_TREND = "REPRODUCED-TREND"
    NOT_REPRODUCED = "NOT-REPRODUCED"
    UNSTABLE = "UNSTABLE"
    INVALID = "INVALID"
    NOT_APPLICABLE = "NOT-APPLICABLE"
    SKIPPED = "SKIPPED"


#: How many selections each operator takes (least, most).
_ARITY = {
    MetricOperator.VALUE: (1, 1),
    MetricOperator.RATIO: (2, 2),
    MetricOperator.GEOMEAN: (1, 64),
    MetricOperator.ORDER: (2, 64),
}
#: Shares of a row's comparisons, by their 95 % intervals. `alarm-rate`: those that do not hold 1,
#: on whichever side of it; `slower-rate`: those that lie above 1.
_RATES = ("alarm-rate", "slower-rate")
#: Fewer processes have no interval, and without one nothing tells that two figures are equal.
_LEAST_FOR_EQUIVALENCE = 6
_STATISTICS = ("median", "mean", "last", "last-mean", "min", "max", *_RATES)
#: The target of a run without an image.
_NATIVE = "native"
_SELECTION = re.compile(r"^(?P<name>[a-z][a-z0-9_.-]*)(?:\{(?P<where>[^{}]*)\})?$")
#: Of its `where`: what a comma ends, unless quotes are around it, as around a list of ratios.
_PART = re.compile(r"(?:[^,']|'[^']*'|')+")
_QUOTED = re.compile(r"^(?P<quote>'?)(?P<inner>[^']*)(?P=quote)$")


@dataclasses.dataclass(frozen=True)
class Selection:
    """A metric of the rows whose parameters equal `where`."""

    metric: str
    where: Dict[str, Scalar]

    def __str__(self) -> str:
        """As claims.toml has it: `latency{engine=eager, batch=1}`, `speedup{ratios='0.5,0.6'}`."""
        values = ((name, word(value)) for name, value in self.where.items())
        said = (f"{name}='{each}'" if "," in each else f"{name}={each}" for name, each in values)
        where = ", ".join(said)
        return f"{self.metric}{{{where}}}" if where else self.metric


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a target should give: bounds, or a figure with a relative `tolerance`."""

    figure: Optional[float] = None
    tolerance: Optional[float] = None
    minimum: Optional[float] = None
    maximum: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim. `expected` maps a target (or `any`) to its expectation.

    `device`: what the expectations are of, by a part of the name that a record has for it, of its
    accelerator (`NVIDIA H200`) or its board (`Jetson Xavier NX`); elsewhere the claim can be
    reproduced in trend only. Empty: whatever the target is. `minutes` and `disk_gb` are what
    checking it costs. `not_comparable`: why no measurement of this experiment can be held against
    it; it is listed, and its verdict is NOT-APPLICABLE. `by_hand`: what to run one after another,
    where what a run is given is found by another run, which no profile can hold.
    """

    id: str
    text: str
    paper: str
    kind: ClaimKind
    operator: MetricOperator
    selections: Tuple[Selection, ...]
    statistic: str
    expected: Dict[str, Expectation]
    minimum_repeats: int
    profile: str
    minutes: float
    disk_gb: float
    device: str = ""
    measured_on: str = ""
    not_comparable: str = ""
    by_hand: str = ""


def load_claims(path: Path, spec: ExperimentSpec) -> Tuple[Claim, ...]:
    """Read and check `claims.toml` against the experiment it belongs to. Raises ClaimsError."""
    return parse_claims(load_toml(path), spec, where=str(path))


def parse_claims(
    document: Mapping[str, Any], spec: ExperimentSpec, where: str = "claims.toml"
) -> Tuple[Claim, ...]:
    """Check a parsed claims.toml: closed keys, known parameters and values, arity, expectations."""
    _only(document, ("claim",), where)
    bodies = document.get("claim", [])
    if not isinstance(bodies, list):
        raise ClaimsError(f"{where}: [[claim]] should be a list of tables")
    claims = []
    seen = set()
    for number, body in enumerate(bodies, start=1):
        place = f"{where} claim {number}"
        claim = _parse_claim(body, spec, place)
        if claim.id in seen:
            raise ClaimsError(f"{place}: the id '{claim.id}' is used twice")
        seen.add(claim.id)
        claims.append(claim)
    return tuple(claims)


def _parse_claim(body: Mapping[str, Any], spec: ExperimentSpec, where: str) -> Claim:
    required = ("id", "text", "paper", "kind", "metric", "expected", "minutes", "disk_gb")
    optional = (
        "minimum_repeats", "profile", "device", "measured_on", "not_comparable", "by_hand",
    )  # fmt: skip
    _only(body, required + optional, where)
    for key in required:
        if key not in body:
            raise ClaimsError(f"{where} lacks '{key}'")
    texts = {key: _text(body, key, where) for key in ("id", "text", "paper")}
    metric = body["metric"]
    _only(metric, ("operator", "of", "statistic"), f"{where} metric")
    if not isinstance(metric.get("of"), list) or not all(isinstance(t, str) for t in metric["of"]):
        raise ClaimsError(f"{where}: metric 'of' should be a list of selections")
    operator = _member(MetricOperator, metric.get("operator"), f"{where} metric.operator")
    selections = tuple(_parse_selection(text, spec, where) for text in metric["of"])
    least, most = _ARITY[operator]
    if not least <= len(selections) <= most:
        raise ClaimsError(f"{where}: '{operator.value}' takes {least} to {most} selections")
    statistic = metric.get("statistic", "median")
    if statistic not in _STATISTICS:
        raise ClaimsError(f"{where}: statistic is one of {', '.join(_STATISTICS)}")
    profile = body.get("profile", "paper")
    if profile not in spec.profiles:
        raise ClaimsError(f"{where}: profile is one of {', '.join(spec.profiles)}")
    kind = _member(ClaimKind, body["kind"], f"{where} kind")
    repeats = _whole(body.get("minimum_repeats", 3), "minimum_repeats", where)
    _check_together(kind, operator, statistic, repeats, where)
    return Claim(
        id=texts["id"],
        text=texts["text"],
        paper=texts["paper"],
        kind=kind,
        operator=operator,
        selections=selections,
        statistic=statistic,
        expected=_parse_expected(body["expected"], kind, where),
        minimum_repeats=repeats,
        profile=profile,
        minutes=_number(body["minutes"], "minutes", where),
        disk_gb=_number(body["disk_gb"], "disk_gb", where),
        device=_text(body, "device", where) if "device" in body else "",
        measured_on=str(body.get("measured_on", "")),
        not_comparable=_text(body, "not_comparable", where) if "not_comparable" in body else "",
        by_hand=_text(body, "by_hand", where) if "by_hand" in body else "",
    )


def _check_together(
    kind: ClaimKind, operator: MetricOperator, statistic: str, repeats: int, where: str
) -> None:
    """What does not go together. Raises ClaimsError."""
    if (kind is ClaimKind.ORDERING) != (operator is MetricOperator.ORDER):
        raise ClaimsError(f"{where}: an ordering is of 'order', and nothing else is")
    if statistic in _RATES and operator is not MetricOperator.VALUE:
        raise ClaimsError(f"{where}: '{statistic}' is a share of one selection: use 'value'")
    if kind is ClaimKind.EQUIVALENCE and repeats < _LEAST_FOR_EQUIVALENCE:
        raise ClaimsError(
            f"{where}: an equivalence needs minimum_repeats >= {_LEAST_FOR_EQUIVALENCE}",
            why="fewer processes have no interval, and nothing else tells that figures are equal",
        )


def _parse_selection(text: str, spec: ExperimentSpec, where: str) -> Selection:
    match = _SELECTION.match(text)
    if match is None:
        raise ClaimsError(f"{where}: '{text}' is not name{{parameter=value, …}}")
    chosen: Dict[str, Scalar] = {}
    parts = (part.strip() for part in _PART.findall(match.group("where") or ""))
    for part in filter(None, parts):
        name, equals, value = part.partition("=")
        if not equals:
            raise ClaimsError(f"{where}: '{part}' in '{text}' is not parameter=value")
        quoted = _QUOTED.match(value.strip())
        if quoted is None:
            raise ClaimsError(f"{where}: '{value}' in '{text}' has quotes that are not around it")
        chosen[name.strip()] = spec.parameter(name.strip()).parse(quoted.group("inner"))
    return Selection(match.group("name"), chosen)


def _parse_expected(
    tables: Mapping[str, Any], kind: ClaimKind, where: str
) -> Dict[str, Expectation]:
    if not isinstance(tables, Mapping):
        raise ClaimsError(f"{where}: 'expected' should be a table")
    if not tables:
        raise ClaimsError(f"{where}: 'expected' names no target; use 'any' for all")
    expected = {}
    for target, body in tables.items():
        place = f"{where} expected.{target}"
        if target == _NATIVE:
            raise ClaimsError(
                f"{place} is of no hardware",
                why=f"'{_NATIVE}' says that a run had no container, whatever it ran on",
                next_step="expected.any, and 'device' where the figures are one device's",
            )
        _only(body, ("figure", "tolerance", "minimum", "maximum"), place)
        numbers = {key: _number(value, key, place) for key, value in body.items()}
        expectation = Expectation(**numbers)
        _check_expectation(expectation, kind, place)
        expected[target] = expectation
    return expected


def _check_expectation(expectation: Expectation, kind: ClaimKind, place: str) -> None:
    """That the kind has what it is judged by, and that not every figure is allowed."""
    figure, tolerance = expectation.figure, expectation.tolerance
    least, most = expectation.minimum, expectation.maximum
    bounded = least is not None or most is not None
    if kind in (ClaimKind.VALUE, ClaimKind.RATIO) and (figure is None or tolerance is None):
        raise ClaimsError(f"{place}: a {kind.value} needs 'figure' and 'tolerance'")
    if kind is ClaimKind.BOUND and not bounded:
        raise ClaimsError(f"{place}: a bound needs 'minimum' or 'maximum'")
    if kind is ClaimKind.TREND and figure is None and not bounded:
        raise ClaimsError(f"{place}: a trend needs 'figure', 'minimum' or 'maximum'")
    if kind is ClaimKind.EQUIVALENCE and tolerance is None:
        raise ClaimsError(f"{place}: an equivalence needs 'tolerance'")
    if tolerance is not None and tolerance <= 0:
        raise ClaimsError(f"{place}: 'tolerance' should be more than 0, not {tolerance:g}")
    if tolerance is not None and bounded:
        raise ClaimsError(f"{place}: 'tolerance' does not go with 'minimum' and 'maximum'")
    if least is not None and most is not None and least > most:
        raise ClaimsError(f"{place}: the minimum {least:g} is more than the maximum {most:g}")


def _text(body: Mapping[str, Any], key: str, where: str) -> str:
    value = body[key]
    if not isinstance(value, str) or not value:
        raise ClaimsError(f"{where}: '{key}' should be text")
    return value


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ClaimsError(f"{where}: '{key}' should be a number, not {value!r}")
    if not math.isfinite(value):
        raise ClaimsError(f"{where}: '{key}' should be a finite number, not {value!r}")
    return float(value)


def _whole(value: Any, key: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClaimsError(f"{where}: '{key}' should be a whole number from 1, not {value!r}")
    return value


def _member(kind: Any, value: Any, where: str) -> Any:
    known = [member.value for member in kind]
    if value not in known:
        raise ClaimsError(f"{where} '{value}' is not one of {', '.join(known)}")
    return kind(value)


def _only(body: Any, known: Tuple[str, ...], where: str) -> None:
    if not isinstance(body, Mapping):
        raise ClaimsError(f"{where} should be a table")
    for key in body:
        if key not in known:
            close = nearest(key, known)
            raise ClaimsError(
                f"{where} has the unknown key '{key}'",
                next_step=f"did you mean '{close}'?" if close else f"known: {', '.join(known)}",
            )
