"""Text on its way to a terminal: what records, names and errors say is shown, and never acts on the terminal (SE22).

What commands draw for people passes here, and what they say passes ``text.say``. Nothing that a user wrote is read as
markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from headgate.plain_text import printable


class Terminal(Console):
    """A console that shows every text as it is written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """See ``Console``; its width is that of what is shown."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See ``Console``."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)
