"""Decoders of lines: records, and the lines that are none.

Counterparts: ``line_file``, where lines come from; ``line_source``, which makes bad records of refused lines. Source:
rules N9–N12 of docs/spec/connectors.md. Columnar: a block is parsed at once; only when that fails is it halved until
the lines at fault are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.connectors.files.line_file import Lines

Starts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


class Decoder(Protocol):
    """Makes records of lines."""

    schema: pa.Schema

    def decode(self, lines: Lines) -> Decoded:
        """Return the records and the refused lines."""


@dataclass(slots=True)
class Refused:
    """Lines that are not records: what is wrong, where they begin, and their text."""

    problems: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, problem: str, starts: Starts, values: pa.Array) -> None:
        """Refuse all of ``values`` for the same reason."""
        self.problems += [problem] * len(values)
        self.starts += starts.tolist()
        self.texts += [_text(value) for value in values.to_pylist()]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Records in the decoder's schema, the byte each began at, and the lines that are none."""

    batch: pa.RecordBatch
    starts: Starts
    refused: Refused


class TextDecoder:
    """Each line is a record with one column."""

    def __init__(self, column: str) -> None:
        self.schema = pa.schema([pa.field(column, pa.large_string())])

    def decode(self, lines: Lines) -> Decoded:
        """Return the valid lines."""
        refused = Refused()
        values, starts = valid_text(lines, refused)
        return Decoded(pa.RecordBatch.from_arrays([values], schema=self.schema), starts, refused)


def valid_text(lines: Lines, refused: Refused) -> tuple[pa.LargeStringArray, Starts]:
    """Return the lines that are valid UTF-8, and where they begin."""
    good = np.ones(len(lines.values), np.bool_)
    parts: list[pa.LargeStringArray] = []

    def convert(low: int, high: int) -> str | None:
        try:
            parts.append(lines.values.slice(low, high - low).cast(pa.large_string()))
        except pa.ArrowInvalid:
            return "invalid UTF-8"
        return None

    isolate(len(lines.values), convert, lines.values, lines.starts, refused, good)
    if len(parts) == 1 and good.all():
        return parts[0], lines.starts
    return pa.concat_arrays(parts or [pa.array([], pa.large_string())]), lines.starts[good]


def isolate(
    count: int,
    attempt: Callable[[int, int], str | None],
    values: pa.Array,
    starts: Starts,
    refused: Refused,
    good: np.ndarray[Any, np.dtype[np.bool_]],
) -> None:
    """Call ``attempt(low, high)``, halving what it refuses down to single items, in order (N11)."""
    ranges = [(0, count)] if count else []
    while ranges:
        low, high = ranges.pop()
        problem = attempt(low, high)
        if problem is None:
            continue
        if high - low == 1:
            good[low] = False
            refused.add(problem, starts[low:high], values.slice(low, 1))
        else:
            middle = (low + high) // 2
            ranges += [(middle, high), (low, middle)]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")
