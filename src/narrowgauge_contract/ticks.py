"""`ticks` of a curve's `[[draw]]`: what the places of its index are called.

ticks = { fact = "blocks" }           # a fact of the rows that is a list of names or numbers
ticks = { parameter = "ratios" }      # a parameter whose text is a list, with commas
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Mapping, Optional, Tuple

from narrowgauge_contract.errors import ExperimentFileError
from narrowgauge_contract.toml_checks import only, table_of, text_of

if TYPE_CHECKING:
    from narrowgauge_contract.outcome import Row
    from narrowgauge_contract.parameters import Parameter

__all__ = ["Ticks", "parse_ticks"]

_KEYS = ("fact", "parameter")


@dataclasses.dataclass(frozen=True)
class Ticks:
    """The fact or the parameter that holds the names; one of the two."""

    fact: str = ""
    parameter: str = ""

    def names_of(self, row: Row) -> Optional[Tuple[str, ...]]:
        """The names that the row has; None where it has no list of them."""
        found: Any = row.facts.get(self.fact)
        if self.parameter:
            text = row.parameters.get(self.parameter)
            found = [each.strip() for each in text.split(",")] if isinstance(text, str) else None
        if not isinstance(found, (list, tuple)) or not all(map(_is_name, found)):
            return None
        return tuple(each if isinstance(each, str) else f"{each:g}" for each in found)


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def parse_ticks(
    body: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str
) -> Optional[Ticks]:
    """Check the table `ticks` of a drawing, where it has one. Which facts rows will have nothing
    declares; a parameter must be there. Raises ExperimentFileError."""
    if "ticks" not in body:
        return None
    table, place = table_of(body, "ticks", where), f"{where} ticks"
    only(table, _KEYS, place)
    if len(table) != 1:
        raise ExperimentFileError(f"{place} should name one fact or one parameter")
    (key,) = table
    name = text_of(table, key, place)
    if key == "fact":
        return Ticks(fact=name)
    if name not in parameters:
        raise ExperimentFileError(f"{place}: no parameter '{name}'")
    if not parameters[name].commas:
        raise ExperimentFileError(
            f"{place}: the parameter '{name}' is no list",
            next_step='name one of type = "str" with commas = true, or a fact',
        )
    return Ticks(parameter=name)
