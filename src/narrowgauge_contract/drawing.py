"""`[[draw]]`: the pictures that the host draws from a record, with no code of the experiment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Tuple

from narrowgauge_contract.errors import ExperimentFileError
from narrowgauge_contract.ticks import Ticks, parse_ticks
from narrowgauge_contract.toml_checks import names_of, only, text_of

if TYPE_CHECKING:
    from narrowgauge_contract.parameters import Parameter, Scalar

__all__ = [
    "Among",
    "Beside",
    "Drawing",
    "Ladder",
    "Stack",
    "named_parameter",
    "named_values",
    "parse_drawings",
    "values_of",
    "where_of",
]

#: What each kind takes beside `name`, `kind` and `title`.
_KEYS: Dict[str, Tuple[str, ...]] = {
    "curve": ("metrics", "x", "y", "ticks", "parameter", "values"),
    "bar": ("metrics", "x", "y"),
    "confusion": ("side_file", "x", "y"),
    "heat": ("side_file", "x", "y"),
    "maps": ("side_file",),
    "ladder": ("parameter", "metric", "order", "ends", "names"),
    "anytime": (),
    "stacked": ("parameter", "metrics", "names", "beside", "x"),
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
class Beside:
    """Figures from elsewhere that stand beside stacked bars: `name` says from where. `values`: per
    value of the stack's parameter, metric -> figure, in the metrics' own unit. `where`: parameters
    that a bar must have for these to stand beside it, as the batch that was published."""

    name: str
    values: Dict[Scalar, Dict[str, float]]
    where: Dict[str, Scalar] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Stacked bars: the drawing's metrics, which are parts of a whole, one after the other.

    `names` says how metrics are called in the picture; `beside` is what others published, by values
    of `parameter`.
    """

    parameter: str
    names: Dict[str, str] = dataclasses.field(default_factory=dict)
    beside: Tuple[Beside, ...] = ()

    def name_of(self, metric: str) -> str:
        return self.names.get(metric, metric.replace("_", " "))


@dataclasses.dataclass(frozen=True)
class Among:
    """Which rows a picture shows: those in which `parameter` has one of `values`."""

    parameter: str
    values: Tuple[Scalar, ...]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture.

    `curve` and `bar` draw `metrics` (over the metric's own index), a curve those `among` the rows
    where it is given, with the index's places called as `ticks` says; `confusion` draws
    `side_file`, a JSON file with `labels` and `counts[true][predicted]`; `heat` too, one with
    `values`, a list of rows, the names `rows` and `columns`, and `label`, what values are; `maps`
    draws one with `images`, a line of `maps` from 0 to 1 for each, and their names `rows` and
    `columns`; `ladder` draws `ladder`; `stacked` draws `metrics` as `stack` says; `anytime` draws
    what the exits of a network, or the rungs of a ladder, answered, from the rows' logits.npz.
    """

    name: str
    kind: str
    title: str
    metrics: Tuple[str, ...] = ()
    side_file: str = ""
    x: str = ""
    y: str = ""
    ladder: Optional[Ladder] = None
    stack: Optional[Stack] = None
    among: Optional[Among] = None
    ticks: Optional[Ticks] = None

    def shows(self, parameters: Mapping[str, Scalar]) -> bool:
        """Whether rows of these parameters are in the picture."""
        among = self.among
        return among is None or parameters.get(among.parameter) in among.values


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
        stack=_parse_stack(body, parameters, f"{where} '{name}'") if kind == "stacked" else None,
        among=_parse_among(body, parameters, f"{where} '{name}'") if kind == "curve" else None,
        ticks=parse_ticks(body, parameters, f"{where} '{name}'"),
    )


def _parse_among(
    body: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str
) -> Optional[Among]:
    """Which rows, where not all of them."""
    if "parameter" not in body and "values" not in body:
        return None
    parameter = named_parameter(body, parameters, where)
    values = values_of(body, "values", parameter, where)
    if not values:
        raise ExperimentFileError(f"{where}: 'values' is empty, and nothing would be drawn")
    return Among(parameter.name, values)


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


def _parse_stack(body: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str) -> Stack:
    parameter = named_parameter(body, parameters, where)
    metrics = names_of(body, "metrics", where)
    if len(metrics) < 2 or len(set(metrics)) < len(metrics):
        raise ExperimentFileError(f"{where}: 'metrics' should be two or more different ones")
    names = body.get("names", {})
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ExperimentFileError(f"{where}: 'names' should be a table from metrics to names")
    only(names, metrics, f"{where} names")
    tables = body.get("beside", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ExperimentFileError(f"{where}: 'beside' should be a list of tables")
    # Bars have what rows have; what makes runs is not among it.
    of_rows = {name: each for name, each in parameters.items() if each.axis == "row"}
    beside = tuple(
        _parse_beside(table, parameter, of_rows, metrics, f"{where} beside") for table in tables
    )
    return Stack(parameter.name, dict(names), beside)


def _parse_beside(
    body: Mapping[str, Any],
    parameter: Parameter,
    parameters: Mapping[str, Parameter],
    metrics: Tuple[str, ...],
    where: str,
) -> Beside:
    """`metrics` lists what the figures of a row in `values` are of, in their order; figures of a
    metric that is listed twice add up. `scale` brings them to the metrics' unit."""
    only(body, ("name", "metrics", "scale", "values", "where"), where)
    columns, scale, rows = (
        names_of(body, "metrics", where),
        body.get("scale", 1),
        body.get("values"),
    )
    unknown = [name for name in columns if name not in metrics]
    if unknown or not columns:
        raise ExperimentFileError(f"{where}: {', '.join(unknown) or 'nothing'} is stacked here")
    if not _is_number(scale) or not isinstance(rows, dict):
        raise ExperimentFileError(f"{where}: 'scale' is a number, and 'values' a table of lists")
    values: Dict[Scalar, Dict[str, float]] = {}
    for word, figures in rows.items():
        fits = isinstance(figures, list) and len(figures) == len(columns)
        if not fits or not all(_is_number(each) and each >= 0 for each in figures):
            raise ExperimentFileError(
                f"{where}: '{word}' should have {len(columns)} figures, one per metric listed"
            )
        summed = values.setdefault(parameter.parse(word), {})
        for column, each in zip(columns, figures):
            summed[column] = summed.get(column, 0.0) + each * scale
    return Beside(text_of(body, "name", where), values, where_of(body, parameters, where))


def where_of(
    body: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str
) -> Dict[str, Scalar]:
    """`where`: the values that some of these parameters must have; none where nothing is said."""
    asked = body.get("where", {})
    if not isinstance(asked, dict):
        raise ExperimentFileError(f"{where}: 'where' should be a table from parameters to values")
    only(asked, tuple(parameters), f"{where} where")
    return {name: parameters[name].check(value) for name, value in asked.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
