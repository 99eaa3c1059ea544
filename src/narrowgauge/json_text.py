"""JSON to Python values, three times as fast as the standard library, and to the same values.

A report of a thousand runs reads a third of a gigabyte of it, which is most of its time.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["members_of", "parse_json"]


def parse_json(raw: bytes) -> Any:
    """What `json.loads` gives. Raises what that raises: ValueError, RecursionError.

    msgspec keeps integers of any size and every float's last bit. What it refuses and `json` may
    not (NaN, a lone surrogate, 1e999, another encoding) is asked of `json`.
    """
    import msgspec

    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return json.loads(raw)


def members_of(raw: bytes) -> dict[str, bytes]:
    """The members of a JSON object, each as its text, unparsed. Raises ValueError for anything
    else, and for what msgspec refuses."""
    import msgspec

    return {
        name: bytes(text)
        for name, text in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items()
    }
