"""Complete lines of a file, and where lines and records of CSV end. Lines are never touched one by one in Python."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass

Offsets: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class CsvForm:
    """How records of CSV are told apart.

    Attributes:
        delimiter: the byte between fields.
        quote: the byte around fields in which delimiters and line ends are text; None: there are no such fields.
        has_header: whether the first record of a file names its columns.
    """

    delimiter: int
    quote: int | None
    has_header: bool


@dataclass(frozen=True, slots=True)
class RawLines:
    """Complete lines as they stand in a file: ``data`` ends with the last of the line feeds at ``ends``.

    ``base``: the byte of the file at which they begin.
    """

    data: bytes | memoryview
    ends: Offsets
    base: int

    def starts(self) -> Offsets:
        """Return at which byte of the file each line begins."""
        starts = np.empty(len(self.ends), np.int64)
        starts[0] = self.base
        starts[1:] = self.ends[:-1] + (self.base + 1)
        return starts


class Lines:
    """Some complete lines: ``values`` (large_binary, without line ends), where each begins, and the first's number.

    ``inner``: line ends within records of CSV. ``header``: the first record of a file of CSV that has one. ``raw``: the
    lines as they stand in the file, which are split into ``values`` only when that is asked for.
    """

    def __init__(
        self,
        values: pa.LargeBinaryArray | None,
        starts: Offsets,
        first: int = 1,
        inner: Offsets | None = None,
        header: bytes = b"",
        raw: RawLines | None = None,
    ) -> None:
        assert (values is None) == (raw is not None), "lines are split, or as they stand in the file"
        assert values is None or len(values) == len(starts), "each line begins at one place"
        self._values, self.starts = values, starts
        self.first, self.inner, self.header, self.raw = first, inner, header, raw

    @property
    def values(self) -> pa.LargeBinaryArray:
        """The lines one by one."""
        if self._values is None:
            assert self.raw is not None
            self._values = _split(self.raw)
        return self._values

    def number_at(self, start: int) -> int:
        """Return the number, from 1 on, of the line that begins at byte ``start`` of the file."""
        inner = 0 if self.inner is None else int(np.searchsorted(self.inner, start))
        return self.first + int(np.searchsorted(self.starts, start)) + inner


OUTSIDE, QUOTED, CLOSED = 0, 1, 2
"""Where a byte of CSV may stand: outside of quotes, within them, and just after a quote that closes."""


def line_feeds(block: memoryview) -> Offsets:
    """Return where a block has line feeds. To look at eight bytes at a time takes a third of the time."""
    is_one = np.packbits(np.frombuffer(block, np.uint8) == 10, bitorder="little")
    places = np.flatnonzero(is_one != 0)
    bits = is_one.take(places)
    if (bits & (bits - 1)).any():  # lines of fewer than eight bytes
        return np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
    return (places << 3) + _PLACE_OF_BIT.take(bits)


_PLACE_OF_BIT = np.zeros(256, np.int64)
_PLACE_OF_BIT[1 << np.arange(8)] = np.arange(8)


def record_ends(
    block: bytes | memoryview, newlines: Offsets, form: CsvForm, previous: bytes, state: int
) -> tuple[Offsets, int]:
    """Return which of the ``newlines`` of a block end a record of CSV, and the state after the block.

    A quote opens at the start of a field, and is text elsewhere outside of quotes. Within quotes, two are text.

    Args:
        block: what follows ``previous``.
        newlines: where it has line feeds.
        form: the delimiter and the quote.
        previous: the last bytes of the record before the block; nothing at the start of a record.
        state: one of ``OUTSIDE``, ``QUOTED`` and ``CLOSED``, after ``previous``.
    """
    if form.quote is None or not block:
        return newlines, OUTSIDE if form.quote is None else state
    data = np.frombuffer(block, np.uint8)
    quotes = np.flatnonzero(data == form.quote)
    is_quoted = state == QUOTED
    if len(quotes):
        before = data[quotes - 1]
        is_escape = before == form.quote
        if quotes[0] == 0:
            before[0] = previous[-1] if previous else 10
            is_escape[0] = state == CLOSED
        may_open = (before == form.delimiter) | (before == 10)
        if previous + block[: quotes[0]] == BOM:
            may_open[0] = True
        opens = slice(int(is_quoted), None, 2)  # if all quotes but those within quotes stand at the start of fields
        if not (may_open[opens] | is_escape[opens]).all():
            quotes = quotes[_opening_or_closing(quotes, may_open, state)]
    ends = newlines[(np.searchsorted(quotes, newlines) + is_quoted) % 2 == 0]
    if (len(quotes) + is_quoted) % 2:
        return ends, QUOTED
    is_closed = len(quotes) > 0 and quotes[-1] == len(data) - 1
    return ends, CLOSED if is_closed else OUTSIDE


def is_blank(record: bytes) -> bool:
    """Whether a record of CSV before the header is nothing but a line end."""
    return not record.removeprefix(BOM).strip(b"\r\n")


def has_return(record: bytes, quote: int | None) -> bool:
    """Whether a record of CSV has a carriage return in it, outside of quotes."""
    parts = [record.rstrip(b"\r\n")] if quote is None else record.rstrip(b"\r\n").split(bytes([quote]))[::2]
    return any(b"\r" in part for part in parts)


def _opening_or_closing(quotes: Offsets, may_open: np.ndarray[Any, np.dtype[np.bool_]], state: int) -> list[int]:
    """Return which quotes are not text. One by one: only files that quote sloppily get here."""
    is_quoted, closed_at = state == QUOTED, -1 if state == CLOSED else -2
    found = []
    for index, (at, opens) in enumerate(zip(quotes.tolist(), may_open.tolist(), strict=True)):
        if is_quoted:
            is_quoted, closed_at = False, at
        elif opens or closed_at == at - 1:
            is_quoted = True
        else:
            continue
        found.append(index)
    return found


def _split(raw: RawLines) -> pa.LargeBinaryArray:
    """Return the lines without their line ends."""
    data, ends = bytes(raw.data), raw.ends
    removed = np.arange(1, len(ends) + 1, dtype=np.int64)
    if b"\r\n" in data:
        bytes_of = np.frombuffer(data, np.uint8)
        is_returned = (ends > raw.starts() - raw.base) & (bytes_of[ends - 1] == 13)
        removed += np.cumsum(is_returned)
        data = data.replace(b"\r\n", b"")  # what is left of "\r\r\n" is one "\r" of content
    data = data.replace(b"\n", b"")
    offsets = np.zeros(len(ends) + 1, np.int64)
    offsets[1:] = ends + 1 - removed
    if raw.base == 0 and data.startswith(BOM) and offsets[1] >= len(BOM):
        offsets[0] = len(BOM)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
