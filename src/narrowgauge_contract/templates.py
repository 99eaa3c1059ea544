"""Lines with fields in braces: `{value:.2f}`, `{facts.timed}`, `{metrics.latency*1000:.3g}`.

Fields are looked up; nothing is evaluated and no attribute is read.
"""

from __future__ import annotations

import math
import re
from string import Formatter
from typing import TYPE_CHECKING, Any, Iterable, List, Mapping, Sequence, Tuple

from narrowgauge_contract.errors import ExperimentFileError

if TYPE_CHECKING:
    from narrowgauge_contract.outcome import Row

__all__ = ["MISSING", "check_template", "fill", "mentions", "terms_of", "word"]

#: What stands where a figure is missing.
MISSING = "–"
#: With a precision comes a letter: `.2` alone is a format of floats, and whole numbers refuse it.
_FORMAT = re.compile(r",?(\.\d{1,2}[efgE%])?|,?d")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_NAMED = re.compile(r"(?P<table>[a-z]+)\.[a-z][a-z0-9_]*")


def check_template(
    template: Any, own: Sequence[str], tables: Sequence[str], parameters: Iterable[str], where: str
) -> None:
    """Refuse at parsing what could only fail, or read an attribute, when a run is over.

    `own`: fields beside the `parameters`; `tables`: those that take a name, `{facts.NAME}`.
    """
    if not isinstance(template, str):
        raise ExperimentFileError(f"{where} should be a text")
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ExperimentFileError(f"{where}: {error}") from error
    plain = (*own, *parameters)
    for _, field, form, conversion in parts:
        if field is None:
            continue
        terms = field.split("*")
        for term in terms:
            named = _NAMED.fullmatch(term)
            known = term in plain or (len(terms) > 1 and _NUMBER.fullmatch(term))
            if not known and (named is None or named.group("table") not in tables):
                options = ", ".join((*plain, *(f"{table}.NAME" for table in tables)))
                raise ExperimentFileError(
                    f"{where}: '{{{field}}}' is nothing that it knows",
                    next_step=f"Known: {options}",
                )
        if conversion or not _FORMAT.fullmatch(form or ""):
            raise ExperimentFileError(f"{where}: '{{{field}}}' has a format that is not like .2f")


def terms_of(template: str) -> Tuple[str, ...]:
    """Everything that the template's fields name."""
    fields = [field for _, field, _, _ in Formatter().parse(template) if field]
    return tuple(term for field in fields for term in field.split("*"))


def mentions(template: str, term: str) -> bool:
    return term in terms_of(template)


def fill(template: str, row: Row, own: Mapping[str, Any]) -> str:
    """The template with its fields looked up: in `own`, else among the row's facts, parameters."""
    parts: List[str] = []
    for text, field, form, _ in Formatter().parse(template):
        parts.append(text)
        if field is not None:
            values = [_lookup(term, row, own) for term in field.split("*")]
            parts.append(_formatted(values, form or ""))
    return "".join(parts)


def _lookup(term: str, row: Row, own: Mapping[str, Any]) -> Any:
    if term in own:
        return own[term]
    if _NUMBER.fullmatch(term):
        return float(term)
    head, _, fact = term.partition(".")
    return row.facts.get(fact, "?") if head == "facts" else row.parameters.get(term, "?")


def _formatted(values: Sequence[Any], form: str) -> str:
    if MISSING in values:
        return MISSING
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        return "*".join(map(word, values))  # a word has no format, and a missing fact no product
    product = values[0]
    for value in values[1:]:
        product *= value
    if form.endswith("d"):
        return format(round(product), form) if math.isfinite(product) else str(product)
    return format(product, form)


def word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
