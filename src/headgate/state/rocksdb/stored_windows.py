"""Rows of windows in a database: ``key group | table | window | suffix``, the whole row as the value (RB12).

Counterpart: ``windows``, which says what the suffix is, and has in memory what is not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import Section
from headgate.state.files import LocalDamage
from headgate.state.key_hash import Words
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.layout import PREFIX_BYTES, TIME_BYTES, decode_groups, decode_times, encode_times
from headgate.state.rocksdb.tables import record_table
from headgate.state.slot_array import Mask
from headgate.state.window_rows import split_by_window

SUFFIX_AT = PREFIX_BYTES + TIME_BYTES
"""Where the suffix of a row begins."""


class StoredWindows:
    """The rows that are in the database, by window."""

    def __init__(self, database: Database, section: Section, max_parallelism: int) -> None:
        self.table = record_table(section)
        self._database = database
        self._max_parallelism = max_parallelism
        self._counts: dict[int, int] = {}
        self._groups: dict[int, Mask] = {}
        """The key groups that have rows of a window, perhaps."""

    @property
    def windows(self) -> Sequence[int]:
        """The numbers of the windows that have rows here."""
        return list(self._counts)

    def has(self, window: int) -> bool:
        """Return whether ``window`` has rows here."""
        return window in self._counts

    @property
    def count(self) -> int:
        """How many rows there are in all, as they were counted on their way."""
        return sum(self._counts.values())

    def go_on_with(self) -> bytes:
        """The database has rows now: find out of which windows. Returns the last suffix in the order of bytes.

        Raises:
            LocalDamage, StorageError
        """
        last = b""
        for rows, _ in self._database.scan(b"", None):
            groups = decode_groups(rows)
            for window, places in split_by_window(decode_times(rows, PREFIX_BYTES)):
                self._note(window, groups[places], len(places))
            last = max(last, *(row[SUFFIX_AT:] for row in rows))
        return last

    def keys(self, window: int, groups: Words, suffixes: Sequence[bytes]) -> list[bytes]:
        """Return where rows of ``window`` are: their key groups, and what tells rows of a key group apart."""
        number = self.table.number.to_bytes(2, "big") + encode_times(np.array([window]))[0]
        return [int(group).to_bytes(2, "big") + number + suffix for group, suffix in zip(groups, suffixes, strict=True)]

    def get(self, keys: Sequence[bytes]) -> pa.RecordBatch:
        """Return those of these rows that there are."""
        return self._batch([value for value in self._database.get(keys) if value is not None])

    def put(self, window: int, groups: Words, keys: Sequence[bytes], rows: pa.RecordBatch, new: int) -> None:
        """Set rows of a window. ``new``: so many of them are not there yet."""
        changes = Changes()
        changes.put(keys, self.table.codec.encode(self.table.stored(rows)))
        self._database.write(changes)
        self._note(window, groups, new)

    def _note(self, window: int, groups: Words, new: int) -> None:
        self._counts[window] = self._counts.get(window, 0) + new
        self._groups.setdefault(window, np.zeros(self._max_parallelism, np.bool_))[groups] = True

    def count_of(self, window: int) -> int:
        """Return how many rows of ``window`` there are."""
        return self._counts.get(window, 0)

    def take(self, window: int, *, is_by_suffix: bool = False) -> pa.RecordBatch:
        """Remove the rows of a window; return them, by key group, or by suffix over all key groups.

        Raises:
            LocalDamage: some are missing.
        """
        (found,) = self.parts(window, self.count_of(window), is_by_suffix=is_by_suffix)
        return found

    def parts(self, window: int, rows_max: int, *, is_by_suffix: bool = False) -> Iterator[pa.RecordBatch]:
        """Remove the rows of a window; yield them, those of some key groups at a time, about ``rows_max``.

        Raises:
            LocalDamage: some are missing.
        """
        count = left = self._counts.pop(window)
        rows: list[bytes] = []
        values: list[bytes] = []
        for group in np.flatnonzero(self._groups.pop(window)):
            start, end = (self.keys(one, np.array([group]), [b""])[0] for one in (window, window + 1))
            found, bytes_of = self._database.some(start, max(left, 0) + 1, end)
            left -= len(found)
            rows += found
            values += bytes_of
            if left > 0 and len(rows) >= rows_max:
                yield self._removed(rows, values, is_by_suffix)
                rows, values = [], []
        if left:
            raise LocalDamage(str(self._database.path), 0, f"{count} rows of a window", f"{count - left} rows")
        yield self._removed(rows, values, is_by_suffix)

    def _removed(self, rows: list[bytes], values: list[bytes], is_by_suffix: bool) -> pa.RecordBatch:
        changes = Changes()
        changes.delete(rows)
        self._database.write(changes)
        if is_by_suffix:
            values = [values[at] for at in sorted(range(len(rows)), key=lambda at: rows[at][SUFFIX_AT:])]
        return self._batch(values)

    def _batch(self, values: Sequence[bytes]) -> pa.RecordBatch:
        return self.table.batch([], values, 0)
