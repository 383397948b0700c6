"""Keyed state by row in RocksDB: see ``backend.RowBackend``; and its cache.

What is used stays in memory, what changed is written back. Two generations of a dict make the cache: what is used
moves to the young one, and the old one is given up when the young one is full. Objects are read and written thousands
at once; of a list or map only the elements and entries that differ from before are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.backend import (
    TIMERS,
    Ownership,
    RowTimers,
    TimeKind,
    TimersByKind,
    restored_states,
    restored_timers,
    timers_by_kind,
    timers_of_each_kind,
)
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.memory.timers import key_arrays, timer_batches, timers_count
from headgate.state.rocksdb.database import Changes, Rows
from headgate.state.rocksdb.database_restore import continue_from
from headgate.state.rocksdb.database_snapshot import AnyTable, ExtraSections, FrozenDatabase
from headgate.state.rocksdb.local_databases import LocalDatabase
from headgate.state.rocksdb.row_encoding import EncodedKeys, decode_columns, encode_columns, encoded_keys, places, timed
from headgate.state.rocksdb.tables import (
    Table,
    distinct_keys,
    entry_rows,
    load_entries,
    load_values,
    restore_rows,
    store_heads,
    store_values,
    tables_of,
)
from headgate.state.rocksdb.timers import RocksRowTimers, StoredTimers
from headgate.state.rocksdb.ttl import ExpiringTables
from headgate.state.snapshot import FrozenState, StoredFiles
from headgate.state.ttl import TTL_SECTION, StateTime, TtlMeta, drop_expired
from headgate.state.values import column_of, keys_of, python_values, stored_of

_ABSENT = object()
"""In the cache: the database has nothing for this key."""


class Stored(Protocol):
    """The objects of one state in the database."""

    def load(self, keys: Sequence[Any]) -> Mapping[Any, Any]:
        """Return the objects of those of ``keys`` that have one; they become the cache's."""

    def size(self, stored: Any) -> int:
        """Return how many rows an object is."""


class RocksCells:
    """One state: see ``backend.RowCells``.

    Attributes:
        rows_count: how many rows there are in all, as far as changes were taken (``take_changes``).
        young_rows: about how many rows the young generation holds; what is known to be absent counts as one.
    """

    def __init__(self, stored: Stored, all_keys: Callable[[], Iterable[Any]]) -> None:
        self._stored = stored
        self._all_keys = all_keys
        self._young: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}
        self._changed: dict[Any, Any] = {}
        self.rows_count = 0
        self.young_rows = 0

    @property
    def changed_count(self) -> int:
        """How many keys differ from the database, perhaps."""
        return len(self._changed)

    def get(self, key: Any) -> Any:
        found = self._young.get(key)
        if found is None:
            self.fetch((key,))
            found = self._young[key]
        return None if found is _ABSENT else found

    def writable(self, key: Any) -> Any:
        found = self.get(key)
        if found is not None and key not in self._changed:
            # a copy of what the database has: of a list or map only what differs from it is written
            self._changed[key] = found.copy()
        return found

    def put(self, key: Any, value: Any) -> None:
        if key not in self._changed:
            # read first, even if all of it is replaced: its rows are counted off, and removed
            self._changed[key] = self.get(key)
        self._young[key] = value

    def remove(self, key: Any) -> None:
        if self.get(key) is not None:
            self.put(key, _ABSENT)

    def keys(self) -> Iterable[Any]:
        return self._all_keys()

    def fetch(self, keys: Iterable[Any]) -> None:
        """Have ``keys`` in the young generation: those that are not in the cache are read together."""
        young, old, size = self._young, self._old, self._stored.size
        missing: dict[Any, None] = {}
        for key in keys:
            if key in young:
                continue
            found = old.pop(key, None)
            if found is None:
                missing[key] = None
                continue
            young[key] = found
            self.young_rows += 1 if found is _ABSENT else size(found)
        if missing:
            loaded = self._stored.load(list(missing))
            young.update({key: loaded.get(key, _ABSENT) for key in missing})
            self.young_rows += len(missing) - len(loaded) + sum(map(size, loaded.values()))

    def take_changes(self) -> list[tuple[Any, Any, Any]]:
        """Return what differs from the database: key, object there, object now (None: nothing). It is written now."""
        young, size = self._young, self._stored.size
        found = []
        for key, before in self._changed.items():
            now = young[key]
            now = None if now is _ABSENT else now
            found.append((key, before, now))
            had, has = (0 if one is None else size(one) for one in (before, now))
            self.rows_count += has - had
            assert self.rows_count >= 0, "each row is counted when it comes and when it goes"
            # what is absent takes a place in the cache, too
            self.young_rows += max(1, has) - max(1, had)
        self._changed = {}
        return found

    def age(self) -> None:
        """Give up what was not used since the last time. Called when there is no change to be taken."""
        assert not self._changed, "a change would be lost"
        self._old, self._young, self.young_rows = self._young, {}, 0


