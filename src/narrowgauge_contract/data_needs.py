"""`[data.where]`: data sets that are read only where parameters have certain values.

    [data.where.weights.trained]                  # where weights=trained
    sets = ["imagenet-20"]
    where.model.mobilenet_v2 = ["mobilenet_v2-imagenet"]     # and model=mobilenet_v2 as well

A list of names stands for a table of `sets` alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Dict, Iterator, Mapping, Sequence, Tuple

from narrowgauge_contract.errors import ExperimentFileError
from narrowgauge_contract.toml_checks import names_of, only, table_of

if TYPE_CHECKING:
    from narrowgauge_contract.parameters import Parameter, Scalar

__all__ = ["DataNeeds", "Where", "parse_where", "sets_where"]


@dataclasses.dataclass(frozen=True)
class DataNeeds:
    """`sets`, and further ones where a parameter has a value."""

    sets: Tuple[str, ...]
    where: Dict[str, Dict[str, DataNeeds]] = dataclasses.field(default_factory=dict)


#: By parameter and value.
Where = Dict[str, Dict[str, DataNeeds]]


def parse_where(table: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str) -> Where:
    """Check the table `where` of `table`; values are those of a choice. `where` also says where
    the table stands. Raises ExperimentFileError."""
    found: Where = {}
    for name in table_of(table, "where", where):
        if name not in parameters or parameters[name].type != "choice":
            raise ExperimentFileError(f"{where} where: '{name}' is no parameter of type choice")
        place = f"{where} where.{name}"
        values = table_of(table["where"], name, place)
        only(values, parameters[name].choices, place)
        found[name] = {each: _needs(values, each, parameters, place) for each in values}
    return found


def _needs(
    values: Mapping[str, Any], value: str, parameters: Mapping[str, Parameter], where: str
) -> DataNeeds:
    if not isinstance(values[value], Mapping):
        return DataNeeds(names_of(values, value, where))
    place = f"{where}.{value}"
    only(values[value], ("sets", "where"), place)
    return DataNeeds(
        names_of(values[value], "sets", place), parse_where(values[value], parameters, place)
    )


def sets_where(where: Where, values: Mapping[str, Sequence[Scalar]]) -> Iterator[str]:
    """The sets for these `values` of all parameters; some may come twice. A run has the rows of all
    combinations of its values."""
    for name, needs in where.items():
        for value in values[name]:
            need = needs.get(str(value))
            if need is not None:
                yield from need.sets
                yield from sets_where(need.where, values)
