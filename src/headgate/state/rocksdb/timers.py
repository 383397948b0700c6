"""Timers in RocksDB: the next ones in memory, the others in the database (docs/spec/rocksdb.md).

In the database a timer is ``key group | table | time | hash of the key | key``, without a value. So within a key group
timers are in the order in which they fire, and the first ones are read without the others. Timers before a
place, the *horizon*, are in memory, as state in memory holds them, so that they fire in the same order. When none is
left, the next ones are read; when there are too many, the last ones are stored, and the horizon comes nearer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.backend import TimeKind, timer_section
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Hashes, Words, hash_columns
from headgate.state.key_index import Slots
from headgate.state.memory.timers import MemoryColumnTimers, MemoryRowTimers, TimerOps, key_arrays, latest_changes
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.local_databases import LocalDatabase
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
from headgate.state.rocksdb.tables import TABLES_MAX
from headgate.state.values import Mask, keys_of

_NUMBERS = {TimeKind.EVENT_TIME: TABLES_MAX, TimeKind.PROCESSING_TIME: TABLES_MAX + 1}
"""Of the tables: after those of all states, however many an operator has."""

_HASH_AT = PREFIX_BYTES + TIME_BYTES
_KEY_AT = _HASH_AT + HASH_BYTES
_HASH_MAX = (1 << 64) - 1
_TIME_MAX = (1 << 63) - 1

_READ_MIN = 2
"""So many timers of a key group are read at least: one alone would say nothing of what comes after it."""

Timers: TypeAlias = tuple[list[pa.Array], Words]
"""Key columns and times."""


class Place(NamedTuple):
    """Where a timer is in the order of all: its time, then the hash of its key. Timers of one place stay together."""

    time_ms: int
    hash: int

    @property
    def next(self) -> Place:
        """The first place after this one."""
        return Place(self.time_ms, self.hash + 1) if self.hash < _HASH_MAX else Place(self.time_ms + 1, 0)

    def is_after(self, times_ms: Words, hashes: Hashes) -> Mask:
        """Return which timers come before this place."""
        if self.time_ms > _TIME_MAX:
            return np.ones(len(times_ms), np.bool_)
        found: Mask = (times_ms < self.time_ms) | ((times_ms == self.time_ms) & (hashes < np.uint64(self.hash)))
        return found


END_OF_TIME = Place(_TIME_MAX + 1, 0)
"""After every timer."""

BEGINNING_OF_TIME = Place(-_TIME_MAX - 1, 0)
"""Before every timer."""


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

    def continue_from(self, count: int, groups: range) -> None:
        """The database has ``count`` timers now, of keys in ``groups``."""
        self.count = count
        self._has[groups.start : groups.stop] = count > 0
        self._from_ms[:], self._from_hash[:] = BEGINNING_OF_TIME

    def _write(self, columns: Sequence[pa.Array], times_ms: Words, is_wanted: Mask, has: Mask | None) -> None:
        keys = encoded_keys(columns, self._keys, self._max_parallelism)
        parts = keys.in_table(self.table.number), encode_times(times_ms), encode_hashes(keys.hashes)
        rows = [row[:PREFIX_BYTES] + time + hash_ + row[PREFIX_BYTES:] for row, time, hash_ in zip(*parts, strict=True)]
        # not known: the database is asked, or a timer that is there already would be counted twice
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
        # those that begin first: when one begins after the cut, so do all that follow
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
            # there is nothing up to the end: not looked at again before a timer is added
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
            # those that are not before the cut stay in the database, and are read again later
            columns, times_ms = [column.take(pa.array(taken)) for column in columns], times_ms[taken]
            self._begin(np.flatnonzero(self._has & cut.is_after(self._from_ms, self._from_hash)), *cut)
        changes = Changes()
        changes.delete(rows)
        self._database.write(changes)
        self.count -= len(rows)
        assert self.count >= 0, "each timer in the database is counted once"
        return columns, times_ms


def _place(row: bytes) -> Place:
    return Place(int(decode_times([row], PREFIX_BYTES)[0]), int(decode_hashes([row], _HASH_AT)[0]))


FRONT_MAX = 65_536
"""So many timers of one kind are in memory, or as many as an eighth of the cache has room for."""

TIMER_BYTES = 512
"""A timer in memory is taken to be so large."""

WAITING_MAX = 16_384
"""So many timers may wait to be written to the database together."""

_FRONT_SHARE = 8


class Front(Protocol):
    """The timers in memory."""

    def __len__(self) -> int:
        """Return how many there are, or somewhat more."""

    def next_ms(self) -> int | None:
        """See ``RowTimers`` and ``ColumnTimers``."""


FrontT = TypeVar("FrontT", bound=Front)


class RocksTimers(Generic[FrontT]):
    """What both forms share.

    Attributes:
        front: the timers before the horizon.
        stored: the others, but for those that wait to be written.
    """

    def __init__(self, keys: KeyColumns, front: FrontT, stored: StoredTimers, local: LocalDatabase) -> None:
        self._keys = keys
        self.front = front
        self.stored = stored
        self._local = local
        self._horizon = END_OF_TIME
        self._split_at = 0

    def __len__(self) -> int:
        self.write_back()
        return len(self.front) + self.stored.count

    @property
    def _front_max(self) -> int:
        return max(1, min(FRONT_MAX, self._local.cache_bytes // _FRONT_SHARE // TIMER_BYTES))

    def next_ms(self) -> int | None:
        """See ``RowTimers`` and ``ColumnTimers``."""
        found = self.front.next_ms()
        while found is None and self._bring():
            found = self.front.next_ms()
        return found

    def _bring(self) -> bool:
        """Have more timers in memory, of which all have fired or were deleted; return False if there are no more."""
        # nothing is in the database: all timers are in front
        if self._horizon == END_OF_TIME:
            return False
        # first: a timer that was deleted, and waits to be, would come back with those that are read
        self.write_back()
        found, self._horizon = self.stored.take_first(self._front_max)
        self._take_in(found)
        return True

    def tidy(self) -> None:
        """Store the last timers, if there are many, and write what waits, if that is much. Between batches."""
        if self._waiting_count() >= WAITING_MAX:
            self.write_back()
        if len(self.front) <= self._front_max:
            self._split_at = 0
        elif len(self.front) > self._split_at:
            self.write_back()
            columns, times_ms = self._split(self._front_max // 2)
            if len(times_ms):
                self._horizon = self._first_place(columns, times_ms)
                self.stored.add(columns, times_ms)
            self._split_at = 2 * len(self.front)  # those of one place stay together

    def restore(self, columns: Sequence[pa.Array], times_ms: Words) -> None:
        """Add timers of a snapshot; each of them once, and before anything else."""
        assert self._waiting_count() == 0, "a restore comes before anything is registered"
        # all are in the database: the first ones come from there when they are asked for
        self._horizon = BEGINNING_OF_TIME
        self.stored.add(columns, times_ms)

    def continue_from(self, count: int, groups: range) -> None:
        """The database has ``count`` timers now, of keys in ``groups``; nothing else was done yet."""
        assert self._waiting_count() == 0, "a restore comes before anything is registered"
        self._horizon = BEGINNING_OF_TIME
        self.stored.continue_from(count, groups)

    def _hashes(self, columns: Sequence[pa.Array]) -> Hashes:
        names = self._keys.section_names
        return hash_columns(pa.RecordBatch.from_arrays(list(columns), names=names), names)

    def _first_place(self, columns: Sequence[pa.Array], times_ms: Words) -> Place:
        hashes = self._hashes(columns)
        first = np.lexsort((hashes, times_ms))[0]
        return Place(int(times_ms[first]), int(hashes[first]))

    def write_back(self) -> None:
        """Have everything in the database that is not before the horizon."""
        raise NotImplementedError

    def _waiting_count(self) -> int:
        raise NotImplementedError

    def _take_in(self, found: Timers) -> None:
        raise NotImplementedError

    def _split(self, count: int) -> Timers:
        raise NotImplementedError


class RocksRowTimers(RocksTimers[MemoryRowTimers]):
    """See ``timers.RowTimers``."""

    def __init__(
        self, keys: KeyColumns, stored: StoredTimers, local: LocalDatabase, load: Callable[[list[Any]], None]
    ) -> None:
        """``load``: has what keys have in the cache."""
        super().__init__(keys, MemoryRowTimers(keys), stored, local)
        self._load = load
        self._waiting: dict[tuple[int, Any], bool] = {}
        """By time and key, whether the timer is to be there."""

    def register(self, key: Any, time_ms: int) -> None:
        if self._is_near(key, time_ms):
            self.front.register(key, time_ms)
        else:
            self._waiting[time_ms, key] = True

    def delete(self, key: Any, time_ms: int) -> None:
        if self._is_near(key, time_ms):
            self.front.delete(key, time_ms)
        else:
            self._waiting[time_ms, key] = False

    def _is_near(self, key: Any, time_ms: int) -> bool:
        """Whether a timer is before the horizon."""
        if time_ms != self._horizon.time_ms:
            return time_ms < self._horizon.time_ms
        # hashed only at the time of the horizon: a column for a single key is slow
        return int(self._hashes(key_arrays(self._keys, [key]))[0]) < self._horizon.hash

    def take(self, until_ms: int, keys_max: int) -> tuple[int, list[Any]] | None:
        """See ``RowTimers``. What the keys have is loaded."""
        found = self.front.take(until_ms, keys_max)
        while found is None and self._horizon.time_ms <= until_ms and self._bring():
            found = self.front.take(until_ms, keys_max)
        if found is not None:
            self._load(found[1])
        return found

    def all(self) -> Iterator[tuple[int, Any]]:
        self.write_back()
        yield from self.front.all()
        for columns, times_ms in self.stored.all():
            yield from zip(times_ms.tolist(), keys_of(columns), strict=True)

    def tidy(self) -> None:
        self.front.cells.absorb()
        super().tidy()

    def write_back(self) -> None:
        if self._waiting:
            columns, times_ms = self._columns([key for _, key in self._waiting], [time for time, _ in self._waiting])
            self.stored.change(columns, times_ms, np.array(list(self._waiting.values()), np.bool_))
            self._waiting = {}

    def _waiting_count(self) -> int:
        return len(self._waiting)

    def _columns(self, keys: list[Any], times_ms: list[int]) -> Timers:
        return key_arrays(self._keys, keys), np.array(times_ms, np.int64)

    def _take_in(self, found: Timers) -> None:
        columns, times_ms = found
        for key, time_ms in zip(keys_of(columns), times_ms.tolist(), strict=True):
            self.front.register(key, time_ms)

    def _split(self, count: int) -> Timers:
        removed = [(key, time_ms) for time_ms, keys in self.front.split(count).items() for key in keys]
        if not removed:
            return [], np.empty(0, np.int64)
        return self._columns([key for key, _ in removed], [time_ms for _, time_ms in removed])


class RocksColumnTimers(RocksTimers[MemoryColumnTimers]):
    """See ``timers.ColumnTimers``. Keys have slots while a timer of theirs is in memory, or waits."""

    def __init__(self, keys: KeyColumns, slots: KeySlots, stored: StoredTimers, local: LocalDatabase) -> None:
        super().__init__(keys, MemoryColumnTimers(slots.hashes), stored, local)
        self._slots = slots
        self._waiting: list[TimerOps] = []

    def register(self, slots: Slots, times_ms: Words) -> None:
        self._change(slots, times_ms, self.front.register, 0)

    def delete(self, slots: Slots, times_ms: Words) -> None:
        self._change(slots, times_ms, self.front.delete, 1)

    def _change(self, slots: Slots, times_ms: Words, in_front: Callable[[Slots, Words], None], deleted: int) -> None:
        # the usual case: nothing is in the database
        if self._horizon == END_OF_TIME:
            in_front(slots, times_ms)
            return
        is_near = times_ms < self._horizon.time_ms
        is_at = np.flatnonzero(times_ms == self._horizon.time_ms)
        if len(is_at):
            is_near[is_at] = self._slots.hashes(slots[is_at]) < np.uint64(self._horizon.hash)
        in_front(slots[is_near], times_ms[is_near])
        if not is_near.all():
            self._waiting.append((times_ms[~is_near], (slots[~is_near] << 1) | deleted))

    def take(self, until_ms: int, rows_max: int) -> tuple[Slots, Words]:
        """See ``ColumnTimers``. What the keys have is loaded."""
        slots, times_ms = self.front.take(until_ms, rows_max)
        while not len(slots) and self._horizon.time_ms <= until_ms and self._bring():
            slots, times_ms = self.front.take(until_ms, rows_max)
        self._slots.load(slots)
        return slots, times_ms

    def write_back(self) -> None:
        if self._waiting:
            times_ms, changes = latest_changes(self._waiting)
            self.stored.change(self._slots.key_columns(changes >> 1), times_ms, changes & 1 == 0)
            self._waiting = []

    def _waiting_count(self) -> int:
        return sum(len(times_ms) for times_ms, _ in self._waiting)

    def _take_in(self, found: Timers) -> None:
        columns, times_ms = found
        if len(times_ms):
            self.front.register(self._slots.numbered(columns), times_ms)

    def _split(self, count: int) -> Timers:
        slots, times_ms = self.front.split(count)
        return self._slots.key_columns(slots), times_ms


class KeySlots(Protocol):
    """The keys of a backend by column."""

    def hashes(self, slots: Slots) -> Any:
        """Return the hashes of the keys of ``slots``."""

    def key_columns(self, slots: Slots) -> list[pa.Array]:
        """Return the key columns of ``slots``."""

    def numbered(self, columns: Sequence[pa.Array]) -> Slots:
        """Return the slots of keys; nothing is loaded."""

    def load(self, slots: Slots) -> None:
        """Have what the keys of ``slots`` have in the cache."""
