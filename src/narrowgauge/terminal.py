"""Texts for a terminal. Records, bundles and findings hold what anybody wrote: nothing in them may
steer the terminal that shows it. Whole screens: `screen`."""

from __future__ import annotations

__all__ = ["plain"]


def plain(text: str) -> str:
    """The text with what is not printable (escapes, line breaks, turned text) shown by its code."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
