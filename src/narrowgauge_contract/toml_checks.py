"""What readers of a parsed experiment.toml ask of a table: known keys, texts, flags, names."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Tuple

from narrowgauge_contract.errors import ExperimentFileError, nearest

__all__ = ["flag_of", "names_of", "only", "table_of", "text_of"]


def table_of(
    document: Mapping[str, Any], key: str, where: str, required: bool = False
) -> Dict[str, Any]:
    """The table at `key`; empty where there is none and none is required."""
    if key not in document:
        if required:
            raise ExperimentFileError(f"{where} lacks the table [{key}]")
        return {}
    if not isinstance(document[key], dict):
        raise ExperimentFileError(f"{where}: [{key}] should be a table")
    return dict(document[key])


def text_of(body: Mapping[str, Any], key: str, where: str) -> str:
    """The text at `key`, which must be there and hold something."""
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise ExperimentFileError(f"{where} lacks the text '{key}'")
    return value


def flag_of(body: Mapping[str, Any], key: str, where: str) -> bool:
    """Whether `key` is on; off where it is not there."""
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise ExperimentFileError(f"{where}: '{key}' should be true or false, not {value!r}")
    return value


def names_of(body: Mapping[str, Any], key: str, where: str) -> Tuple[str, ...]:
    """A list of words; a lone word would otherwise become a list of its letters."""
    listed = body.get(key, [])
    if not isinstance(listed, (list, tuple)) or not all(isinstance(word, str) for word in listed):
        raise ExperimentFileError(f"{where}: '{key}' should be a list of names")
    return tuple(listed)


def only(body: Mapping[str, Any], known: Tuple[str, ...], where: str) -> None:
    """Refuse every key that is not `known`, naming the nearest one that is."""
    for key in body:
        if key not in known:
            close = nearest(key, known)
            raise ExperimentFileError(
                f"{where} has the unknown key '{key}'",
                next_step=(f"did you mean '{close}'? " if close else "")
                + "Known: "
                + ", ".join(sorted(known)),
            )
