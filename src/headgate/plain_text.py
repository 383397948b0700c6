"""Text that every boundary takes: sockets, files, columns and terminals.

Exceptions, names and paths may hold characters that cannot be encoded (a lone surrogate, as JSON and names of files
that are not UTF-8 bring them) or that act on a terminal. They become escapes, which people can read; texts are never
dropped and never end a run. What decides (names, splits) is encoded without loss or refused instead.
"""

from __future__ import annotations

import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Control characters but for tabs and line ends, marks that reorder text, and surrogates."""


def encodable(text: str) -> str:
    """Return ``text`` with its lone surrogates as escapes (``\\ud83d``), so that UTF-8 can hold it."""
    return text if text.isascii() else _SURROGATE.sub(_escape, text)


def printable(text: str) -> str:
    """Return ``text`` with all that cannot be encoded, or acts on a terminal, as escapes (``\\x1b``).

    Line ends and tabs stay. For what people read: messages, names and values in a table, what a log repeats.
    """
    return _UNPRINTABLE.sub(_escape, text)


def encodable_values(value: Any) -> Any:
    """Return plain data (dicts, lists, texts, numbers) with every text in it ``encodable``."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {encodable_values(key): encodable_values(one) for key, one in value.items()}
    return [encodable_values(one) for one in value] if isinstance(value, list | tuple) else value


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