Encode: TypeAlias = Callable[[Sequence[Any]], EncodedKeys]
Change: TypeAlias = tuple[Any, Any, Any]
"""A key, its object in the database, its object now; None: nothing."""


@dataclass(frozen=True)
class StoredObjects(Stored):
    """What the kinds share."""

    table: Table
    rows: Rows
    encode: Encode

    def write(self, changes: Changes, found: Sequence[Change]) -> None:
        """Add what has to be written."""
        raise NotImplementedError

    def _values(self, stored: Sequence[Any]) -> list[bytes]:
        return self.table.codec.encode(_column(self.table, stored))


class StoredValues(StoredObjects):
    """An object per key, which is one row: a value, or a record."""

    def load(self, keys: Sequence[Any]) -> Mapping[Any, Any]:
        has, column = load_values(self.table, self.rows, self.encode(keys))
        objects = iter(_objects(self.table, column))
        return {key: next(objects) for key, is_there in zip(keys, has.tolist(), strict=True) if is_there}

    def size(self, stored: Any) -> int:
        return 1

    def write(self, changes: Changes, found: Sequence[Change]) -> None:
        has = np.array([now is not None for _, _, now in found], np.bool_)
        values = _column(self.table, [now for _, _, now in found if now is not None])
        store_values(self.table, changes, self.encode([key for key, _, _ in found]), has, values)


class _StoredEntries(StoredObjects):
    """Lists and maps: a row for each of several things of a key."""

    def size(self, stored: Any) -> int:
        return len(stored)

    def _loaded(self, keys: Sequence[Any]) -> Iterator[tuple[Any, list[bytes], list[Any]]]:
        """Yield each key that has anything, with suffixes and values."""
        entries = load_entries(self.table, self.rows, self.encode(keys))
        objects, at = _objects(self.table, entries.values), 0
        for key, count in zip(keys, entries.counts.tolist(), strict=True):
            if count:
                yield key, entries.suffixes[at : at + count], objects[at : at + count]
                at += count

    def _write(
        self,
        changes: Changes,
        found: Sequence[Change],
        put: Sequence[tuple[int, bytes, Any]],
        gone: Sequence[tuple[int, bytes]],
    ) -> None:
        """Write entries: the number of the key in ``found``, the suffix, and the value of what is put."""
        keys = self.encode([key for key, _, _ in found])
        changes.delete(entry_rows(self.table, keys, [number for number, _ in gone], [suffix for _, suffix in gone]))
        rows = entry_rows(self.table, keys, [number for number, _, _ in put], [suffix for _, suffix, _ in put])
        changes.put(rows, self._values([value for _, _, value in put]))
        store_heads(self.table, changes, keys, np.array([len(now or ()) for _, _, now in found], np.int64))


