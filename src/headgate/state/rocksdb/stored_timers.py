"""Timers of one kind in a database: ``key group | table | time | key``, with nothing as the value (RB11).

So within a key group they are in the order of their times, and those that come first are read without the others.
Counterpart: ``timers``, which has the next ones in memory; what is there is not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Words
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.layout import (
    PREFIX_BYTES,
    TIME_BYTES,
    decode_columns,
    decode_times,
    encode_times,
    encoded_keys,
)
from headgate.state.slot_array import Mask
from headgate.state.timers import TimeKind, timer_section

EVER_MS = 1 << 63
"""Later than any time."""

_NUMBERS = {TimeKind.EVENT_TIME: 0xFFFE, TimeKind.PROCESSING_TIME: 0xFFFF}
"""Of the tables: behind those of all states, however many an operator has."""

Timers: TypeAlias = tuple[list[pa.Array], Words]
"""Key columns and times."""


@dataclass(frozen=True)
class TimerTable:
    """The table of the timers of one kind. See ``tables.Table``; a timer never expires."""

    number: int
    section: Section
    types: tuple[pa.DataType, ...]
    ttl: None = None

    def batch(self, rows: Sequence[bytes], values: Sequence[bytes], now_ms: int) -> pa.RecordBatch:
        """Return rows of the database as rows of the section."""
        columns, times_ms = self.timers(rows)
        return pa.RecordBatch.from_arrays([*columns, pa.array(times_ms, pa.int64())], schema=self.section.schema)

    def timers(self, rows: Sequence[bytes]) -> Timers:
        """Return the timers that rows of the database are."""
        return decode_columns(rows, self.types, PREFIX_BYTES + TIME_BYTES)[0], decode_times(rows, PREFIX_BYTES)

    def start(self, group: int, time_ms: int) -> bytes:
        """Return where the timers of a key group begin that are for ``time_ms`` or later."""
        prefix = group.to_bytes(2, "big") + self.number.to_bytes(2, "big")
        return prefix + encode_times(np.array([time_ms]))[0]

    def end(self, group: int) -> bytes:
        """Return where the timers of a key group end."""
        return ((group << 16) + self.number + 1).to_bytes(PREFIX_BYTES, "big")


class StoredTimers:
    """The timers of one kind that are in the database.

    Attributes:
        count: how many there are.
    """

    def __init__(self, database: Database, kind: TimeKind, keys: KeyColumns, max_parallelism: int) -> None:
        self.table = TimerTable(_NUMBERS[kind], timer_section(keys, kind), keys.types)
        self.count = 0
        self._database = database
        self._keys = keys
        self._max_parallelism = max_parallelism
        self._has = np.zeros(max_parallelism, np.bool_)
        """Which key groups have timers, perhaps."""
        self._from_ms = np.zeros(max_parallelism, np.int64)
        """A time before which such a group has none: what was removed there is not looked at again."""

    def add(self, columns: Sequence[pa.Array], times_ms: Words) -> None:
        """Add timers, all different, that are not here."""
        self._write(columns, times_ms, np.ones(len(times_ms), np.bool_), np.zeros(len(times_ms), np.bool_))

    def change(self, columns: Sequence[pa.Array], times_ms: Words, is_wanted: Mask) -> None:
        """Add timers, all different, or remove them; nothing happens where that is so already."""
        if len(times_ms):
            self._write(columns, times_ms, is_wanted, None)

    def _write(self, columns: Sequence[pa.Array], times_ms: Words, is_wanted: Mask, has: Mask | None) -> None:
        keys = encoded_keys(columns, self._keys, self._max_parallelism)
        pairs = zip(keys.in_table(self.table.number), encode_times(times_ms), strict=True)
        rows = [row[:PREFIX_BYTES] + time + row[PREFIX_BYTES:] for row, time in pairs]
        if has is None:
            has = np.array(self._database.contains(rows), np.bool_)
        is_new, is_gone = is_wanted & ~has, has & ~is_wanted
        changes = Changes()
        changes.mark([rows[at] for at in np.flatnonzero(is_new).tolist()])
        changes.delete([rows[at] for at in np.flatnonzero(is_gone).tolist()])
        self._database.write(changes)
        self.count += int(is_new.sum()) - int(is_gone.sum())
        self._note(keys.groups[is_new], times_ms[is_new])

    def _note(self, groups: Words, times_ms: Words) -> None:
        first = groups[~self._has[groups]]
        self._from_ms[first] = np.iinfo(np.int64).max
        self._has[first] = True
        np.minimum.at(self._from_ms, groups, times_ms)

    def take_first(self, rows_max: int) -> tuple[Timers, int]:
        """Remove the first timers, about ``rows_max`` at most: all those before a time, which is returned.

        Those of one time are not parted: there may be more of them. ``EVER_MS``: these were the last ones.
        """
        groups = np.flatnonzero(self._has)
        groups = groups[np.argsort(self._from_ms[groups], kind="stable")]
        found: list[bytes] = []
        cut_ms, share = EVER_MS, max(1, rows_max // max(1, len(groups)))
        for group in groups.tolist():
            if self._from_ms[group] >= cut_ms:
                break
            rows = self._read(group, share, None)
            found += rows
            if len(rows) == share:  # there may be more for the last time of these
                cut_ms = min(cut_ms, int(decode_times(rows[-1:], PREFIX_BYTES)[0]))
        if found and cut_ms < EVER_MS:
            first_ms = int(decode_times(found, PREFIX_BYTES).min())
            if cut_ms == first_ms:
                found, cut_ms = self._all_of(groups.tolist(), first_ms), first_ms + 1
        return self._remove(found, cut_ms), cut_ms

    def all(self) -> Iterator[Timers]:
        """Yield all timers, those of a key group together; change none meanwhile."""
        for group in np.flatnonzero(self._has).tolist():
            yield self.table.timers(self._read(group, self.count, None))

    def _read(self, group: int, rows_max: int, until_ms: int | None) -> list[bytes]:
        """Return the first timers of a key group, and take note of when they begin."""
        table = self.table
        end = table.end(group) if until_ms is None or until_ms >= EVER_MS else table.start(group, until_ms)
        rows, _ = self._database.some(table.start(group, int(self._from_ms[group])), rows_max, end)
        if rows:
            self._from_ms[group] = decode_times(rows[:1], PREFIX_BYTES)[0]
        elif until_ms is None:
            self._has[group] = False
        return rows

    def _all_of(self, groups: Sequence[int], time_ms: int) -> list[bytes]:
        """Return all timers for ``time_ms``, before which there is none."""
        found: list[bytes] = []
        for group in groups:
            if self._has[group] and self._from_ms[group] <= time_ms:
                found += self._read(group, self.count, time_ms + 1)
        return found

    def _remove(self, rows: list[bytes], cut_ms: int) -> Timers:
        """Remove those of ``rows`` that are before ``cut_ms``; return them."""
        columns, times_ms = self.table.timers(rows)
        if cut_ms < EVER_MS:
            taken = np.flatnonzero(times_ms < cut_ms)
            rows = [rows[at] for at in taken.tolist()]
            columns, times_ms = [column.take(pa.array(taken)) for column in columns], times_ms[taken]
            self._from_ms[self._has] = np.maximum(self._from_ms[self._has], cut_ms)
        else:
            self._has[:] = False
        changes = Changes()
        changes.delete(rows)
        self._database.write(changes)
        self.count -= len(rows)
        return columns, times_ms
