"""A placement plan as the TOML that a user would write; Python reads TOML but does not write it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from narrowgauge_contract.placement import PASSES, LayerPlacement, PassPlacement, PlacementPlan

__all__ = ["plan_toml"]

_WORDS = ("device", "precision", "backend")


def plan_toml(plan: PlacementPlan) -> str:
    """The text of a file that `placement.parse_plan` reads as this very plan."""
    head = {"name": plan.name, "elsewhere": plan.elsewhere}
    if plan.elsewhere_by != "torch":
        head["elsewhere_by"] = plan.elsewhere_by
    flags = {"convolutions_only": plan.convolutions_only, "stride_bug": plan.stride_bug}
    sections = [_section("plan", {**head, **{key: True for key, on in flags.items() if on}})]
    sections += _placement("passes", plan.default)
    moved = plan.transfers
    sections.append(
        _section(
            "transfer",
            {
                "policy": moved.policy,
                "resident": moved.resident,
                "weights": moved.weights,
                "pieces": moved.pieces,
            },
        )
    )
    sections.append(_section("transfer.wire", moved.wire))
    for pattern, placement in plan.layers:
        sections += _placement(f"layers.{_quoted(pattern)}", placement)
    return "\n".join(sections)


def _placement(header: str, placement: LayerPlacement) -> Iterator[str]:
    """What its passes share, then for each pass what it has of its own."""
    passes = {name: placement.of(name) for name in PASSES}
    same = [word for word in _WORDS if len({getattr(each, word) for each in passes.values()}) == 1]
    yield _section(header, _words(placement.forward, same))
    own = [word for word in _WORDS if word not in same]
    for name, placed in passes.items() if own else ():
        yield _section(f"{header}.{name}", _words(placed, own))


def _words(placed: PassPlacement, words: list[str]) -> dict[str, str]:
    return {word: getattr(placed, word) for word in words}


def _section(header: str, body: Mapping[str, Any]) -> str:
    lines = [f"{key} = {_value(value)}" for key, value in body.items()]
    return "\n".join([f"[{header}]", *lines, ""])


def _value(value: str | bool | int) -> str:
    if isinstance(value, str):
        return _quoted(value)
    return str(value).lower()


def _quoted(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but that TOML does not take DEL as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
