"""`[[draw]]`: the pictures that the host draws from a record, with no code of the experiment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Tuple

from narrowgauge_contract.errors import ExperimentFileError
from narrowgauge_contract.toml_checks import names_of, only, text_of

if TYPE_CHECKING:
    from narrowgauge_contract.spec import Parameter, Scalar

__all__ = [
    "Drawing",
    "Ladder",
    "named_parameter",
    "named_values",
    "parse_drawings",
    "values_of",
]

#: What each kind takes beside `name`, `kind` and `title`.
_KEYS: Dict[str, Tuple[str, ...]] = {
    "curve": ("metrics", "x", "y"),
    "bar": ("metrics", "x", "y"),
    "confusion": ("side_file", "x", "y"),
    "ladder": ("parameter", "metric", "order", "ends", "names"),
}


@dataclasses.dataclass(frozen=True)
class Ladder:
    """An attribution ladder: `order` holds values of `parameter` from slow to fast, a rung each.

    `ends` are two further values of it, (slow, fast): what the first and the last rung are,
    measured again as rows of their own. The ratio end to end comes from these alone, so that how
    much of it the rungs explain is a finding and not an identity. `names` says how values are
    called in the picture.
    """

    parameter: str
    metric: str
    order: Tuple[Scalar, ...]
    ends: Tuple[Scalar, Scalar]
    names: Dict[Scalar, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture.

    `curve` and `bar` draw `metrics` (over the metric's own index); `confusion` draws `side_file`,
    a JSON file with `labels` and `counts[true][predicted]`; `ladder` draws `ladder`.
    """

    name: str
    kind: str
    title: str
    metrics: Tuple[str, ...] = ()
    side_file: str = ""
    x: str = ""
    y: str = ""
    ladder: Optional[Ladder] = None


def parse_drawings(
    tables: Any, parameters: Mapping[str, Parameter], where: str
) -> Tuple[Drawing, ...]:
    """Check the list of `[[draw]]` tables. Raises ExperimentFileError, BadValueError."""
    if not isinstance(tables, list) or not all(isinstance(body, dict) for body in tables):
        raise ExperimentFileError(f"{where} should be a list of tables")
    return tuple(_parse_drawing(body, parameters, where) for body in tables)


def _parse_drawing(
    body: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str
) -> Drawing:
    every = ("name", "kind", "title")
    known = tuple(dict.fromkeys(key for keys in _KEYS.values() for key in keys))
    only(body, every + known, where)
    name, kind, title = (text_of(body, key, where) for key in every)
    if kind not in _KEYS:
        raise ExperimentFileError(f"{where}: kind is one of {', '.join(_KEYS)}")
    only(body, every + _KEYS[kind], f"{where} '{name}' of kind {kind}")
    return Drawing(
        name,
        kind,
        title,
        metrics=names_of(body, "metrics", where),
        side_file=body.get("side_file", ""),
        x=body.get("x", ""),
        y=body.get("y", ""),
        ladder=_parse_ladder(body, parameters, f"{where} '{name}'") if kind == "ladder" else None,
    )


def _parse_ladder(
    body: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str
) -> Ladder:
    parameter = named_parameter(body, parameters, where)
    order, ends = (values_of(body, key, parameter, where) for key in ("order", "ends"))
    if len(order) < 2 or len(set(order)) < len(order):
        raise ExperimentFileError(f"{where}: 'order' should be two or more different values")
    if len(set(ends)) != 2 or len(ends) != 2:
        raise ExperimentFileError(f"{where}: 'ends' should be two different values: slow, fast")
    shared = [str(value) for value in ends if value in order]
    if shared:
        raise ExperimentFileError(
            f"{where}: 'ends' and 'order' share {', '.join(shared)}",
            why="the rungs' product would then explain all of the ratio, whatever was measured",
            next_step="give the ends values of their own, measured as independent rows",
        )
    return Ladder(
        parameter=parameter.name,
        metric=text_of(body, "metric", where),
        order=order,
        ends=(ends[0], ends[1]),
        names=named_values(body, "names", parameter, where),
    )


def values_of(
    body: Mapping[str, Any], key: str, parameter: Parameter, where: str
) -> Tuple[Scalar, ...]:
    """A list of values that the parameter takes."""
    listed = body.get(key)
    if not isinstance(listed, list):
        raise ExperimentFileError(f"{where}: '{key}' should be a list of values")
    return tuple(parameter.check(value) for value in listed)


def named_parameter(
    body: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str
) -> Parameter:
    """The declared parameter that `parameter` names; one along rows, or there is nothing to see."""
    name = text_of(body, "parameter", where)
    if name not in parameters:
        raise ExperimentFileError(f"{where}: no parameter '{name}'")
    if parameters[name].axis != "row":
        raise ExperimentFileError(f"{where}: the parameter '{name}' makes runs, not rows")
    return parameters[name]


def named_values(
    body: Mapping[str, Any], key: str, parameter: Parameter, where: str
) -> Dict[Scalar, str]:
    """A table from the parameter's values, as a user types them, to what they are called."""
    listed = body.get(key, {})
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ExperimentFileError(f"{where}: '{key}' should be a table from values to names")
    return {parameter.parse(value): name for value, name in listed.items()}