class StoredLists(_StoredEntries):
    """Lists: a row per element, in order."""

    def load(self, keys: Sequence[Any]) -> Mapping[Any, Any]:
        return {key: objects for key, _, objects in self._loaded(keys)}

    def write(self, changes: Changes, found: Sequence[Change]) -> None:
        longest = max((len(one) for _, before, now in found for one in (before, now) if one), default=0)
        suffixes = places(longest)
        put: list[tuple[int, bytes, Any]] = []
        gone: list[tuple[int, bytes]] = []
        for number, (_, before, now) in enumerate(found):
            old, new = before or (), now or ()
            for at, element in enumerate(new):
                # by identity: elements are replaced, but never changed in place
                if at >= len(old) or old[at] is not element:
                    put.append((number, suffixes[at], element))
            gone += [(number, suffixes[at]) for at in range(len(new), len(old))]
        self._write(changes, found, put, gone)


class StoredMaps(_StoredEntries):
    """Maps: a row per entry, in the order of the map keys' bytes. Those with a TTL come in that of expiry."""

    def load(self, keys: Sequence[Any]) -> Mapping[Any, Any]:
        return {key: self._map(suffixes, objects) for key, suffixes, objects in self._loaded(keys)}

    def _map(self, suffixes: list[bytes], objects: list[Any]) -> dict[Any, Any]:
        entries = zip(self._map_keys(suffixes), objects, strict=True)
        return dict(entries if self.table.ttl is None else sorted(entries, key=lambda entry: entry[1][1]))

    def _map_keys(self, suffixes: list[bytes]) -> list[Any]:
        (column,), _ = decode_columns(suffixes, self.table.outer[-1:], 0)
        return python_values(column)

    def write(self, changes: Changes, found: Sequence[Change]) -> None:
        put: list[tuple[int, Any, Any]] = []
        gone: list[tuple[int, Any]] = []
        for number, (_, before, now) in enumerate(found):
            old, new = before or {}, now or {}
            put += [(number, key, value) for key, value in new.items() if old.get(key) is not value]
            gone += [(number, key) for key in old if key not in new]
        suffixes = iter(self._suffixes([key for _, key, _ in put] + [key for _, key in gone]))
        encoded = [(number, next(suffixes), value) for number, _, value in put]
        self._write(changes, found, encoded, [(number, next(suffixes)) for number, _ in gone])

    def _suffixes(self, map_keys: Sequence[Any]) -> list[bytes]:
        return encode_columns([pa.array(map_keys, self.table.outer[-1])]) if map_keys else []


def stored_objects(table: Table, rows: Rows, encode: Encode) -> StoredObjects:
    """Return the objects of ``table``."""
    match table.kind:
        case StateKind.VALUE:
            return StoredValues(table, rows, encode)
        case StateKind.LIST:
            return StoredLists(table, rows, encode)
        case StateKind.MAP:
            return StoredMaps(table, rows, encode)


def _column(table: Table, stored: Sequence[Any]) -> pa.Array:
    """Return objects as a column of the table's type."""
    if table.ttl is not None:
        plain = replace(table, ttl=None)
        return timed(_column(plain, [value for value, _ in stored]), pa.array([at for _, at in stored], pa.int64()))
    return column_of(stored, table.dtype)


def _objects(table: Table, column: pa.Array) -> list[Any]:
    """Return a column of the table's type as objects."""
    if table.ttl is not None:
        values, expires_ms = column.flatten()
        return list(zip(_objects(replace(table, ttl=None), values), expires_ms.to_pylist(), strict=True))
    return stored_of(column)


CHANGES_MAX = 16_384
"""So many keys may differ from the database: the pause of a checkpoint is bounded by it."""

CACHE_ROW_BYTES = 512
"""A row in the cache, Python objects with their places in dicts, is taken to be so large, beside its value."""

_COPIES = 2
"""An object is larger than the bytes that it is stored as."""

_ENCODE_TIMES = 16_384


