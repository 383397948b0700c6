"""HTML for notebooks: what users name comes in as text and stays text (ND2).

Colours are those of the page around it, light or dark; nothing is loaded from anywhere and nothing is a script.
"""

from __future__ import annotations

import html
import re
import reprlib
from collections.abc import Iterable, Sequence

CELL_CHARACTERS_MAX = 60

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_CELL = "padding:1px 8px;text-align:{};white-space:nowrap"

_values = reprlib.Repr()
_values.maxlist = _values.maxdict = _values.maxtuple = 6
_values.maxstring = _values.maxother = CELL_CHARACTERS_MAX


def escaped(text: object) -> str:
    """Return ``text`` for HTML and SVG, in elements and in attributes; what XML cannot hold at all becomes U+FFFD."""
    return html.escape(_NOT_XML.sub("\ufffd", str(text)), quote=True)


def shortened(text: str, length: int = CELL_CHARACTERS_MAX) -> str:
    """Return ``text``, or its beginning."""
    return text if len(text) <= length else text[: length - 1] + "…"


def value_text(value: object) -> str:
    """Return a value of a record as text that fits a cell, however large the value is."""
    if value is None:
        return "null"
    return shortened(value if isinstance(value, str) else _values.repr(value))


def table(titles: Iterable[str], rows: Sequence[Iterable[str]], *, numbers_from: int | None = None) -> str:
    """Return a table of texts. Cells from ``numbers_from`` on stand at the right."""

    def line(tag: str, cells: Iterable[str]) -> str:
        sides = ("right" if numbers_from is not None and at >= numbers_from else "left" for at, _ in enumerate(cells))
        made = (
            f'<{tag} style="{_CELL.format(side)}">{escaped(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", tuple(row)) for row in rows)
    return f"<table><thead>{line('th', tuple(titles))}</thead><tbody>{body}</tbody></table>"
