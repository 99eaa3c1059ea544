"""Rows that belong together, and how they are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge_contract.figures import figure
from narrowgauge_contract.outcome import Row

__all__ = ["Configuration", "configurations", "stated", "varying", "word"]


@dataclass(frozen=True)
class Configuration:
    """The rows that differ in repeat and seed only."""

    parameters: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def valid(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.validity.valid)

    def figures(self, metric: str) -> tuple[float, ...]:
        """One figure per valid row that has the metric, in the order of the rows."""
        found = (row.metric(metric) for row in self.valid)
        return tuple(figure(m).value for m in found if m is not None and m.values)

    def by_repeat(self, metric: str) -> dict[int, float]:
        """The same figures by repeat; empty where a repeat occurs twice, so that none is hidden."""
        found = {row.repeat: m for row in self.valid if (m := row.metric(metric)) and m.values}
        if len(found) < len(self.figures(metric)):
            return {}
        return {repeat: figure(samples).value for repeat, samples in found.items()}

    def label(self, names: Iterable[str]) -> str:
        """`precision=bf16, batch=64`, for the parameters in `names`."""
        return ", ".join(f"{name}={word(self.parameters[name])}" for name in names)


def configurations(rows: Iterable[Row]) -> tuple[Configuration, ...]:
    """Rows grouped by their parameters, in the order in which these first occur."""
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        key = tuple(sorted((name, repr(value)) for name, value in row.parameters.items()))
        groups.setdefault(key, []).append(row)
    return tuple(Configuration(group[0].parameters, tuple(group)) for group in groups.values())


def word(value: Any) -> str:
    """A parameter's value as a user types it: `true`, `fp32,bf16`."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(word, value)) if isinstance(value, list) else str(value)


def stated(value: Any) -> str:
    """The same within a sentence, where an empty text would leave a gap that nobody sees."""
    if isinstance(value, list):
        return ",".join(map(stated, value))
    return word(value) or "''"


def varying(found: Sequence[Configuration]) -> tuple[str, ...]:
    """The names of the parameters in which configurations differ."""
    names = dict.fromkeys(name for each in found for name in each.parameters)
    return tuple(n for n in names if len({repr(each.parameters.get(n)) for each in found}) > 1)
