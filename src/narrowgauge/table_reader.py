"""A strict reader of parsed TOML: every key is checked, and what nobody asked for is an error."""

from __future__ import annotations

import re
from typing import Any

from narrowgauge.errors import TargetsFileError
from narrowgauge_contract.errors import nearest

__all__ = ["TableReader", "as_table"]


class TableReader:
    """Takes keys out of one table, checked; what is left at the end is unknown.

    Every method raises TargetsFileError, naming `where` and the nearest known key.
    """

    def __init__(self, body: dict[str, Any], where: str) -> None:
        self.where = where
        self._body = body
        self._known: list[str] = []

    def has(self, key: str) -> bool:
        """Whether the key is there; it counts as known from then on."""
        self._known.append(key)
        return key in self._body

    def table(self, key: str) -> dict[str, Any]:
        return as_table(self._take(key), f"{self.where} {key}")

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str) or not value:
            raise self._wrong(key, "a text", value)
        return value

    def flag(self, key: str) -> bool:
        value = self._take(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def matching(self, key: str, pattern: re.Pattern[str]) -> str:
        value = self.text(key)
        if not pattern.match(value):
            raise self._wrong(key, f"like {pattern.pattern}", value)
        return value

    def optional(self, key: str, pattern: re.Pattern[str] | None = None) -> str | None:
        if key not in self._body:
            self._known.append(key)
            return None
        return self.matching(key, pattern) if pattern else self.text(key)

    def optional_count(self, key: str) -> int | None:
        if key not in self._body:
            self._known.append(key)
            return None
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a whole number above 0", value)
        return value

    def texts(self, key: str, pattern: re.Pattern[str] | None = None) -> tuple[str, ...]:
        value = self._take(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts", value)
        for item in value:
            if pattern and not pattern.match(item):
                raise self._wrong(key, f"a list of texts like {pattern.pattern}", item)
        return tuple(value)

    def member(self, key: str, known: list[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise self._unknown_word(key, value, known)
        return value

    def members(self, key: str, known: list[str] | tuple[str, ...]) -> tuple[str, ...]:
        words = self.texts(key)
        for word in words:
            if word not in known:
                raise self._unknown_word(key, word, known)
        if not words:
            raise self._wrong(key, f"some of {', '.join(known)}", [])
        return words

    def finish(self) -> None:
        """Refuse what nobody asked for."""
        for key in self._body:
            if key not in self._known:
                close = nearest(key, self._known)
                hint = f"did you mean '{close}'? " if close else ""
                raise TargetsFileError(
                    f"{self.where} has the unknown key '{key}'",
                    next_step=f"{hint}Known: {', '.join(sorted(self._known))}",
                )

    def _take(self, key: str) -> Any:
        self._known.append(key)
        if key not in self._body:
            close = nearest(key, self._body)
            hint = f"is '{close}' it, misspelt?" if close else ""
            raise TargetsFileError(f"{self.where} lacks '{key}'", next_step=hint)
        return self._body[key]

    def _wrong(self, key: str, wanted: str, value: object) -> TargetsFileError:
        return TargetsFileError(f"{self.where}: '{key}' should be {wanted}, not {value!r}")

    def _unknown_word(
        self, key: str, word: str, known: list[str] | tuple[str, ...]
    ) -> TargetsFileError:
        close = nearest(word, known)
        hint = f"did you mean '{close}'? " if close else ""
        return TargetsFileError(
            f"{self.where}: {key} '{word}' is not known",
            next_step=f"{hint}Known: {', '.join(known)}",
        )


def as_table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TargetsFileError(f"{where} should be a table")
    return value
