"""Numbers as people read them: no more figures than one can use, seconds in the unit that fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from narrowgauge_contract.figures import fitting

__all__ = ["Scale", "format_value", "number", "prefixed_scale_of", "scale_of"]

#: Prefixes that a reader of rates wants, largest first.
_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6))
_WITHOUT_PREFIX = ("", "1", "%", "s")


@dataclass(frozen=True)
class Scale:
    """The `unit` in which values are shown, of which a record's unit has `factor`."""

    factor: float
    unit: str

    @property
    def word(self) -> str:
        """The unit as it is written beside a number: of a plain one, whose unit is `1`, nothing."""
        return "" if self.unit == "1" else self.unit

    def number(self, value: float) -> str:
        return number(value * self.factor, self.unit)

    def text(self, value: float) -> str:
        """With the unit."""
        return " ".join(filter(None, (self.number(value), self.word)))


def scale_of(value: float, unit: str) -> Scale:
    """That in which `value` reads well; what stands beside it is to be shown in the same one."""
    return Scale(*fitting(value, unit))


def prefixed_scale_of(value: float, unit: str) -> Scale:
    """`380 TMAC/s`, `55.5 GB/s`, and what `scale_of` says: for readers; tables of figures keep the
    unit of the record."""
    for prefix, factor in _PREFIXES if unit not in _WITHOUT_PREFIX else ():
        if factor <= abs(value) < 1e3 * factor:
            return Scale(1 / factor, prefix + unit)
    return scale_of(value, unit)


def format_value(value: float, unit: str = "") -> str:
    """A number with its unit."""
    return scale_of(value, unit).text(value)


def number(value: float, unit: str = "") -> str:
    """No more figures than a reader can use; percentages line up at two decimals."""
    if not math.isfinite(value):
        return str(value)
    if unit == "%":
        return f"{value:.2f}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value + 0.0:,.0f}".replace(",", " ")
    return f"{value:.4g}"
