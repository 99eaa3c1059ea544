"""The console that commands print on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from narrowgauge.terminal import plain

__all__ = ["Screen"]


class Screen(Console):
    """A console that nothing it prints can steer: strings are no markup, and what is not printable
    is shown by its code, line breaks excepted. What rich itself does with the terminal stays."""

    def __init__(
        self,
        *,
        file: IO[str] | None = None,
        width: int | None = None,
        highlight: bool = True,
        force_terminal: bool | None = None,
    ) -> None:
        super().__init__(
            file=file, width=width, highlight=highlight, force_terminal=force_terminal, markup=False
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Also called for each cell of a table, which is cut where codes have made it too long."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable():
                yield segment
            else:
                shown = "\n".join(plain(part) for part in text.split("\n"))
                yield Segment(shown, segment.style)