class CachedObjects:
    """The cells of the states of one database, and what of them is written back and given up."""

    def __init__(
        self,
        local: LocalDatabase,
        keys: KeyColumns,
        max_parallelism: int,
        tables: Sequence[Table],
        time: StateTime | None = None,
    ) -> None:
        self._local = local
        self._keys = keys
        self._max_parallelism = max_parallelism
        self.time = StateTime() if time is None else time
        self._expiring = ExpiringTables(local.database, keys, tables, self.time)
        self._stored: list[tuple[RocksCells, StoredObjects]] = []
        for table in tables:
            stored = stored_objects(table, local.database, self._encoded)
            self._stored.append((RocksCells(stored, self._keys_in((table,))), stored))

    @property
    def cells(self) -> list[RocksCells]:
        """The cells of each table, in their order."""
        return [cells for cells, _ in self._stored]

    def _encoded(self, keys: Sequence[Any]) -> EncodedKeys:
        return encoded_keys(key_arrays(self._keys, keys), self._keys, self._max_parallelism)

    def _keys_in(self, tables: Sequence[Table]) -> Callable[[], list[Any]]:
        def found() -> list[Any]:
            self.write_back()
            columns = distinct_keys(self._local.database, tables, self._keys, self.time.now_ms)
            return keys_of(columns)

        return found

    def all_keys(self) -> list[Any]:
        """Return the keys that have anything, from the database."""
        return self._keys_in([stored.table for _, stored in self._stored])()

    def tidy(self) -> None:
        """Write back what is much, and give up what does not fit. Called when no object is in use."""
        changed = sum(cells.changed_count for cells, _ in self._stored)
        if self._local.needs_write_back(changed, changed * self._row_bytes(), CHANGES_MAX):
            self.write_back()
        row_bytes = self._row_bytes()
        # twice: there are two generations, and the young one may take half of the room
        if 2 * sum(cells.young_rows for cells, _ in self._stored) * row_bytes > self._local.cache_bytes:
            self.write_back()
            for cells, _ in self._stored:
                cells.age()

    def drop_some_that_expired(self) -> None:
        """Go on through the database; what has expired of the keys that are met goes with the next write."""
        cells = {stored.table.number: cells for cells, stored in self._stored}
        for table, columns in list(self._expiring.sweep()):
            keys, found = dict.fromkeys(keys_of(columns)), cells[table.number]
            found.fetch(keys)
            for key in keys:
                drop_expired(found, key, self.time.now_ms)

    def _row_bytes(self) -> int:
        return self._local.row_bytes(CACHE_ROW_BYTES, _COPIES)

    def write_back(self) -> None:
        """Have everything in the database."""
        changes = Changes()
        for cells, stored in self._stored:
            found = cells.take_changes()
            if found:
                stored.write(changes, found)
        # one batch, so that a key has all or nothing of it; if it fails, the generation ends with what was taken
        self._local.database.write(changes)

    def freeze(self, beside: ExtraSections, timers: Sequence[StoredTimers] = ()) -> FrozenState:
        """Return everything as it is now. ``timers``: those in the database."""
        # before the counts are looked at: they know of changes once these are taken
        self.write_back()
        assert not any(cells.changed_count for cells in self.cells), "what is frozen is in the database"
        tables: list[AnyTable] = [stored.table for _, stored in self._stored]
        tables += [one.table for one in timers]
        counts = {stored.table.section.name: cells.rows_count for cells, stored in self._stored}
        counts |= {one.table.section.name: one.count for one in timers}
        return FrozenDatabase(self._local, self._local.checkpoint(), tables, counts, beside)

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``. What is restored goes to the database; nothing is in the cache yet."""
        for cells, stored in self._stored:
            for found in restored_states(sections, stored.table.section, path, owner):
                batch = self._expiring.restored(stored.table, found)
                restore_rows(stored.table, self._local.database, self._keys, self._max_parallelism, batch)
                cells.rows_count += batch.num_rows

    def end_restore(self) -> None:
        self._expiring.end_restore()

    def continue_from(self, stored: StoredFiles, owner: Ownership, timers: Sequence[RocksRowTimers] = ()) -> bool:
        """See ``ContinuingBackend``. ``timers``: those in the database."""
        # a database takes the place of this one whole: whatever is in it would be lost
        if any(cells.rows_count for cells in self.cells) or any(map(len, timers)):
            return False
        tables: list[AnyTable] = [found.table for _, found in self._stored]
        tables += [one.stored.table for one in timers]
        continued = continue_from(self._local, stored, tables, owner)
        if continued is None:
            return False
        for cells, found in self._stored:
            cells.rows_count = continued.rows[found.table.section.name]
        for one in timers:
            one.continue_from(continued.rows[one.stored.table.section.name], continued.groups)
        self._expiring.continue_from(continued.latest_ms)
        return True


class RocksRowBackend:
    """See ``backend.RowBackend``."""

    timers: TimersByKind[RowTimers] | None

    def __init__(
        self,
        local: LocalDatabase,
        keys: KeyColumns,
        descriptors: Sequence[StateDescriptor],
        max_parallelism: int,
        *,
        has_timers: bool = False,
    ) -> None:
        self._keys = keys
        self.time = StateTime()
        tables = tables_of(keys, descriptors)
        self._objects = CachedObjects(local, keys, max_parallelism, list(tables.values()), self.time)
        self._has_ttl = any(descriptor.ttl is not None for descriptor in descriptors)
        self._cells = dict(zip(tables, self._objects.cells, strict=True))

        def timers(kind: TimeKind) -> RocksRowTimers:
            return RocksRowTimers(keys, StoredTimers(local.database, kind, keys, max_parallelism), local, self._load)

        self._timers = timers_of_each_kind(timers) if has_timers else {}
        self.timers = timers_by_kind(self._timers)

    def cells(self, descriptor: StateDescriptor) -> RocksCells:
        return self._cells[descriptor]

    def end_restore(self) -> None:
        self._objects.end_restore()

    def expect(self, columns: Sequence[pa.Array]) -> None:
        """See ``RowBackend``: what the keys have is read at once."""
        self._load(list(dict.fromkeys(keys_of(columns))))

    def _load(self, keys: list[Any]) -> None:
        for cells in self._cells.values():
            cells.fetch(keys)

    def all_keys(self) -> list[Any]:
        """See ``RowBackend``. Reads the whole database."""
        return self._objects.all_keys()

    def absorb(self) -> None:
        self._objects.drop_some_that_expired()
        self._objects.tidy()
        for timers in self._timers.values():
            timers.tidy()

    def freeze(self) -> FrozenState:
        # before the checkpoint of the database: timers that wait belong to it
        for timers in self._timers.values():
            timers.write_back()
        return self._objects.freeze(self._extra(), [timers.stored for timers in self._timers.values()])

    def _extra(self) -> ExtraSections:
        meta = {TTL_SECTION: TtlMeta(self.time.now_ms).encode()} if self._has_ttl else {}
        if self.timers is None:
            return ExtraSections(meta=meta, now_ms=self.time.now_ms)
        # those in front are in no file: they go into the snapshot as rows beside it
        frozen = [(found.stored.table.section, found.front.cells.freeze()) for found in self._timers.values()]

        def forget() -> None:
            for _, cells in frozen:
                cells.release()

        return ExtraSections(
            lambda: [(one, list(timer_batches(one, self._keys, cells, _ENCODE_TIMES))) for one, cells in frozen],
            lambda: {section.name: timers_count(cells) for section, cells in frozen},
            {TIMERS: self.timers.meta.encode(), **meta},
            self.time.now_ms,
            forget,
        )

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        self._objects.restore(sections, path, owner)
        for timers, batch in restored_timers(sections, self._keys, self._timers, path, owner):
            timers.restore(batch.columns[:-1], batch.columns[-1].to_numpy())

    def continue_from(self, stored: StoredFiles, owner: Ownership) -> bool:
        return self._objects.continue_from(stored, owner, list(self._timers.values()))
