"""Timers of one kind in a database: ``key group | table | time | hash of the key | key``, without a value (RB11).

So within a key group they are in the order in which they fire (TM5), and those that come first are read without the
others. Counterpart: ``timers``, which has the next ones in memory; what is there is not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Hashes, Words
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.row_encoding import (
    HASH_BYTES,
    PREFIX_BYTES,
    TIME_BYTES,
    decode_columns,
    decode_hashes,
    decode_times,
    encode_hashes,
    encode_times,
    encoded_keys,
)
from headgate.state.timers import TimeKind, timer_section
from headgate.state.vectors import Mask

_NUMBERS = {TimeKind.EVENT_TIME: 0xFFFE, TimeKind.PROCESSING_TIME: 0xFFFF}
"""Of the tables: behind those of all states, however many an operator has."""

_HASH_AT = PREFIX_BYTES + TIME_BYTES
_KEY_AT = _HASH_AT + HASH_BYTES
_HASH_MAX = (1 << 64) - 1
_TIME_MAX = (1 << 63) - 1

_READ_MIN = 2
"""So many timers of a key group are read at least: one alone would say nothing of what comes behind it."""

Timers: TypeAlias = tuple[list[pa.Array], Words]
"""Key columns and times."""


class Place(NamedTuple):
    """Where a timer is in the order of all: its time, then the hash of its key. Timers of one place stay together."""

    time_ms: int
    hash: int

    @property
    def next(self) -> Place:
        """The first place behind this one."""
        return Place(self.time_ms, self.hash + 1) if self.hash < _HASH_MAX else Place(self.time_ms + 1, 0)

    def is_after(self, times_ms: Words, hashes: Hashes) -> Mask:
        """Return which timers come before this place."""
        if self.time_ms > _TIME_MAX:
            return np.ones(len(times_ms), np.bool_)
        found: Mask = (times_ms < self.time_ms) | ((times_ms == self.time_ms) & (hashes < np.uint64(self.hash)))
        return found


END_OF_TIME = Place(_TIME_MAX + 1, 0)
"""Behind every timer."""

BEGINNING_OF_TIME = Place(-_TIME_MAX - 1, 0)
"""Not behind any timer."""


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
        return decode_columns(rows, self.types, _KEY_AT)[0], decode_times(rows, PREFIX_BYTES)

    def start(self, group: int, place: Place) -> bytes:
        """Return where the timers of a key group begin that are not before ``place``."""
        if place == END_OF_TIME:
            return ((group << 16) + self.number + 1).to_bytes(PREFIX_BYTES, "big")
        prefix = group.to_bytes(2, "big") + self.number.to_bytes(2, "big")
        return prefix + encode_times(np.array([place.time_ms]))[0] + place.hash.to_bytes(HASH_BYTES, "big")


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
        self._from_hash = np.zeros(max_parallelism, np.uint64)
        """A place before which such a group has none: what was removed there is not looked at again."""

    def add(self, columns: Sequence[pa.Array], times_ms: Words) -> None:
        """Add timers, all different, that are not here."""
        self._write(columns, times_ms, np.ones(len(times_ms), np.bool_), np.zeros(len(times_ms), np.bool_))

    def change(self, columns: Sequence[pa.Array], times_ms: Words, is_wanted: Mask) -> None:
        """Add timers, all different, or remove them; nothing happens where that is so already."""
        if len(times_ms):
            self._write(columns, times_ms, is_wanted, None)

    def go_on_with(self, count: int, groups: range) -> None:
        """The database has ``count`` timers now, of keys in ``groups`` (RB24)."""
        self.count = count
        self._has[groups.start : groups.stop] = count > 0
        self._from_ms[:], self._from_hash[:] = BEGINNING_OF_TIME

    def _write(self, columns: Sequence[pa.Array], times_ms: Words, is_wanted: Mask, has: Mask | None) -> None:
        keys = encoded_keys(columns, self._keys, self._max_parallelism)
        parts = keys.in_table(self.table.number), encode_times(times_ms), encode_hashes(keys.hashes)
        rows = [row[:PREFIX_BYTES] + time + hash_ + row[PREFIX_BYTES:] for row, time, hash_ in zip(*parts, strict=True)]
        if has is None:
            has = np.array(self._database.contains(rows), np.bool_)
        is_new, is_gone = is_wanted & ~has, has & ~is_wanted
        changes = Changes()
        changes.mark([rows[at] for at in np.flatnonzero(is_new).tolist()])
        changes.delete([rows[at] for at in np.flatnonzero(is_gone).tolist()])
        self._database.write(changes)
        self.count += int(is_new.sum()) - int(is_gone.sum())
        self._note(keys.groups[is_new], times_ms[is_new], keys.hashes[is_new])

    def _note(self, groups: Words, times_ms: Words, hashes: Hashes) -> None:
        """Take note of new timers: where a key group begins now."""
        order = np.lexsort((hashes, times_ms, groups))
        order = order[np.diff(groups[order], prepend=-1) > 0]  # the first one of each key group
        groups, times_ms, hashes = groups[order], times_ms[order], hashes[order]
        from_ms, from_hash = self._from_ms[groups], self._from_hash[groups]
        is_first = (times_ms < from_ms) | ((times_ms == from_ms) & (hashes < from_hash)) | ~self._has[groups]
        self._begin(groups[is_first], times_ms[is_first], hashes[is_first])
        self._has[groups] = True

    def _begin(self, groups: Words, times_ms: Words | int, hashes: Hashes | int) -> None:
        self._from_ms[groups], self._from_hash[groups] = times_ms, hashes

    def take_first(self, rows_max: int) -> tuple[Timers, Place]:
        """Remove the first timers, about ``rows_max`` at most: all those before a place, which is returned.

        ``EVER``: these were the last ones.
        """
        groups = np.flatnonzero(self._has)
        groups = groups[np.argsort(self._from_ms[groups], kind="stable")]
        found: list[bytes] = []
        cut, share = END_OF_TIME, max(_READ_MIN, rows_max // max(1, len(groups)))
        for group in groups.tolist():
            if self._from_ms[group] > cut.time_ms:
                break
            rows, until = self._first(group, share)
            found += rows
            cut = min(cut, until)
        return self._remove(found, cut), cut

    def _first(self, group: int, rows_max: int) -> tuple[list[bytes], Place]:
        """Return the first timers of a key group, and a place: these are all that it has before that."""
        rows = self._read(group, rows_max, END_OF_TIME)
        if len(rows) < rows_max:
            return rows, END_OF_TIME
        first, last = _place(rows[0]), _place(rows[-1])
        if first < last:
            return rows, last  # there may be more at the place of the last one
        return self._read(group, self.count, first.next), first.next

    def all(self) -> Iterator[Timers]:
        """Yield all timers, those of a key group together; change none meanwhile."""
        for group in np.flatnonzero(self._has).tolist():
            yield self.table.timers(self._read(group, self.count, END_OF_TIME))

    def _read(self, group: int, rows_max: int, until: Place) -> list[bytes]:
        """Return the first timers of a key group, and take note of where they begin."""
        start = Place(int(self._from_ms[group]), int(self._from_hash[group]))
        table = self.table
        rows, _ = self._database.some(table.start(group, start), rows_max, table.start(group, until))
        if rows:
            self._begin(np.array([group]), *_place(rows[0]))
        elif until == END_OF_TIME:
            self._has[group] = False
        return rows

    def _remove(self, rows: list[bytes], cut: Place) -> Timers:
        """Remove those of ``rows`` that are before ``cut``; return them."""
        columns, times_ms = self.table.timers(rows)
        if cut == END_OF_TIME:
            self._has[:] = False
        else:
            taken = np.flatnonzero(cut.is_after(times_ms, decode_hashes(rows, _HASH_AT)))
            rows = [rows[at] for at in taken.tolist()]
            columns, times_ms = [column.take(pa.array(taken)) for column in columns], times_ms[taken]
            self._begin(np.flatnonzero(self._has & cut.is_after(self._from_ms, self._from_hash)), *cut)
        changes = Changes()
        changes.delete(rows)
        self._database.write(changes)
        self.count -= len(rows)
        return columns, times_ms


def _place(row: bytes) -> Place:
    return Place(int(decode_times([row], PREFIX_BYTES)[0]), int(decode_hashes([row], _HASH_AT)[0]))
